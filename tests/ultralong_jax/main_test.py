"""The command line on a very small model, in processes of its own."""
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import chex
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
STEPS, BATCH = 20, 2
SMALL = """
steps=20 batch=2 context=64
model.width=32 model.layers=2 model.pattern=d model.block_layers=1
model.heads=2 model.key_width=8 model.value_width=16
model.latent_heads=2 model.dense_hidden=64
model.experts=4 model.expert_hidden=16 model.expert_latent=16
optim.warmup_steps=2 log.every_steps=1 checkpoint.every_steps=10
data.validation_bytes=1024 data.validation_context=64
""".split()
# Writes each batch that it trains on to a folder, as its step's. Sends itself
# SIGNAL before it reports STEP, once a path exists; step 0 never comes.
WATCHED = """
import contextlib, os, pathlib, signal, sys, time
from absl import app
import numpy as np
from ultralong_jax import main
from ultralong_jax.data import loader
from ultralong_jax.train import progress

signum, at, saved = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder = pathlib.Path(sys.argv[4])
folder.mkdir()
del sys.argv[1:5]
report, batches = progress.Log.step, loader.Data.batches

def watched(data, position=0, *args, **where):
  found = batches(data, position, *args, **where)
  train = data.fingerprint["split"] == "train"
  return written(found, position // data.batch) if train else found

def written(found, steps):
  with contextlib.closing(found):
    for step, batch in enumerate(found, steps + 1):
      np.savez(folder / f"{step}.npz", **batch)
      yield batch

def step(log, number, metrics):
  while not pathlib.Path(saved).exists():
    if number < at:
      break
    time.sleep(0.01)
  if number == at:
    os.kill(os.getpid(), signum)
  report(log, number, metrics)

progress.Log.step, loader.Data.batches = step, watched
app.run(main.main, flags_parser=main.parse_flags)
"""


