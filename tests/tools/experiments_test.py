"""An experiment's folder says what was asked, run, found, and how sure."""

import json
import pathlib
import re
import subprocess

import pytest

from experiments import report

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "experiments").glob("[0-9][0-9][0-9][0-9]_*"))
HEADINGS = ["Question", "Setup", "Result", "Verdict", "Threats"]


def git(*arguments):
  return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True,
                        text=True)


def headings(readme):
  """Returns the second-level headings, in order."""
  return re.findall(r"^## (\w+)", readme, re.MULTILINE)


def commits(readme, rows):
  """Returns what rows and README call a commit."""
  named = re.findall(r"\bcommits? `?([0-9a-f]{7,40})\b", readme)
  return sorted({*named, *(row["commit"] for row in rows)})


def is_ancestor(commit):
  return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folder_is_complete(folder):
  readme = (folder / "README.md").read_text()
  rows = report.read(folder)
  assert headings(readme) == HEADINGS
  assert report.split(readme)[1] == report.table(rows)
  assert (folder / "sweep.py").exists()
  assert folder.name in (ROOT / "experiments" / "LOG.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_commits_are_of_this_history(folder):
  if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
    pytest.skip("no git history here")
  readme = (folder / "README.md").read_text()
  found = commits(readme, report.read(folder))
  assert found and all(map(is_ancestor, found)), found


def test_foreign_commit_is_no_ancestor():
  assert not is_ancestor("0" * 40)
  assert commits("at commit `23a1564`", [{"commit": "f46f0ed"}]) == [
      "23a1564", "f46f0ed"]


def row(name, loss, seconds=10.):
  return {"name": name, "device": "cpu", "commit": "23a1564", "config": {},
          "wall_seconds": seconds, "metrics": {"loss": loss}}


def test_table_has_n_and_spread():
  text = report.table([row("a", 1.0), row("a", 2.0), row("b", 1234.5)])
  assert text.splitlines()[2:] == [
      "| a | cpu | 2 | 1.500 ± 0.71 | 10.00 ± 0 | 23a1564 |",
      "| b | cpu | 1 | 1,234 | 10.00 | 23a1564 |"]


def test_written_table_passes_the_check_and_an_edited_one_fails(tmp_path):
  rows = [row("a", 1.0), row("a", 3.0)]
  (tmp_path / "results.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in rows))
  readme = tmp_path / "README.md"
  readme.write_text(f"## Result\n\n{report.BEGIN}\n{report.END}\n\n## Verdict")
  report.main([str(tmp_path), "--write"])
  report.main([str(tmp_path), "--check"])
  assert readme.read_text().endswith("\n\n## Verdict")
  readme.write_text(readme.read_text().replace("2.000", "1.000"))
  with pytest.raises(SystemExit, match="another table"):
    report.main([str(tmp_path), "--check"])
