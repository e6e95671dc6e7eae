"""Faults of files: no state is lost, none is silently wrong."""
import os
import random
import shutil

import numpy as np
import pytest

from tests.ultralong_jax.train.checkpoint_states import (
    newest, shapes, state_at)
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import listing
from ultralong_jax.train import manifest

STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def states():
  return {step: state_at(step) for step in (*STEPS, 40)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, states):
  """Returns the folder of a run with checkpoints of three steps."""
  workdir = tmp_path_factory.mktemp("whole")
  checkpoints = checkpoint.Checkpoints(workdir, keep=3)
  for step in STEPS:
    checkpoints.save(states[step], {"position": step})
  checkpoints.close()
  return workdir


@pytest.fixture
def run(whole, tmp_path):
  """Returns a copy of it."""
  return shutil.copytree(whole, tmp_path / "run")


def files(folder):
  return sorted(path for path in folder.rglob("*") if path.is_file())


def arrays(folder):
  """Returns the files of a checkpoint that hold values."""
  return [path for path in files(folder) if path.parent.name == "d"]


def flip(path, bit):
  data = bytearray(path.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  path.write_bytes(data)


def test_flipped_bits_of_arrays_are_walked_back_from(run, states):
  folder = run / "checkpoints/30"
  draw = random.Random(0)
  paths = arrays(folder)
  sizes = [path.stat().st_size for path in paths]
  for path in draw.choices(paths, sizes, k=20):
    bit = draw.randrange(8 * path.stat().st_size)
    flip(path, bit)
    step, said = newest(run, states, read_only=True)
    assert step == 20
    assert f"{folder}: {path.relative_to(folder)}: other contents" in said
    flip(path, bit)
  assert newest(run, states) == (30, "")  # a bit is what made the difference


@pytest.mark.parametrize("fault, says", [
    (lambda path: path.write_bytes(path.read_bytes()[:-7]), "bytes instead"),
    (lambda path: path.write_bytes(b""), "0 bytes instead"),
    (lambda path: path.unlink(), "missing"),
], ids=["truncated", "empty", "deleted"])
def test_every_file_of_a_checkpoint_is_needed(run, states, fault, says):
  folder = run / "checkpoints/30"
  for path in files(folder):
    kept = path.read_bytes()
    fault(path)
    said = []
    checkpoints = checkpoint.Checkpoints(run, read_only=True, say=said.append)
    name = path.relative_to(folder).as_posix()
    assert checkpoints.latest() == 20, name
    if name == manifest.MARKER and says != "missing":
      says_now = "not what COMMITTED vouches for"
    elif name == manifest.MANIFEST and says != "missing":
      says_now = "not what COMMITTED vouches for"
    else:
      says_now = says
    assert f"checkpoint {folder}: {name}: " in said[0] or (
        name == manifest.MARKER)
    assert says_now in said[0] and len(said) == 1
    checkpoints.close()
    path.write_bytes(kept)
  fault(arrays(folder)[0])
  assert newest(run, states)[0] == 20  # and is restored bit for bit


def test_without_marker_and_manifest_it_is_no_checkpoint(run, states):
  for name in (manifest.MARKER, manifest.MANIFEST):
    (run / "checkpoints/30" / name).unlink()
  step, said = newest(run, states)
  assert step == 20 and "checkpoints/30: COMMITTED: missing" in said


def test_what_other_programs_leave_is_not_looked_at(run, states):
  (run / "checkpoints/30/.nfs0001").write_bytes(b"x")
  (run / "checkpoints/notes").mkdir()
  assert newest(run, states) == (30, "")


def test_a_checkpoint_in_another_steps_folder_is_passed_over(run, states):
  shutil.copytree(run / "checkpoints/30", run / "checkpoints/40")
  step, said = newest(run, states)
  assert step == 30 and "of step 30, in the folder of step 40" in said


def test_nothing_whole_is_nothing(run, states):
  for step in STEPS:
    (run / f"checkpoints/{step}" / manifest.MARKER).unlink()
  step, said = newest(run, states)
  assert step is None and said.count("passed over") == 3


def test_damaged_step_is_saved_again_and_kept_aside(run, states):
  flip(arrays(run / "checkpoints/30")[0], 99)
  checkpoints = checkpoint.Checkpoints(run, keep=3)
  checkpoints.save(states[30], {"position": 30})
  checkpoints.close()
  assert newest(run, states) == (30, "")
  assert (run / "checkpoints/abandoned/damaged/30").is_dir()


def test_format_1_is_restored_by_its_own_checksums(run, states):
  """Such as every checkpoint was before there were manifests."""
  folder = run / "checkpoints/30"
  for name in (manifest.MARKER, manifest.MANIFEST):
    (folder / name).unlink()
  record = folder / manifest.RECORD
  record.write_text(record.read_text().replace('"format": 2, ', "").replace(
      ', "format": 2', ""))
  assert newest(run, states) == (30, "")
  restored = checkpoint.Checkpoints(run)
  record.write_text(record.read_text().replace(
      '"params:w_DF": ', '"params:w_DF": 1'))
  with pytest.raises(check.Refusal, match="30 is damaged: params:w_DF"):
    restored.restore(30, shapes())
  restored.close()


def test_a_rollback_leaves_nothing_that_a_resume_would_take(run, states):
  checkpoints = checkpoint.Checkpoints(run, keep=9)
  with pytest.raises(check.Refusal, match=r"\[20, 30\].*quarantine\(19\)"):
    checkpoints.save(states[20], {"position": 20})
  moved = checkpoints.quarantine(10)
  away = run / "checkpoints/abandoned/0"
  assert moved == [away / "20", away / "30"]
  assert all(path.is_dir() for path in moved)
  assert checkpoints.latest() == 10
  checkpoints.save(states[20], {"position": 20})
  checkpoints.close()
  assert newest(run, states) == (20, "")
  rows = {row.name: row for row in listing.inspect(run)}
  assert rows["20"].branch == "1" and rows["10"].branch == "0"
  assert rows["abandoned/0/20"].branch == "0"
  assert all(row.verified for row in rows.values())


def test_a_rollback_cut_short_is_ended_by_whoever_opens_next(run, states):
  checkpoints = checkpoint.Checkpoints(run)
  checkpoints.quarantine(10)
  checkpoints.close()
  os.rename(run / "checkpoints/abandoned/0/30", run / "checkpoints/30")
  step, said = newest(run, states, read_only=True)
  assert step == 10 and "abandoned by the rollback to step 10" in said
  assert newest(run, states) == (10, "")
  assert (run / "checkpoints/abandoned/0/30").is_dir()


def test_damaged_ones_do_not_count_as_kept(run, states):
  arrays(run / "checkpoints/30")[0].unlink()
  checkpoints = checkpoint.Checkpoints(run, keep=2)
  checkpoints.save(states[40], {"position": 40})
  checkpoints.close()
  # Of 40, 30 and 20 two are whole; what is older than these is gone.
  assert checkpoints.steps() == [20, 40]
  assert not (run / "checkpoints/10").exists()
  arrays(run / "checkpoints/40")[0].unlink()
  assert newest(run, states)[0] == 20


def test_a_commit_between_marker_and_name_is_a_commit(run, states):
  os.rename(run / "checkpoints/30", run / "checkpoints/30.saving")
  assert newest(run, states) == (30, "")


def test_the_listing_says_what_is_whole(run):
  rows = listing.inspect(run)
  assert [row.step for row in rows] == ["10", "20", "30"]
  assert all(row.verified and row.tier == "full" for row in rows)
  assert rows[0].bytes > 2 * 4 * 64 * 64 / 2  # compressed, of random bits
  assert listing.newest_verifies(rows)
  flip(arrays(run / "checkpoints/20")[0], 1)
  assert listing.newest_verifies(listing.inspect(run))
  flip(arrays(run / "checkpoints/30")[0], 1)
  (run / "checkpoints/40.saving/model").mkdir(parents=True)
  (run / "checkpoints/50").write_text("a file")
  (run / "checkpoints/abandoned/0/25").mkdir(parents=True)
  before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
  rows = listing.inspect(run)
  states = {row.name: row.state for row in rows}
  assert states["10"] == "verified" and "d/" in states["30"]
  assert states["40.saving"] == "not committed"
  assert states["50"].startswith("damaged")
  assert states["abandoned/0/25"].startswith("abandoned: damaged: record")
  assert not listing.newest_verifies(rows)
  assert len(listing.table(rows).splitlines()) == 1 + len(rows)
  assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
  assert not listing.newest_verifies([])


def test_the_manifest_says_what_it_holds(run):
  found = manifest.verify(run / "checkpoints/30")
  assert found["step"] == 30 and found["branch"] == 0
  entry = found["arrays"]["params:w_DF"]
  assert entry["shape"] == [64, 64] and entry["dtype"] == "float32"
  assert {"model/_METADATA", manifest.RECORD} < set(found["files"])
  prints = manifest.fingerprints(
      {"config": "c", "data": {"files": "f", "tokenizer": "t"}})
  other = manifest.fingerprints(
      {"config": "c", "data": {"files": "g", "tokenizer": "t"}})
  assert prints["tokenizer"] == other["tokenizer"] == "t"
  assert prints["data"] != other["data"]
  assert np.array_equal(sorted(prints), ["config", "data", "tokenizer"])
