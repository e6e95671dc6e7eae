"""Positions of patches: the stretched table, and turns that are relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import image_position

SIDE = 4
TABLE_PD = np.random.default_rng(0).normal(size=(SIDE**2, 3)).astype("f4")


def places(rows, columns):
  row, column = np.mgrid[:rows, :columns].reshape(2, 1, -1).astype(np.int32)
  return row, column, np.full_like(row, rows), np.full_like(row, columns)


def bilinear(rows, columns):
  """The table at a grid, a patch and a corner at a time."""
  table = TABLE_PD.reshape(SIDE, SIDE, -1)
  out = np.zeros((rows, columns, 3))
  for i in range(rows):
    for j in range(columns):
      y = min(max((i + 0.5) / rows * SIDE - 0.5, 0), SIDE - 1)
      x = min(max((j + 0.5) / columns * SIDE - 0.5, 0), SIDE - 1)
      for a in range(SIDE):
        for b in range(SIDE):
          out[i, j] += (max(0, 1 - abs(y - a)) * max(0, 1 - abs(x - b))
                        * table[a, b])
  return out.reshape(1, rows * columns, -1)


@pytest.mark.parametrize("rows, columns", [(1, 1), (4, 4), (2, 7), (9, 3)])
def test_table_is_stretched_over_any_grid(rows, columns):
  place_BPD = image_position.interpolate(
      jnp.asarray(TABLE_PD), SIDE, *places(rows, columns))
  np.testing.assert_allclose(place_BPD, bilinear(rows, columns), atol=1e-6)
  resized = jax.image.resize(TABLE_PD.reshape(SIDE, SIDE, -1),
                             (rows, columns, 3), "bilinear", antialias=False)
  np.testing.assert_allclose(place_BPD[0], resized.reshape(-1, 3), atol=1e-5)


def test_table_of_the_grids_size_is_read_as_it_is():
  place_BPD = image_position.interpolate(
      jnp.asarray(TABLE_PD), SIDE, *places(SIDE, SIDE))
  np.testing.assert_array_equal(place_BPD[0], TABLE_PD)


def scores(row, column):
  """q . k of two fixed vectors that stand a given step apart."""
  random = np.random.default_rng(1)
  q_BPHK, k_BPHK = random.normal(size=(2, 1, 1, 1, 8)).astype("f4")
  at = np.array([[3, 5], [3 + row, 5 + column]])

  def turned(x_BPHK, place):
    angles = image_position.angles_2d(*(np.full((1, 1), p) for p in place), 8)
    return image_position.rotate(jnp.asarray(x_BPHK), *angles)

  return [float(jnp.sum(turned(q_BPHK, at[0] + shift)
                        * turned(k_BPHK, at[1] + shift)))
          for shift in (0, 11, np.array([40, -5]))]


def test_scores_depend_on_the_step_between_patches_alone():
  for row, column in ((0, 0), (2, -4), (7, 1)):
    np.testing.assert_allclose(scores(row, column),
                               scores(row, column)[0], rtol=1e-4, atol=1e-4)


def test_steps_down_and_across_differ():
  assert len({round(scores(*step)[0], 3)
              for step in ((0, 0), (0, 1), (1, 0), (-1, 0), (1, 1))}) == 5


def test_narrow_heads_are_refused():
  with pytest.raises(ValueError, match="width=6"):
    image_position.angles_2d(np.zeros((1, 1)), np.zeros((1, 1)), 6)