@pytest.fixture(scope="module")
def call(tmp_path_factory):
  """Returns a function that runs Python with arguments, from the root."""
  text = tmp_path_factory.mktemp("text")
  for i in range(40):
    (text / f"{i}.txt").write_text(f"document {i} says: " + 9 * f"{i * i} ")
  cache = tmp_path_factory.mktemp("cache")

  # All runs compile the same: the first one does it.
  cached = {"JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

  def run(*arguments, status=0, xla_flags=""):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, text=True,
        capture_output=True, timeout=300, env={
            **os.environ, **cached,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}"})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr

  run.cached = cached
  run.flags = ["--config", "configs/tiny.py", f"--config.data.path={text}",
               *(f"--config.{leaf}" for leaf in SMALL)]
  return run


@pytest.fixture(scope="module")
def unbroken(call, tmp_path_factory):
  """Returns the folder of a run that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("unbroken")
  text = call("-c", WATCHED, 9, 0, workdir, workdir / "batches", "--workdir",
              workdir, *call.flags)
  assert "step 20/20" in text and "bits/byte" in text and "to beat" in text
  assert "--mode generate" in text
  return workdir


def lines(workdir):
  return [json.loads(text) for text in
          (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
  return [(line["step"], line["loss"], line["grad_norm"])
          for line in lines(workdir) if "loss" in line]


def batches(folder):
  """The batches that a process trained on, by step."""
  found = {}
  for path in folder.iterdir():
    with np.load(path) as arrays:
      found[int(path.stem)] = dict(arrays)
  return found


def record(workdir, step):
  path = workdir / "checkpoints" / str(step) / "record" / "metadata"
  saved = json.loads(path.read_text())
  del saved["train_seconds"]
  return saved


def test_killed_and_stopped_run_equals_an_unbroken_one(
    call, unbroken, tmp_path):
  saved = tmp_path / "checkpoints" / "10"
  flags = ["--workdir", tmp_path, *call.flags]
  call("-c", WATCHED, 9, 13, saved, tmp_path / "killed", *flags, status=-9)
  assert losses(tmp_path)[-1][0] == 12
  text = call("-c", WATCHED, 15, 15, saved, tmp_path / "stopped", *flags,
              status=143)
  assert "from step 10" in text
  assert f"--workdir {tmp_path}" in text.split("to go on:")[1]
  stopped = int(max((tmp_path / "checkpoints").iterdir(),
                    key=lambda path: int(path.name)).name)
  assert 15 <= stopped < STEPS
  text = call("-c", WATCHED, 9, 0, saved, tmp_path / "ended", "--workdir",
              tmp_path)
  assert f"from step {stopped}" in text

  wanted = batches(unbroken / "batches")
  assert set(wanted) == set(range(1, STEPS + 1)) and set(wanted[1]) == {
      "tokens", "targets", "segment_ids", "positions", "weights"}
  for name, before in ("killed", 0), ("stopped", 10), ("ended", stopped):
    taken = batches(tmp_path / name)
    assert min(taken) == before + 1
    for step, batch in taken.items():
      chex.assert_trees_all_equal(batch, wanted[step], strict=True)
  assert losses(tmp_path) == losses(unbroken)
  assert [step for step, *_ in losses(tmp_path)] == list(range(1, STEPS + 1))
  # Checksums of every array: parameters, optimizer, thresholds, key.
  assert record(tmp_path, STEPS) == record(unbroken, STEPS)
  assert record(tmp_path, STEPS)["position"] == STEPS * BATCH


@pytest.mark.slow
def test_run_killed_at_random_moments_equals_an_unbroken_one(
    call, unbroken, tmp_path):
  def started(workdir):
    """Returns a process that is about to take its first step."""
    process = subprocess.Popen(
        [sys.executable, *map(str, [
            "-m", "ultralong_jax.main", "--workdir", workdir, *call.flags,
            "--config.checkpoint.every_steps=1"])],
        cwd=ROOT, text=True, env={**os.environ, **call.cached},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while "compiled in" not in process.stdout.readline():
      assert process.poll() is None, process.communicate()[1]
    return process

  process = started(tmp_path / "timed")
  began = time.monotonic()
  process.communicate()
  seconds = time.monotonic() - began
  draw, kills, runs = random.Random(0), 0, 0
  while kills < 10:  # as many runs as that takes, each killed on its way
    workdir = tmp_path / f"run{runs}"
    process = started(workdir)
    try:
      process.wait(draw.uniform(0, 0.7) * seconds)
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode in (0, -9), said
    assert "passed over" not in said
    kills += process.returncode == -9
    if kills == 10 and process.returncode:
      process = started(workdir)
      said = process.communicate()[1]
      assert process.returncode == 0, said
    if process.returncode == 0:
      assert losses(workdir) == losses(unbroken)
      assert record(workdir, STEPS) == record(unbroken, STEPS)
      call("-m", "ultralong_jax.main", "--workdir", workdir, "--mode",
           "inspect")
      runs += 1


@pytest.mark.slow
def test_two_devices_learn_what_one_does(call, unbroken, tmp_path):
  call("-m", "ultralong_jax.main", "--workdir", tmp_path, *call.flags,
       xla_flags="--xla_force_host_platform_device_count=2")
  for (_, *one), (_, *two) in zip(losses(unbroken), losses(tmp_path)):
    # Top-k may flip on a near tie, so only the first steps agree closely.
    assert one[0] == pytest.approx(two[0], abs=1e-2)
  assert losses(unbroken)[0][1] == pytest.approx(losses(tmp_path)[0][1],
                                                 rel=1e-5)


def test_evaluate_repeats_the_figure_of_the_run(call, unbroken):
  text = call("-m", "ultralong_jax.main", "--workdir", unbroken,
              "--mode", "evaluate")
  figures = dict(line.split() for line in text.splitlines())
  last = lines(unbroken)[-1]
  assert float(figures["validation_bits_per_byte"]) == pytest.approx(
      last["validation_bits_per_byte"], rel=1e-4)
  assert figures["step"] == "20"


def test_generate_goes_on_from_the_prompt(call, unbroken):
  text = call("-m", "ultralong_jax.main", "--workdir", unbroken, "--mode",
              "generate", "--prompt", "document ", "--max_new_tokens", 8)
  assert text.startswith("document ")


def test_inspect_says_what_is_whole_by_its_exit_status(
    call, unbroken, tmp_path):
  inspect = ["-m", "ultralong_jax.main", "--mode", "inspect", "--workdir"]
  *_, first, last = call(*inspect, unbroken).splitlines()
  assert first.split()[:3] == ["10", "10", "full"]
  assert last.split()[:3] == ["20", "20", "full"] and "verified" in last
  shutil.copytree(unbroken / "checkpoints", tmp_path / "checkpoints")
  path = tmp_path / "checkpoints/20/record/metadata"
  path.write_text(path.read_text().replace("1", "2", 1))
  *_, last = call(*inspect, tmp_path, status=1).splitlines()
  assert "damaged: record/metadata: other contents" in last


def test_wrong_flags_are_explained_in_a_line(call, unbroken):
  main = ["-m", "ultralong_jax.main", "--workdir", unbroken]
  text = call(*main, *call.flags, "--config.model.head=3", status=1)
  assert 'Did you mean "heads"' in text and "Traceback" not in text
  text = call(*main, *call.flags, "--config.seed=5", status=1)
  assert "seed: 0 there, 5 here" in text and "Traceback" not in text


@pytest.mark.slow  # the comparison itself: data/loader_fingerprint_test
def test_other_data_is_refused_by_its_difference(call, unbroken):
  other = [flag for flag in call.flags if "data.path" not in flag]
  text = call("-m", "ultralong_jax.main", "--workdir", unbroken, *other,
              "--config.data.path=configs", status=1)
  assert "trained on other data" in text and "data.bytes: saved" in text
