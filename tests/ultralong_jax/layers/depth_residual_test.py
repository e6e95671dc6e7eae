"""The mix over depth against golden data and against its plain formula."""
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax.layers import depth_residual

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/attention_residual.npz"


def plain(sources, valid, w_D, epsilon=1e-5):
  v_MBTD = jnp.stack(sources)
  rstd = jax.lax.rsqrt(jnp.mean(v_MBTD**2, -1, keepdims=True) + epsilon)
  score_MBT = jnp.sum(v_MBTD * rstd * w_D[None, None, None], -1)
  if valid is not None:
    score_MBT = jnp.where(jnp.asarray(valid)[:, None, None], score_MBT,
                          -jnp.inf)
  p_MBT = jax.nn.softmax(score_MBT, axis=0)
  return jnp.sum(p_MBT[..., None] * v_MBTD, axis=0)


def sources(count=3, width=12):
  keys = jax.random.split(jax.random.key(0), count)
  return tuple(2 * jax.random.normal(k, (2, 5, width)) for k in keys)


def test_golden():
  data = np.load(GOLDEN)
  h = depth_residual.mix(jnp.asarray(data["sources"]), None,
                         jnp.asarray(data["query"]),
                         jnp.asarray(data["norm_weight"]), 1e-5)
  np.testing.assert_allclose(h, data["o"], rtol=1e-5, atol=1e-5)


def test_gradients_equal_the_plain_formula():
  w_D = jax.random.normal(jax.random.key(1), (12,))
  one_D = jnp.ones(12)
  for valid in (None, (True, False, True)):
    wanted = jax.grad(lambda s, w: jnp.sum(plain(s, valid, w)**3),
                      argnums=(0, 1))(sources(), w_D)
    actual = jax.grad(
        lambda s, w: jnp.sum(depth_residual.mix(s, valid, w, one_D, 1e-5)**3),
        argnums=(0, 1))(sources(), w_D)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        actual, wanted)


def test_zero_query_is_the_mean():
  zero_D, one_D = jnp.zeros(12), jnp.ones(12)
  h = depth_residual.mix(sources(), None, zero_D, one_D, 1e-5)
  np.testing.assert_allclose(h, sum(sources()) / 3, rtol=1e-5, atol=1e-5)


def test_invalid_source_counts_for_nothing():
  w_D, one_D = jnp.ones(12), jnp.ones(12)
  *known, other = sources()
  masked = depth_residual.mix((*known, other), (True, True, False), w_D, one_D,
                              1e-5)
  np.testing.assert_allclose(
      masked, depth_residual.mix(known, None, w_D, one_D, 1e-5), rtol=1e-6)
