import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import linear


def sample(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape),
                     jnp.float32)


@pytest.mark.parametrize("x_shape, w_shape, axes", [
    ((6, 5), (5, 4), 1), ((2, 3, 5), (5, 4), 1), ((2, 3, 5), (5, 2, 4), 1),
    ((2, 3, 2, 4), (2, 4, 5), 2)])
def test_equals_tensordot_and_its_gradients(x_shape, w_shape, axes):
  x, w = sample(*x_shape), sample(*w_shape, seed=1)
  y, pull = jax.vjp(lambda x, w: linear.linear(x, w, axes), x, w)
  expected, pull_expected = jax.vjp(
      lambda x, w: jnp.tensordot(x, w, axes), x, w)
  dy = sample(*y.shape, seed=2)
  chex.assert_trees_all_close(y, expected, rtol=1e-6, atol=1e-6)
  chex.assert_trees_all_close(pull(dy), pull_expected(dy), rtol=1e-5,
                              atol=1e-5)


def test_a_weight_gradient_is_not_rounded_to_the_dtype_of_the_inputs():
  x, w = sample(64, 5).astype(jnp.bfloat16), sample(5, 4, seed=1)
  dw = jax.grad(lambda w: jnp.sum(linear.linear(x, w).astype(jnp.float32)))(w)
  chex.assert_type(dw, jnp.float32)
  exact = np.asarray(x, np.float64).T @ np.ones((64, 4))
  chex.assert_trees_all_close(np.asarray(dw, np.float64), exact, rtol=1e-5,
                              atol=1e-4)


def test_other_axes_are_refused_with_both_shapes():
  with pytest.raises(ValueError, match=r"\(3, 5\).*\(4, 5\)"):
    linear.linear(jnp.ones((3, 5)), jnp.ones((4, 5)))
