"""Faults of disks and processes: what was saved is restored bit for bit.

Full and read-only disks are tmpfs mounts in a mount namespace of the process
that saves, so that nothing stays mounted; made by util-linux' unshare, as
root or as a user that may have a namespace of its own.
"""
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.ultralong_jax.train import checkpoint_states
from tests.ultralong_jax.train.checkpoint_states import (
    newest, same, shapes, state_at)
from ultralong_jax.train import checkpoint

ROOT = pathlib.Path(__file__).parents[3]


# Saves into a tmpfs, mounted over argv[1] as argv[2] says.
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else [
    "unshare", "--map-root-user", "--mount"]
MOUNT = checkpoint_states.IMPORTS + """
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
def newest():
  found = checkpoint.Checkpoints(folder, read_only=True)
  step = found.latest()
  restored, _ = found.restore(step, shapes())
  print(step, same(restored, state_at(step)))
mount(options)
"""


def mounted(tmp_path, options, script):
  """Returns the lines of a process that has a file system of its own."""
  folder = tmp_path / "mounted"
  folder.mkdir()
  done = subprocess.run(
      [*NAMESPACE, sys.executable, "-c", MOUNT + script, folder, options],
      capture_output=True, text=True, timeout=60, cwd=ROOT)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_disk_that_fills_during_a_save_costs_that_save_alone(tmp_path):
  lines = mounted(tmp_path, "size=20m", """
checkpoint_states.SIDE = 512  # 2 MiB a state
saves = checkpoint.Checkpoints(folder)
saves.save(state_at(1), {}); saves.wait()
# Another program takes all but 1 MiB once the save has asked for room.
check_room = saves._check_room
def filled(*arguments):
  check_room(*arguments)
  free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
  with open(folder + "/other", "wb") as file:
    file.write(bytes(free - 2**20))
saves._check_room = filled
saves.save(state_at(2), {})
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
tried(saves.save, state_at(2), {})
os.unlink(folder + "/other")
tried(saves.save, state_at(2), {}); tried(saves.close)
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
saves.save(state_at(1), {}); saves.wait()
mount("remount,ro")
def save():
  saves.save(state_at(2), {})
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


KILLED = checkpoint_states.IMPORTS + """
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
        [sys.executable, "-c", KILLED, tmp_path], text=True, cwd=ROOT,
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
  restored, record = checkpoints.restore(step, shapes())
  checkpoints.close()
  assert same(restored, state_at(step)) and record["position"] == step
  names = {path.name for path in pathlib.Path(
      tmp_path / "checkpoints").iterdir()}
  assert not any("saving" in name or "tmp" in name for name in names)


RESHARD = checkpoint_states.IMPORTS + """
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
      cwd=ROOT,
      env={**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
           + " --xla_force_host_platform_device_count=8"})
  state = state_at(4)
  checkpoints = checkpoint.Checkpoints(tmp_path)
  assert checkpoints.steps() == [2, 3, 4]
  restored, _ = checkpoints.restore(4, shapes())
  checkpoints.close()
  np.testing.assert_allclose(
      restored.params["w_DF"], state.params["w_DF"], rtol=1e-6)


PROCESSES = checkpoint_states.IMPORTS + """
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
      text=True, cwd=ROOT, stderr=subprocess.PIPE) for i in range(2)]
  for process in both:
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
  step, said = newest(tmp_path, {1: state_at(1)})
  assert (step, said) == (1, "")
