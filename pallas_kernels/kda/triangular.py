"""Solves the triangular system of a chunk with matmuls only."""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.config import TILE


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve_unit_lower(mix_CJ, x_CV, precision):
  """Solves (I + mix) y = x, mix strictly lower triangular.

  Its gradient needs no gradient of the inverse: dx = inverse^T dy and
  dmix = -tril(dx y^T, -1).
  """
  return _solve_fwd(mix_CJ, x_CV, precision)[0]


def _solve_fwd(mix_CJ, x_CV, precision):
  inverse_CJ = unit_lower_inverse(mix_CJ)
  y_CV = jnp.matmul(inverse_CJ, x_CV, precision=precision)
  return y_CV, (inverse_CJ, y_CV)


def _solve_bwd(precision, residuals, dy_CV):
  inverse_CJ, y_CV = residuals
  dx_JV = jnp.einsum("...CJ,...CV->...JV", inverse_CJ, dy_CV,
                     precision=precision)
  dmix_CJ = jnp.einsum("...CV,...JV->...CJ", dx_JV, y_CV, precision=precision)
  return jnp.where(lift(np.tri(dmix_CJ.shape[-1], k=-1, dtype=bool), dmix_CJ),
                   -dmix_CJ, 0), dx_JV


solve_unit_lower.defvjp(_solve_fwd, _solve_bwd)


def unit_lower_inverse(mix_CJ):
  """Inverts I + mix, mix strictly lower triangular, by block substitution.

  Doubling: from inverses t of diagonal blocks of size n, those of size 2n are
  t - t low t, low being the blocks below the diagonal. As stable as
  substitution, unlike a Neumann series, and matmuls only. All sizes up to a
  tile share one batch of dense tiles.

  Args:
    mix_CJ: [..., C, C], C a power of two times TILE.

  Returns:
    (I + mix)^-1, same shape.
  """
  lead, chunk = mix_CJ.shape[:-2], mix_CJ.shape[-1]
  tiles = chunk // TILE
  blocks = mix_CJ.reshape(*lead, tiles, TILE, tiles, TILE)
  mix_YIJ = jnp.stack([blocks[..., y, :, y, :] for y in range(tiles)], axis=-3)
  index = np.arange(TILE)
  inverse = jnp.eye(TILE, dtype=mix_CJ.dtype)
  inverse = jnp.broadcast_to(inverse, mix_YIJ.shape)
  size = 1
  while size < TILE:
    pair = index // size
    low_IJ = (pair[:, None] == pair[None] + 1) & (pair[None] % 2 == 0)
    low_YIJ = jnp.where(lift(low_IJ, mix_YIJ), mix_YIJ, 0)
    if size == 1:
      inverse = inverse - low_YIJ
    else:
      inverse = inverse - _sandwich(inverse, low_YIJ, inverse)
    size *= 2
  parts = [inverse[..., y, :, :] for y in range(tiles)]
  while len(parts) > 1:
    merged = []
    for i in range(0, len(parts), 2):
      low = mix_CJ[..., (i + 1) * size:(i + 2) * size,
                   i * size:(i + 1) * size]
      corner = -_sandwich(parts[i + 1], low, parts[i])
      merged.append(jnp.concatenate([
          jnp.concatenate([parts[i], jnp.zeros_like(corner)], axis=-1),
          jnp.concatenate([corner, parts[i + 1]], axis=-1)], axis=-2))
    parts, size = merged, size * 2
  return parts[0]


def _sandwich(a_CJ, b_CJ, c_CJ):
  return jnp.matmul(jnp.matmul(a_CJ, b_CJ, precision="highest"), c_CJ,
                    precision="highest")


def lift(x, like):
  """Adds leading axes of one, up to the rank of `like`."""
  return jnp.asarray(x.reshape((1,) * (like.ndim - x.ndim) + x.shape))
