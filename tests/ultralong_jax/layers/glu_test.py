"""Gated units: bounds, slopes and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import glu


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_situ_stays_within_its_bounds():
  grid = np.float32([-1e30, -1e4, -50., -1., 0., 1., 50., 1e4, 1e30])
  gate, up = np.meshgrid(grid, grid)
  f = glu.situ(gate, up)
  assert np.isfinite(f).all() and np.abs(f).max() <= 100.
  assert np.abs(glu.swiglu(gate, up)).max() > 100.  # what the bound is for


def test_situ_has_the_slope_of_swiglu_at_zero():
  for up in (-2e-3, 1e-3, 3e-3):
    slope = jax.grad(glu.situ)(jnp.float32(0.), jnp.float32(up))
    expected = jax.grad(glu.swiglu)(jnp.float32(0.), jnp.float32(up))
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
  gate, up = jnp.float32(1e-3), jnp.float32(2e-3)
  np.testing.assert_allclose(glu.situ(gate, up), glu.swiglu(gate, up),
                             rtol=1e-5)


def test_situ_tends_to_swiglu_as_its_bounds_grow():
  gate, up = normal(0, 2, 100) * 5
  far = glu.situ(gate, up, gate_bound=1e4, up_bound=1e4)
  np.testing.assert_allclose(far, glu.swiglu(gate, up), rtol=1e-5, atol=1e-6)
  assert np.abs(glu.situ(gate, up) - glu.swiglu(gate, up)).max() > 1.


def test_situ_gradient_matches_the_derivative_written_out():
  gate, up = normal(1, 2, 64) * 6
  d_gate, d_up = jax.jit(jax.vmap(jax.grad(glu.situ, (0, 1))))(gate, up)
  g, u = np.float64(gate), np.float64(up)
  s, t = 1 / (1 + np.exp(-g)), np.tanh(g / 4)
  a = 4 * t * s
  b = 25 * np.tanh(u / 25)
  np.testing.assert_allclose(
      d_gate, ((1 - t * t) * s + 4 * t * s * (1 - s)) * b, rtol=1e-4,
      atol=1e-5)
  np.testing.assert_allclose(d_up, a / np.cosh(u / 25) ** 2, rtol=1e-4,
                             atol=1e-5)


def test_gradients_are_finite_at_extreme_inputs():
  gate, up = jnp.array([[-1e30, 1e30, 200., -200.], [1e30, -1e30, 1., 1.]])
  grads = jax.jit(jax.vmap(jax.grad(glu.situ, (0, 1))))(gate, up)
  assert all(np.isfinite(g).all() for g in grads)


def test_situ_is_computed_in_float32_for_bfloat16_inputs():
  gate, up = (3 * normal(2, 2, 1000)).astype(jnp.bfloat16)
  f = glu.situ(gate, up)
  assert f.dtype == jnp.bfloat16
  exact = glu.situ(gate.astype(np.float32), up.astype(np.float32))
  np.testing.assert_array_equal(f, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", glu.ACTIVATIONS)
def test_gated_unit_is_two_projections_and_one_back(kind):
  unit = glu.GatedUnit(hidden=24, kind=kind)
  x_BTD = normal(3, 2, 5, 16)
  variables = unit.init(jax.random.key(4), x_BTD)
  p = variables["params"]
  assert {n: a.shape for n, a in p.items()} == {
      "w_gate_DF": (16, 24), "w_up_DF": (16, 24), "w_down_FD": (24, 16)}
  f_BTF = glu.activate(kind, x_BTD @ p["w_gate_DF"], x_BTD @ p["w_up_DF"])
  np.testing.assert_allclose(unit.apply(variables, x_BTD),
                             f_BTF @ p["w_down_FD"], rtol=1e-4, atol=1e-7)
  assert unit.apply(variables, x_BTD.astype(jnp.bfloat16)).dtype == (
      jnp.bfloat16)


def test_an_unknown_activation_is_named():
  with pytest.raises(ValueError, match="glu='relu'"):
    glu.activate("relu", jnp.ones(3), jnp.ones(3))


def test_a_normed_input_has_mean_square_one_and_no_scale():
  x = normal(5, 3, 4, 16) * np.float32([[[1e-2]], [[1.]], [[1e3]]])
  y = glu.normalize_input(x, 1e-12)
  np.testing.assert_allclose(
      y, x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True)), rtol=1e-4)
  assert glu.normalize_input(x.astype(jnp.bfloat16), 1e-5).dtype == (
      jnp.bfloat16)
  assert np.isfinite(jax.grad(lambda x: jnp.sum(glu.normalize_input(
      x, 1e-5)))(jnp.zeros(4))).all()


def test_a_unit_with_input_norm_is_the_unit_of_the_normed_input():
  plain, normed = glu.GatedUnit(24), glu.GatedUnit(24, input_norm=True)
  x_BTD = 50 * normal(6, 2, 5, 16)
  variables = plain.init(jax.random.key(7), x_BTD)
  y_BTD = normed.apply(variables, x_BTD)
  np.testing.assert_allclose(
      y_BTD, plain.apply(variables, glu.normalize_input(x_BTD, 1e-5)),
      rtol=1e-5)
  np.testing.assert_allclose(y_BTD, normed.apply(variables, 3 * x_BTD),
                             rtol=1e-3)
