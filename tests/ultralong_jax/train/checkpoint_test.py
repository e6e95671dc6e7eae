import collections
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ultralong_jax import sharding
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import checksum
from ultralong_jax.train.state import TrainState


def state(step=3, scale=1.):
  params = {"layer": {"w_DF": scale * jnp.arange(12.).reshape(3, 4)},
            "scale_D": scale * jnp.ones(3, jnp.bfloat16)}
  optimizer = optax.chain(optax.clip_by_global_norm(1.), optax.adamw(1e-3))
  return TrainState(params, optimizer.init(params),
                    {"threshold_E": jnp.ones(4)}, jnp.int32(step),
                    jax.random.PRNGKey(7))


def shapes(of):
  return sharding.with_sharding(of, sharding.whole(sharding.data_mesh()))


def save(folder, *states, keep=2):
  checkpoints = checkpoint.Checkpoints(folder, keep)
  for one in states:
    checkpoints.save(one, {"position": 10 * int(one.step)})
  checkpoints.close()


def equal(a, b):
  return all(jax.tree.leaves(jax.tree.map(
      lambda x, y: x.dtype == y.dtype and bool(jnp.all(x == y)), a, b)))


def test_state_comes_back_bit_for_bit(tmp_path):
  saved = state()
  save(tmp_path, saved)
  checkpoints = checkpoint.Checkpoints(tmp_path)
  assert checkpoints.latest() == 3
  restored, record = checkpoints.restore(3, shapes(saved))
  assert jax.tree.structure(restored) == jax.tree.structure(saved)
  assert equal(restored, saved)
  assert record["position"] == 30
  checkpoints.close()


def test_model_is_read_without_the_optimizer(tmp_path):
  saved = state()
  save(tmp_path, saved)
  checkpoints = checkpoint.Checkpoints(tmp_path, read_only=True)
  (params, router), _ = checkpoints.restore_model(
      3, shapes(saved).params, shapes(saved).router)
  assert equal((params, router), (saved.params, saved.router))


def test_oldest_go_first(tmp_path):
  save(tmp_path, *(state(step) for step in (1, 2, 3, 4)), keep=2)
  checkpoints = checkpoint.Checkpoints(tmp_path)
  assert checkpoints.steps() == [3, 4]
  checkpoints.close()


@pytest.mark.parametrize("change, says", [
    (lambda s: s.replace(router={}), "router:threshold_E: in the checkpoint"),
    (lambda s: s.replace(router={**s.router, "x_E": s.router["threshold_E"]}),
     "router:x_E: not in the checkpoint"),
    (lambda s: s.replace(params={**s.params, "scale_D": jax.ShapeDtypeStruct(
        (3,), jnp.float32)}), r"bfloat16\[3\] in the checkpoint, float32\[3\]"),
    (lambda s: s.replace(params={**s.params, "scale_D": jax.ShapeDtypeStruct(
        (4,), jnp.bfloat16)}), r"bfloat16\[4\] here"),
    (lambda s: s.replace(opt_state=()), "opt_state"),
])
def test_other_structure_is_refused_by_name(tmp_path, change, says):
  save(tmp_path, state())
  checkpoints = checkpoint.Checkpoints(tmp_path, read_only=True)
  with pytest.raises(check.Refusal, match=says):
    checkpoints.restore(3, change(shapes(state())))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_state_that_is_not_finite_is_not_saved(tmp_path, broken):
  save(tmp_path, state(1))
  checkpoints = checkpoint.Checkpoints(tmp_path)
  with pytest.raises(FloatingPointError, match="params:layer:w_DF.*of step 1"):
    checkpoints.save(state(2, scale=broken), {})
  assert checkpoints.steps() == [1]
  checkpoints.close()


def test_full_disk_is_said_before_a_save(tmp_path, monkeypatch):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  usage = collections.namedtuple("usage", "free")
  monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage(2**20))
  with pytest.raises(OSError, match="1 MiB free"):
    checkpoints.save(state(), {})
  assert checkpoints.latest() is None
  checkpoints.close()


def damage(folder, how):
  """Applies `how` to the bytes of the largest file of the parameters."""
  files = [path for path in (folder / "checkpoints/3/model").rglob("d/*")
           if path.is_file()]
  path = max(files, key=lambda path: path.stat().st_size)
  path.write_bytes(how(bytearray(path.read_bytes())))


def flip(share):
  def how(data):
    data[int(share * len(data))] ^= 16
    return data
  return how


READ = """
import sys, jax, numpy as np
from ultralong_jax import sharding
from ultralong_jax.train import check, checkpoint
shapes = sharding.with_sharding(
    {"w_DF": np.zeros((64, 64), np.float32),
     "threshold_E": np.zeros(4, np.float32)},
    sharding.whole(sharding.data_mesh()))
threshold_E = shapes.pop("threshold_E")
for folder in sys.argv[1:]:
  try:
    checkpoint.Checkpoints(folder, read_only=True).restore_model(
        3, shapes, {"threshold_E": threshold_E})
    print("read")
  except check.Refusal as refusal:
    print(str(refusal).replace("\\n", " "))
"""


def test_damaged_file_is_refused_by_step(tmp_path):
  params = {"w_DF": jax.random.normal(jax.random.key(0), (64, 64))}
  save(tmp_path / "whole", state().replace(params=params))
  damages = [flip(0.3), flip(0.5), flip(0.8),
             lambda data: data[:len(data) // 2], lambda data: b""]
  folders = [tmp_path / f"damaged{i}" for i in range(len(damages))]
  for folder, how in zip(folders, damages):
    shutil.copytree(tmp_path / "whole", folder)
    damage(folder, how)
  # In a process of its own: Orbax leaves coroutines that nobody awaits.
  done = subprocess.run(
      [sys.executable, "-c", READ, tmp_path / "whole", *folders],
      capture_output=True, text=True, check=True)
  first, *others = done.stdout.splitlines()
  assert first == "read"
  assert len(others) == len(damages)
  for folder, text in zip(folders, others):
    assert text.startswith(f"checkpoint {folder}/checkpoints/3 "), text


def test_checksum_sees_a_moved_row():
  x = jnp.arange(6.).reshape(2, 3)
  sums = [int(checksum.checksum(y)) for y in (x, x[::-1], x.at[0, 0].set(
      1e-45))]
  assert len(set(sums)) == 3


def test_leftovers_of_a_kill_are_removed(tmp_path):
  save(tmp_path, state(1))
  half = tmp_path / "checkpoints/2.orbax-checkpoint-tmp"
  half.mkdir()
  checkpoints = checkpoint.Checkpoints(tmp_path)
  assert checkpoints.latest() == 1
  checkpoints.save(state(2), {})
  checkpoints.close()
  assert not half.exists()
