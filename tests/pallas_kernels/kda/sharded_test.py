"""Batch rows and heads over several devices change no number."""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def test_eight_devices_equal_one():
  """In a process of its own, which has eight devices."""
  flags = (os.environ.get("XLA_FLAGS", "")
           + " --xla_force_host_platform_device_count=8")
  done = subprocess.run(
      [sys.executable, __file__], cwd=ROOT, text=True, capture_output=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
           "PYTHONPATH": str(ROOT)})
  assert done.returncode == 0, done.stderr[-2000:]


def main():
  """Compares outputs and the gradients of all arrays."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from pallas_kernels import kda
  from pallas_kernels.kda import sharded

  jax.config.update("jax_numpy_rank_promotion", "raise")
  assert jax.device_count() == 8
  mesh = jax.make_mesh((2, 4), ("rows", "heads"),
                       axis_types=(jax.sharding.AxisType.Auto,) * 2)
  keys = iter(jax.random.split(jax.random.key(0), 9))

  def normal(*shape):
    return jax.random.normal(next(keys), shape)

  x = dict(q=normal(2, 70, 4, 8), k=normal(2, 70, 4, 8),
           v=normal(2, 70, 8, 12), decay=normal(2, 70, 8, 8),
           beta=normal(2, 70, 8), a_log=0.3 * normal(8), dt_bias=normal(8, 8),
           initial_state=normal(2, 8, 8, 12))
  segment_ids = jnp.asarray([[1] * 30 + [2] * 33 + [0] * 7, [1] * 70])
  options = dict(floor=-5.0, normalize_qk=True, sigmoid_beta=True,
                 segment_ids=segment_ids, implementation="xla")

  def loss(function):
    def f(x):
      o, s = function(**x, **options)
      return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(s)), (o, s)
    return jax.jit(jax.value_and_grad(f, has_aux=True))(x)

  (_, wanted), wanted_grads = loss(kda.kda)
  (_, got), grads = loss(lambda **y: sharded.kda_sharded(
      **y, mesh=mesh, batch="rows", heads="heads"))
  assert len(got[0].sharding.device_set) == 8
  for a, b in zip(jax.tree.leaves((got, grads)),
                  jax.tree.leaves((wanted, wanted_grads))):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert error < 1e-5, error


if __name__ == "__main__":
  main()
