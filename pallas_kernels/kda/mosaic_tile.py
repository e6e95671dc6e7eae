"""Mosaic GPU helpers for tiles of 64 x 64 in one warpgroup."""
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic import CHUNK

# Of vectors along the rows and the columns of a product.
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def multiply(static, acc_ref, a, b, spare_s=None):
  """acc += a b, where a may lie in registers.

  The interpreter reads operands from shared memory only: there a goes through
  `spare_s`, or a buffer made for it.
  """
  if not (static.interpret and isinstance(a, jax.Array)):
    plgpu.wgmma(acc_ref, a, b)
    return

  def through_memory(a_s):
    a_s[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(acc_ref, a_s, b)

  if spare_s is not None:
    through_memory(spare_s)
  else:
    pl.run_scoped(through_memory, plgpu.SMEM(a.shape, a.dtype,
                                             transforms=SWIZZLED))


def store(ref, value):
  """Stores with bank conflicts: jax 0.12 asks for consent, 0.11 does not."""
  if hasattr(plgpu, "store"):
    plgpu.store(ref, value, optimized=False)
  else:
    ref[...] = value


def vector(ref, layout):
  """A vector along the rows or the columns of a product."""
  return plgpu.load(ref, layout=layout, optimized=False)


def wide(x, axis):
  """Repeats a vector: axis 0 if it lies along the rows."""
  return jax.lax.broadcast_in_dim(x, (CHUNK, CHUNK), (axis,))


def iotas():
  """Row and column of each entry."""
  return [plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis,
                                 layout=plgpu.Layout.WGMMA)
          for axis in (0, 1)]


def narrow(x):
  return x.astype(jnp.bfloat16)


def split(x):
  """Two terms of bfloat16 whose sum has 16 bits of a float32."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  high = jax.lax.bitcast_convert_type(bits & -65536, jnp.float32)
  return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def inverse(static, upper, upper_s, x_s, low_s, once_committed):
  """(I + upper)^-1, strictly upper; merges blocks of 2, 4, ... rows.

  Each merge is [[a, c], [0, b]]^-1 = [[a', -a' c b'], [0, b']]: as stable as
  substitution, which a power series with its large terms is not. A Newton step
  with the residual to 16 bits takes out the merges' rounding.

  Args:
    static: mosaic.Static.
    upper: what is added to I.
    upper_s: memory for it.
    x_s: two memories for what is inverted so far.
    low_s: memory for the residual's sake; copies to global memory are awaited
      before it is used.
    once_committed: called when all stores before are seen by copies.
  """
  row, column = iotas()
  acc = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
  high, low = split(upper)
  upper_s[...] = high
  plgpu.commit_smem()
  once_committed()
  x = jnp.where(row == column, 1.0, 0.0) - jnp.where(
      row >> 1 == column >> 1, upper, 0.0)

  def merge(level, x, left_acc, add_acc):
    joins = (row >> level) ^ (column >> level) == 1
    multiply(static, left_acc, narrow(x), upper_s)
    here_s = x_s[level % 2]  # others may still read what they last used
    here_s[...] = narrow(x)
    plgpu.commit_smem()
    left = jnp.where(joins, left_acc[...], 0.0)
    multiply(static, add_acc, narrow(left), here_s)
    return x - add_acc[...]

  for level in range(1, 6):
    x = pl.run_scoped(functools.partial(merge, level, x), acc, acc)

  def newton(product_acc, add_acc):
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    high, rest = split(x)
    multiply(static, product_acc, high, upper_s)
    x_s[0][...] = high
    low_s[...] = low
    plgpu.commit_smem()
    multiply(static, product_acc, high, low_s)
    rest = rest.astype(jnp.float32)
    residual = jnp.where(row == column, 1.0, 0.0) - x + rest - product_acc[...]
    multiply(static, add_acc, narrow(residual), x_s[0])
    return x - rest + add_acc[...]

  return pl.run_scoped(newton, acc, acc)
