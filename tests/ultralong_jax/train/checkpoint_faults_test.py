"""Real faults on real files: no state is lost, none is silently wrong.

Full and read-only disks are tmpfs mounts in a mount namespace of the process
that saves, so that nothing stays mounted; made by util-linux' unshare, as
root or as a user that may have a namespace of its own.
"""
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import listing
from ultralong_jax.train import manifest

# Everything that a process of its own needs: a state of a step, which is a
# function of the step, and shapes to restore it.
STATE = """
import sys
import jax, jax.numpy as jnp, numpy as np
import flax.struct
from ultralong_jax import sharding
from ultralong_jax.train import check, checkpoint

@flax.struct.dataclass
class State:
  params: dict
  opt_state: tuple
  router: dict
  step: jax.Array
  rng: jax.Array

SIDE = 64

def start():
  return State({"w_DF": jnp.ones((SIDE, SIDE))}, (jnp.zeros((SIDE, SIDE)),),
               {"threshold_E": jnp.arange(4.)}, jnp.int32(0),
               jax.random.PRNGKey(7))

def train(state):
  key = jax.random.fold_in(state.rng, state.step)
  momentum = 0.9 * state.opt_state[0] + jax.random.normal(key, (SIDE, SIDE))
  return state.replace(
      params={"w_DF": state.params["w_DF"] - 0.01 * momentum},
      opt_state=(momentum,), step=state.step + 1)

def shapes():
  return sharding.with_sharding(
      jax.eval_shape(start), sharding.whole(sharding.data_mesh()))

def same(a, b):
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))
"""
SPACE = {}
exec(STATE, SPACE)  # the same here and there
STEPS = (10, 20, 30)


def state_at(step):
  """Returns the state after so many steps."""
  state, train = SPACE["start"](), jax.jit(SPACE["train"])
  for _ in range(step):
    state = train(state)
  return state


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


def newest(workdir, states, **how):
  """Returns (step, what was said); what is restored has to be that step's."""
  said = []
  checkpoints = checkpoint.Checkpoints(workdir, say=said.append, **how)
  step = checkpoints.latest()
  if step is not None:
    restored, record = checkpoints.restore(step, SPACE["shapes"]())
    assert SPACE["same"](restored, states[step])
    assert record["position"] == step
  checkpoints.close()
  return step, "\n".join(said)


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
    restored.restore(30, SPACE["shapes"]())
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


# Saves into a tmpfs, mounted over argv[1] as argv[2] says.
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else [
    "unshare", "--map-root-user", "--mount"]
MOUNT = STATE + """
import os, subprocess, time
folder, options = sys.argv[1:3]
def mount(how):
  subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", folder],
                 check=True)
def tried(do, *arguments):
  try:
    do(*arguments)
    print("done")
  except (OSError, check.Refusal) as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
def at(step):
  state, go = start(), jax.jit(train)
  for _ in range(step):
    state = go(state)
  return state
def newest():
  found = checkpoint.Checkpoints(folder, read_only=True)
  step = found.latest()
  restored, _ = found.restore(step, shapes())
  print(step, same(restored, at(step)))
mount(options)
"""


def mounted(tmp_path, options, script):
  """Returns the lines of a process that has a file system of its own."""
  folder = tmp_path / "mounted"
  folder.mkdir()
  done = subprocess.run(
      [*NAMESPACE, sys.executable, "-c", MOUNT + script, folder, options],
      capture_output=True, text=True, timeout=60)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_disk_that_fills_during_a_save_costs_that_save_alone(tmp_path):
  lines = mounted(tmp_path, "size=20m", """
SIDE = 512  # 2 MiB a state
saves = checkpoint.Checkpoints(folder)
saves.save(at(1), {}); saves.wait()
# Another program takes all but 1 MiB once the save has asked for room.
check_room = saves._check_room
def filled(*arguments):
  check_room(*arguments)
  free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
  with open(folder + "/other", "wb") as file:
    file.write(bytes(free - 2**20))
saves._check_room = filled
saves.save(at(2), {})
for step in range(1000):  # as the loop does, once a step
  try:
    saves.poll()
  except OSError as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
    break
  time.sleep(0.01)
saves._check_room = check_room
newest()
print(sorted(os.listdir(folder + "/checkpoints")))
tried(saves.save, at(2), {})
os.unlink(folder + "/other")
tried(saves.save, at(2), {}); tried(saves.close)
newest()
""")
  error, first, left, refused, *again = lines
  assert error.startswith("NotSaved step 2 is not saved in ")
  assert "the last checkpoint is of step 1" in error
  assert "No space" in error or "RESOURCE_EXHAUSTED" in error, error
  assert first == "1 True" and left == "['1']"
  assert refused.startswith("NotSaved step 2 is not saved: it takes 2 MiB")
  assert again == ["done", "done", "2 True"]


