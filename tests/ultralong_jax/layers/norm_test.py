"""RMSNorm: mean square, precision, parameters."""

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax.layers import norm


def test_mean_square_is_one_at_every_magnitude():
  x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
  for magnitude in (1e-1, 1., 1e6):
    y = np.asarray(norm.rms_norm(magnitude * x, np.ones(64), 1e-5))
    np.testing.assert_allclose(np.mean(y * y, -1), 1., rtol=2e-3)


def test_zero_stays_zero_with_a_finite_gradient():
  y, vjp = jax.vjp(lambda x: norm.rms_norm(x, jnp.ones(8), 1e-5),
                   jnp.zeros((2, 8)))
  assert not y.any()
  assert np.isfinite(vjp(jnp.ones((2, 8)))[0]).all()


def test_bfloat16_is_normalised_in_float32():
  # Squares summed in bfloat16 would stop growing after 256 equal terms.
  x = jnp.full((1, 4096), 3., jnp.bfloat16)
  y = norm.rms_norm(x, jnp.ones(4096), 1e-5)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(y, jnp.ones_like(x))


def test_module_holds_one_scale_per_channel():
  x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
  module = norm.RMSNorm(epsilon=1e-3)
  variables = module.init(jax.random.key(2), x)
  np.testing.assert_array_equal(variables["params"]["scale_D"], np.ones(16))
  scale_D = jnp.arange(16.)
  np.testing.assert_array_equal(
      module.apply({"params": {"scale_D": scale_D}}, x),
      norm.rms_norm(x, scale_D, 1e-3))
