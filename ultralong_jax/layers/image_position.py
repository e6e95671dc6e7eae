"""Places of patches in their image: a learned table, and 2-D rotation."""
import jax.numpy as jnp


def interpolate(table_PD, side, row_BP, column_BP, rows_BP, columns_BP):
  """Reads a square table of positions at each patch of grids of any size.

  The table is stretched over the image's grid, both as areas: cell i of n
  lies at (i + 1/2) / n. Between the centres of the table's cells it is
  bilinear, outside of the outermost ones constant. A grid of the table's own
  size reads it as it is. Everything is computed from places, so any mixture
  of grids has one static shape.

  Args:
    table_PD: side * side cells, row by row.
    side: cells of the table along each side.
    row_BP: each patch's row in its image, from 0.
    column_BP: its column.
    rows_BP: rows of its image, at least 1 (padding too).
    columns_BP: columns of its image, at least 1.

  Returns:
    place_BPD: in the table's dtype.
  """
  def around(index, count):
    """The two cells around a centre, and the second one's share."""
    at = (index + 0.5) * (side / count.astype(jnp.float32)) - 0.5
    at = jnp.clip(at, 0, side - 1)
    low = jnp.floor(at).astype(jnp.int32)
    return low, jnp.minimum(low + 1, side - 1), at - low

  top_BP, bottom_BP, down_BP = around(row_BP, rows_BP)
  left_BP, right_BP, across_BP = around(column_BP, columns_BP)

  def read(row_BP, column_BP, share_BP):
    cell_BPD = table_PD[row_BP * side + column_BP]
    return share_BP[..., None].astype(table_PD.dtype) * cell_BPD

  return (read(top_BP, left_BP, (1 - down_BP) * (1 - across_BP))
          + read(top_BP, right_BP, (1 - down_BP) * across_BP)
          + read(bottom_BP, left_BP, down_BP * (1 - across_BP))
          + read(bottom_BP, right_BP, down_BP * across_BP))


def angles_2d(row_BP, column_BP, width, base=1e4):
  """Returns cosine and sine by which the pairs of a head's channels turn.

  Pairs alternate between axes: pair 2 i turns by column * base^(-4 i / width)
  and pair 2 i + 1 by row times the same, so both axes have all speeds.

  Args:
    row_BP: each patch's row.
    column_BP: its column.
    width: channels of a head, a multiple of 4.
    base: of the slowest turn, nearly one in `base` patches.

  Returns:
    (cos_BPK, sin_BPK), float32, one of each pair: width / 2 channels.
  """
  if width % 4:
    raise ValueError(f"{width=} of a head is not a multiple of 4")
  speed_K = base ** (-4 * jnp.arange(width // 4) / width)
  places = jnp.stack([column_BP, row_BP], -1).astype(jnp.float32)
  angle = places[..., None, :] * speed_K[None, None, :, None]
  angle_BPK = angle.reshape(*row_BP.shape, width // 2)
  return jnp.cos(angle_BPK), jnp.sin(angle_BPK)


def rotate(x_BPHK, cos_BPK, sin_BPK):
  """Turns channels (2 i, 2 i + 1) of every head by angle i, in float32."""
  even, odd = (x_BPHK[..., i::2].astype(jnp.float32) for i in (0, 1))
  cos, sin = cos_BPK[:, :, None], sin_BPK[:, :, None]
  turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
  return turned.reshape(x_BPHK.shape).astype(x_BPHK.dtype)
