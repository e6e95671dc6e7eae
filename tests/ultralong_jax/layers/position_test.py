"""Rotary position against its formulas, and what it promises."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import position
from ultralong_jax.layers.position import Rotary


def test_turns_pairs_by_position_times_speed():
  """As complex numbers, in float64, also a million tokens into a document."""
  x_BTHU = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
  positions_BT = np.asarray([[0, 1, 2, 3, 1_048_575], [7, 8, 0, 1, 524_287]])
  y_BTHU = position.rotate(x_BTHU, positions_BT, Rotary(base=500.))
  x = np.asarray(x_BTHU, np.float64)
  z = x[..., :4] + 1j * x[..., 4:]
  speed = np.asarray([500. ** (-2 * i / 8) for i in range(4)])
  z = z * np.exp(1j * positions_BT[..., None, None] * speed)
  want = np.concatenate([z.real, z.imag], -1)
  error = np.abs(y_BTHU - want).max((2, 3))
  assert (error < np.where(positions_BT < 100, 2e-6, 5e-3)).all(), error
  np.testing.assert_array_equal(y_BTHU[0, 0], x_BTHU[0, 0])
  np.testing.assert_array_equal(
      position.rotate(x_BTHU[:, :, 0], positions_BT, Rotary(base=500.)),
      y_BTHU[:, :, 0])


@pytest.mark.parametrize("rotary", [
    Rotary(), Rotary(1e6, "linear", 8.), Rotary(1e4, "yarn", 32., 4096)],
    ids=str)
def test_logits_depend_on_differences_of_positions_only(rotary):
  """Wherever in a million tokens the two stand."""
  q_BTU, k_BTU = jax.random.normal(jax.random.key(1), (2, 1, 6, 16))
  q_BT = jnp.asarray([[0, 5, 60, 700, 8_000, 90_000]])
  k_BT = jnp.asarray([[0, 2, 61, 300, 7_999, 10]])

  def logits(shift):
    q, k = (position.rotate(x, p + shift, rotary)
            for x, p in ((q_BTU, q_BT), (k_BTU, k_BT)))
    return jnp.sum(q * k, -1)

  near = logits(0)
  assert jnp.abs(near - jnp.sum(q_BTU * k_BTU, -1))[0, 1:].min() > 1e-3
  for shift in (1, 977, 958_480):
    np.testing.assert_allclose(logits(shift), near, atol=1e-5)


def by_paper(rotary, width):
  """YaRN's h and g of a pair and sqrt(1 / t), by the paper's letters."""
  s, L, alpha, beta = rotary.factor, rotary.context, 1, 32
  speeds = []
  for d in range(width // 2):
    theta = rotary.base ** (-2 * d / width)
    r = L / (2 * math.pi / theta)  # context over wavelength
    if r < alpha:
      gamma = 0.
    elif r > beta:
      gamma = 1.
    else:
      gamma = (r - alpha) / (beta - alpha)
    speeds.append((1 - gamma) * theta / s + gamma * theta)
  return np.asarray(speeds), 0.1 * math.log(s) + 1


def test_yarn_is_the_papers():
  rotary = Rotary(10_000., "yarn", 16., 2_048)
  wanted, temperature = by_paper(rotary, 64)
  speeds = rotary.speeds(64)
  np.testing.assert_allclose(speeds, wanted, rtol=1e-12)
  assert rotary.logit_scale() == pytest.approx(temperature**2, rel=1e-12)
  # Powers by NumPy and by math differ in the last bit on some CPUs, so what is
  # exact is asked of NumPy's alone.
  plain = Rotary(10_000.).speeds(64)
  # The fastest pairs keep their speed, the slowest are interpolated, and
  # some lie between.
  assert speeds[0] == plain[0] and speeds[-1] == plain[-1] / 16
  ratio = speeds / plain
  assert (np.diff(ratio) <= 0).all() and ((ratio > 0.1) & (ratio < 0.9)).any()


def test_scalings_start_where_they_scale_nothing():
  plain = Rotary(1e5).speeds(16)
  for scaling in ("linear", "yarn"):
    rotary = Rotary(1e5, scaling, 1., 512)
    np.testing.assert_allclose(rotary.speeds(16), plain, rtol=1e-12)
    assert rotary.logit_scale() == 1
  np.testing.assert_allclose(Rotary(1e5, "linear", 4.).speeds(16), plain / 4)
  # Position 4 p under a factor of 4 is position p without it.
  x_BTU = jax.random.normal(jax.random.key(2), (1, 3, 16))
  far_BT = jnp.asarray([[4, 400, 4_000]])
  np.testing.assert_allclose(
      position.rotate(x_BTU, far_BT, Rotary(1e5, "linear", 4.)),
      position.rotate(x_BTU, far_BT // 4, Rotary(1e5)), atol=1e-5)


def test_bfloat16_turns_in_float32():
  x_BTU = jax.random.normal(jax.random.key(3), (1, 2, 8), jnp.bfloat16)
  positions_BT = jnp.asarray([[3, 900_001]])
  y_BTU = position.rotate(x_BTU, positions_BT, Rotary())
  assert y_BTU.dtype == jnp.bfloat16
  want_BTU = position.rotate(x_BTU.astype(jnp.float32), positions_BT, Rotary())
  np.testing.assert_array_equal(y_BTU, want_BTU.astype(jnp.bfloat16))


def test_says_what_is_wrong():
  with pytest.raises(ValueError, match="width=7 is odd"):
    Rotary().speeds(7)
  with pytest.raises(ValueError, match="scaling='ntk' is none of"):
    Rotary(scaling="ntk").speeds(8)
