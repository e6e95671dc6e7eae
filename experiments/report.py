"""results.jsonl of an experiment -> the table in its README, and a figure.

python -m experiments.report experiments/0001_tiny_recall [--write | --check]

A row of results.jsonl is one run:
  {"name": "muon", "config": {"optim.lr": 0.02}, "commit": "23a1564",
   "device": "2 CPU cores", "wall_seconds": 251.3, "seed": 0,
   "metrics": {"validation_bits_per_byte": 1.97}}
`wall_seconds` is null where nobody took the time.
Rows of one name and one device are repetitions. The table has one line for
them, with n and, for every metric, the mean and the sample standard deviation.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys

BEGIN, END = "<!-- report.py: begin -->", "<!-- report.py: end -->"


def add_flags(parser):
  """Adds what `append` reads to a sweep's command line."""
  parser.add_argument("--commit", default="",
                      help="of the code that runs; asked from git if not given")
  parser.add_argument("--out", required=True, help="file to append rows to")


def append(flags, name, metrics, config=None, seed=0, wall_seconds=None):
  """Prints a run's row and appends it to a results file.

  Args:
    flags: the parsed command line of a parser that `add_flags` saw.
    name: of the run.
    metrics: name -> number.
    config: leaves in which it differs, or what else tells how to repeat it.
    seed: of the run.
    wall_seconds: that it took; None if nobody took the time.
  """
  import jax  # here: tables do not need it
  commit = flags.commit or subprocess.run(
      ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
      check=True).stdout.strip()
  row = json.dumps({
      "name": name, "config": config or {}, "commit": commit,
      "device": jax.devices()[0].device_kind, "seed": seed,
      "wall_seconds": wall_seconds, "metrics": metrics})
  print(row, flush=True)
  with open(flags.out, "a", encoding="utf-8") as file:
    file.write(row + "\n")


def record(flags, **row):
  """Prints a benchmark's row and appends it to `flags.out`, with its commit."""
  print("ROW", json.dumps(row), flush=True)
  with open(flags.out, "a", encoding="utf-8") as file:
    file.write(json.dumps(dict(row, commit=flags.commit)) + "\n")


def read(folder):
  """Returns the rows of a folder's results.jsonl, in the order written."""
  text = (pathlib.Path(folder) / "results.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines() if line.strip()]


def grouped(rows):
  """Returns {(name, device): rows}, in the order of first appearance."""
  groups = {}
  for row in rows:
    groups.setdefault((row["name"], row["device"]), []).append(row)
  return groups


def metric_names(rows):
  """Returns the metrics of all rows, in the order of first appearance."""
  return list(dict.fromkeys(name for row in rows for name in row["metrics"]))


def number(x):
  """Writes a number with four significant digits, thousands separated."""
  if x == 0 or not math.isfinite(x):
    return str(x)
  digits = max(0, 3 - math.floor(math.log10(abs(x))))
  return f"{x:,.{digits}f}"


def spread(values):
  """Writes mean and sample standard deviation; one value stands alone."""
  if not values:
    return ""
  mean = number(statistics.mean(values))
  if len(values) == 1:
    return mean
  return f"{mean} ± {statistics.stdev(values):.2g}"


def table(rows):
  """Returns the rows as a markdown table."""
  names = metric_names(rows)
  lines = [["run", "device", "n", *(name.replace("_", " ") for name in names),
            "wall seconds", "commit"]]
  lines.append(["---", "---"] + ["--:"] * (len(names) + 2) + ["---"])
  for (name, device), runs in grouped(rows).items():
    commits = dict.fromkeys(run["commit"] for run in runs)
    lines.append([
        name, device, str(len(runs)),
        *(spread([run["metrics"][metric] for run in runs
                  if metric in run["metrics"]]) for metric in names),
        spread([run["wall_seconds"] for run in runs
                if run["wall_seconds"] is not None]), ", ".join(commits)])
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def split(readme):
  """Returns the README's text before, between and after the two markers."""
  before, begin, rest = readme.partition(BEGIN)
  inside, end, after = rest.partition(END)
  if not begin or not end:
    raise ValueError(f"no table between {BEGIN} and {END}")
  return before, inside.strip(), after


def figure(rows, metric, path):
  """Draws a metric's mean, and every run as a dot, as `path`."""
  import matplotlib  # here: an extra, and tables do not need it
  matplotlib.use("agg")
  from matplotlib import pyplot

  groups = grouped(rows)
  drawing, axes = pyplot.subplots(figsize=(6, 0.5 + 0.4 * len(groups)))
  for height, runs in enumerate(groups.values()):
    values = [run["metrics"][metric] for run in runs
              if metric in run["metrics"]]
    if values:
      axes.barh(height, statistics.mean(values), color="#9db4c0")
      axes.plot(values, [height] * len(values), "k.", markersize=4)
  axes.set_yticks(range(len(groups)), [name for name, _ in groups])
  axes.invert_yaxis()
  axes.set_xlabel(metric.replace("_", " "))
  drawing.savefig(path, dpi=120, bbox_inches="tight")
  pyplot.close(drawing)


def main(argv=None):
  parser = argparse.ArgumentParser(prog="python -m experiments.report")
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--write", action="store_true",
                      help="put the table into README.md")
  parser.add_argument("--check", action="store_true",
                      help="fail unless README.md has this table")
  parser.add_argument("--figure", metavar="METRIC",
                      help="draw it as figure.png")
  flags = parser.parse_args(argv)
  rows, readme = read(flags.folder), flags.folder / "README.md"
  if flags.figure:
    figure(rows, flags.figure, flags.folder / "figure.png")
  if flags.write:
    before, _, after = split(readme.read_text())
    readme.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
  elif flags.check:
    if split(readme.read_text())[1] != table(rows):
      sys.exit(f"{readme} has another table; run with --write")
  else:
    print(table(rows))


if __name__ == "__main__":
  main()