def test_disk_that_turns_read_only_is_said_and_still_read(tmp_path):
  lines = mounted(tmp_path, "size=99m", """
saves = checkpoint.Checkpoints(folder)
saves.save(at(1), {}); saves.wait()
mount("remount,ro")
def save():
  saves.save(at(2), {})
  saves.wait()
tried(save)
tried(checkpoint.Checkpoints, folder + "/new")
newest()
""")
  saved, opened, first = lines
  assert saved.startswith("NotSaved step 2 is not saved in ")
  assert "Read-only file system" in saved and "is of step 1" in saved
  assert opened.startswith("Refusal ") and "Read-only file system" in opened
  assert first == "1 True"


KILLED = STATE + """
saves = checkpoint.Checkpoints(sys.argv[1])
step = saves.latest()
state = start() if step is None else saves.restore(step, shapes())[0]
go = jax.jit(train, donate_argnums=0)
print("ready", step or 0, flush=True)
while True:
  state = go(state)
  saves.poll()
  saves.save(state, {"position": int(state.step)})
  # Before the next save waits for it, so that steps overlap with saves.
  print(int(state.step), flush=True)
"""


@pytest.mark.parametrize("kills", [
    5, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_in_saves_it_resumes_bit_for_bit(tmp_path, kills):
  draw = random.Random(kills)
  last = 0
  for _ in range(kills):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ready = process.stdout.readline().split()
    assert ready and ready[0] == "ready", process.stderr.read()
    # Each save waits for the one before, which is committed then.
    assert int(ready[1]) >= last
    process.stdout.readline()
    time.sleep(draw.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    printed, said = process.communicate()
    assert "passed over" not in said
    numbers = [int(line) for line in printed.split("\n")[:-1]]
    last = max([last, *(n - 1 for n in numbers)])
  checkpoints = checkpoint.Checkpoints(tmp_path)
  step = checkpoints.latest()
  assert step >= last > 0
  restored, record = checkpoints.restore(step, SPACE["shapes"]())
  checkpoints.close()
  state, go = SPACE["start"](), jax.jit(SPACE["train"])
  for _ in range(step):
    state = go(state)
  assert SPACE["same"](restored, state) and record["position"] == step
  names = {path.name for path in pathlib.Path(
      tmp_path / "checkpoints").iterdir()}
  assert not any("saving" in name or "tmp" in name for name in names)


RESHARD = STATE + """
import json
P, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh
def placed(devices):
  rows = jax.sharding.NamedSharding(
      mesh(np.array(jax.devices()[:devices]), ("data",)), P("data"))
  whole = jax.sharding.NamedSharding(rows.mesh, P())
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=rows if x.ndim > 1 else whole),
      jax.eval_shape(start))
state = train(train(start()))
state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, placed(8)))
saves = checkpoint.Checkpoints(sys.argv[1], keep=9)
for devices in (4, 2):  # what 4 have restored is saved and read by 2
  saves.save(state, {})
  step = saves.latest() if saves.wait() is None else None
  read, _ = saves.restore(step, placed(devices))
  assert len(read.params["w_DF"].sharding.device_set) == devices
  assert same(read, state), devices
  state = train(read)
saves.save(state, {})
saves.close()
"""


def test_other_devices_restore_the_same_arrays(tmp_path):
  subprocess.run(
      [sys.executable, "-c", RESHARD, tmp_path], check=True, timeout=60,
      env={**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
           + " --xla_force_host_platform_device_count=8"})
  state = state_at(4)
  checkpoints = checkpoint.Checkpoints(tmp_path)
  assert checkpoints.steps() == [2, 3, 4]
  restored, _ = checkpoints.restore(4, SPACE["shapes"]())
  checkpoints.close()
  np.testing.assert_allclose(
      restored.params["w_DF"], state.params["w_DF"], rtol=1e-6)


PROCESSES = STATE + """
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
P = jax.sharding.PartitionSpec
mesh = jax.make_mesh((2,), ("data",))
def sharding_of(x):
  return jax.sharding.NamedSharding(mesh, P("data") if x.ndim > 1 else P())
form = jax.eval_shape(start)
state = jax.jit(lambda: train(start()),
                out_shardings=jax.tree.map(sharding_of, form))()
saves = checkpoint.Checkpoints(sys.argv[1])
saves.save(state, {"position": 1})
saves.wait()
assert saves.latest() == 1 or jax.process_index()
read, _ = saves.restore(1, jax.tree.map(lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding_of(x)), form))
for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(state)):
  for x, y in zip(a.addressable_shards, b.addressable_shards):
    assert np.array_equal(x.data, y.data)
saves.close()
"""


def test_two_processes_save_what_one_restores(tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
  both = [subprocess.Popen(
      [sys.executable, "-c", PROCESSES, tmp_path, address, str(i)],
      text=True, stderr=subprocess.PIPE) for i in range(2)]
  for process in both:
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
  step, said = newest(tmp_path, {1: state_at(1)})
  assert (step, said) == (1, "")


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
