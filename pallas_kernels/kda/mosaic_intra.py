"""Mosaic GPU body of what a chunk's tokens do to each other.

One warpgroup works on one chunk of one head. All C x C matrices are kept
transposed, keys in rows (J) and queries in columns (C): so the decayed keys
are the operand in registers, and each half of the queries has its own
reference decay.

Every difference of running sums of the log decay is one product of the decays
with a constant matrix of -1, 0 and 1, so no row is ever broadcast.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.inputs import UNIT_EPSILON

CHUNK = 64
WIDTH = 128  # of a head's keys and values
# Queries that share a reference decay; |floor| * TILE / 2 must stay below 88.
TILE = 32
LOG2E = 1.4426950408889634

WEIGHTS = ("up", "down 0", "down 1", "read", "write")
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def intra(static, size):
  """Returns the kernel: see `_intra` for its inputs and outputs."""
  b, t, g, n = (size[x] for x in "BTGN")
  tokens = plgpu.SMEM((CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED)
  wide = (b, g, n, CHUNK, WIDTH)
  return plgpu.kernel(
      functools.partial(_intra, static, size["G"] // size["H"]),
      out_type=(
          jax.ShapeDtypeStruct(wide, jnp.bfloat16),  # w
          jax.ShapeDtypeStruct(wide, jnp.bfloat16),  # u
          jax.ShapeDtypeStruct(wide, jnp.bfloat16),  # q_g
          jax.ShapeDtypeStruct(wide, jnp.bfloat16),  # k_g
          jax.ShapeDtypeStruct((b, g, n, CHUNK, CHUNK), jnp.bfloat16),  # mix
          jax.ShapeDtypeStruct((b, g, n, WIDTH), jnp.float32),  # gamma
      ),
      scratch_types=dict(
          z_s=tokens, q_s=tokens, k_s=tokens, q_up_s=tokens,
          k_up_s=tokens,
          low_s=plgpu.SMEM((2, CHUNK, 64), jnp.bfloat16, transforms=SWIZZLED),
          square_s=plgpu.SMEM((CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
          column_s=plgpu.SMEM((2, CHUNK), jnp.float32),
          gamma_s=plgpu.SMEM((WIDTH,), jnp.float32),
          gate_barrier=plgpu.Barrier(),
          token_barrier=plgpu.Barrier(num_arrivals=2),
          value_barrier=plgpu.Barrier()),
      kernel_name="kda_intra", interpret=static.interpret, grid=(g, n, b), grid_names=("head", "chunk", "batch"),
      compiler_params=plgpu.CompilerParams(
          approx_math=True, unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane))


def weights():
  """Constant matrices [5, C, J]: which decays each running sum is made of."""
  row, column = np.ogrid[:CHUNK, :CHUNK]

  def between(first, last):
    """Tokens after `first`, up to `last`; negative if `first` is the later."""
    return (column <= last) * 1.0 - (column <= first)

  middle = row // TILE * TILE + TILE // 2
  made = dict(up=between(middle, row), read=between(-1, row),
              write=between(row, CHUNK))
  for tile in range(CHUNK // TILE):
    made[f"down {tile}"] = between(row, tile * TILE + TILE // 2)
  return jnp.asarray(np.stack([made[x] for x in WEIGHTS]), jnp.bfloat16)


def multiply(static, acc_ref, a, b):
  """acc += a b, where a may lie in registers."""
  if not (static.interpret and isinstance(a, jax.Array)):
    plgpu.wgmma(acc_ref, a, b)
    return

  def through_memory(a_s):  # the interpreter reads operands from there only
    a_s[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(acc_ref, a_s, b)
  pl.run_scoped(through_memory, plgpu.SMEM(a.shape, a.dtype,
                                           transforms=SWIZZLED))


def product(static, shape, *pairs):
  """Sum of the products of pairs of operands, in float32."""
  def run(acc_ref):
    for a, b in pairs:
      multiply(static, acc_ref, a, b)
    return acc_ref[...]
  return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _intra(
    static, repeats,
    # inputs
    q_ref,  # [B, T, H, K]
    k_ref,  # [B, T, H, K]
    v_ref,  # [B, T, G, V]
    z_ref,  # [B, T, G, K]
    slope_ref,  # [G, K]: 2^(slope z + bias) is exp of the gate's argument
    bias_ref,  # [G, K]
    beta_ref,  # [B, G, N * C]: write strength, 0 on padding
    marks_ref,  # [B, N, 4, C]: real, reads and writes the state, document
    weights_ref,  # `weights()`
    # outputs
    w_ref,  # [B, G, N, C, K]: -M (k e^G)
    u_ref,  # [B, G, N, V / 2, 2 C]: (M v)^T, its halves side by side
    q_g_ref,  # [B, G, N, C, K]: q e^G
    k_g_ref,  # [B, G, N, C, K]: k e^(G_C - G)
    mix_ref,  # [B, G, N, J, C]: A^T
    gamma_ref,  # [B, G, N, K]: e^G_C
    # scratch
    *, z_s, low_s, q_s, k_s, q_up_s, k_up_s, square_s, column_s, gamma_s,
    gate_barrier, token_barrier, value_barrier,
):
  """One chunk of one value head."""
  g, n, b = (jax.lax.axis_index(x) for x in ("head", "chunk", "batch"))
  h = jax.lax.div(g, repeats)
  tokens = pl.ds(n * CHUNK, CHUNK)
  plgpu.copy_gmem_to_smem(z_ref.at[b, tokens, g], z_s, gate_barrier)
  plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h], k_s, token_barrier)
  plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h], q_s, token_barrier)
  beta_J = _vector(beta_ref.at[b, g, tokens], ROW)
  square_s[...] = plgpu.layout_cast(
      jnp.ones(square_s.shape, square_s.dtype), plgpu.Layout.WGMMA)

  plgpu.barrier_wait(gate_barrier)
  for half in (0, 1):
    _gate(static, z_s.at[:, _at(half)], low_s.at[half],
          slope_ref.at[g, _at(half)], bias_ref.at[g, _at(half)],
          marks_ref.at[b, n, 0])
  plgpu.commit_smem()
  sums = functools.partial(_sums, static, z_s, low_s)

  plgpu.barrier_wait(token_barrier)
  q_scale = _scale(static, q_s) * static.scale
  k_scale = _scale(static, k_s)
  column_s[0] = q_scale
  column_s[1] = k_scale * beta_J
  weights = _weights(weights_ref, "up")
  for half in (0, 1):
    up = sums(weights, half)
    _store(q_up_s, half, _load(q_s, half) * up)
    _store(k_up_s, half, _load(k_s, half) * up)
  plgpu.commit_smem()

  pairs = []
  for tile in range(CHUNK // TILE):
    weights = _weights(weights_ref, f"down {tile}")
    keys = [(_load(k_s, half) * sums(weights, half)).astype(jnp.bfloat16)
            for half in (0, 1)]
    rows = pl.ds(tile * TILE, TILE)
    pairs.append([
        product(static, (CHUNK, TILE), *(
            (keys[half], up_s.at[rows, _at(half)].transpose((1, 0)))
            for half in (0, 1)))
        for up_s in (q_up_s, k_up_s)])
  mix_JC, pair_JC = (jnp.concatenate(x, axis=1) for x in zip(*pairs))
  same_JC = None
  if static.marks:
    same_JC = _wide(_vector(marks_ref.at[b, n, 3], ROW), 0) == _wide(
        _vector(marks_ref.at[b, n, 3], COLUMN), 1)
  key_J = _wide(k_scale, 0)
  mix_JC = jnp.where(_keeps(same_JC, strict=False), mix_JC * key_J * _wide(
      plgpu.load(column_s.at[0], layout=COLUMN, optimized=False), 1), 0).astype(jnp.bfloat16)
  lower_JC = jnp.where(_keeps(same_JC, strict=True), pair_JC * key_J * _wide(
      plgpu.load(column_s.at[1], layout=COLUMN, optimized=False), 1), 0)
  plgpu.commit_smem()  # all products are done before a copy overwrites
  plgpu.copy_gmem_to_smem(v_ref.at[b, tokens, g], q_up_s, value_barrier)

  reads = writes = 1.0
  if static.marks:
    reads, writes = (_vector(marks_ref.at[b, n, x], ROW) for x in (1, 2))
  _ends(weights_ref, sums, q_s, k_s, k_up_s, q_scale * reads, k_scale * reads,
        k_scale * writes)
  for half in (0, 1):
    whole_K8 = product(static, (64, 8), *(
        (x_s.transpose((1, 0)), square_s.at[pl.ds(0, 8)].transpose((1, 0)))
        for x_s in (z_s.at[:, _at(half)], low_s.at[half])))
    gamma_K = jnp.exp2(jnp.max(whole_K8, axis=1))
    if static.marks:
      gamma_K *= _vector(marks_ref.at[b, n, 4], ROW)
    gamma_s[_at(half)] = gamma_K
  plgpu.commit_smem()  # all products of the decays are done
  low_s[0] = mix_JC
  plgpu.commit_smem()
  for x_s, x_ref in ((q_s, q_g_ref), (k_s, k_g_ref),
                     (low_s.at[0], mix_ref), (gamma_s, gamma_ref)):
    plgpu.copy_smem_to_gmem(x_s, x_ref.at[b, g, n])

  inverse_JC = _inverse(static, lower_JC, square_s, z_s.at[:, _at(0)])
  m_s = low_s.at[1]
  m_s[...] = (inverse_JC * _wide(beta_J, 0)).astype(jnp.bfloat16)
  plgpu.commit_smem()
  for half in (0, 1):
    w = product(static, (CHUNK, 64), (m_s.transpose((1, 0)), k_up_s.at[:, _at(half)]))
    z_s[:, _at(half)] = (-w).astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(z_s, w_ref.at[b, g, n])
  plgpu.barrier_wait(value_barrier)
  u = [product(static, (64, CHUNK), (q_up_s.at[:, _at(half)].transpose((1, 0)), m_s))
       for half in (0, 1)]
  for half in (0, 1):
    k_up_s[:, _at(half)] = u[half].astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(k_up_s, u_ref.at[b, g, n])
  plgpu.wait_smem_to_gmem(0)


def _at(half):
  """The channels of one half of a head."""
  return pl.ds(half * 64, 64)


def _load(x_s, half):
  """One half of a tile of tokens, as float32."""
  return x_s[:, _at(half)].astype(jnp.float32)


def _store(x_s, half, x):
  x_s[:, _at(half)] = x.astype(jnp.bfloat16)


def _vector(ref, layout):
  """A vector of global memory, along the rows or columns of a product."""
  return plgpu.load(ref, layout=layout, optimized=False)


def _wide(x, axis, columns=CHUNK):
  """Repeats a vector: axis 0 if it lies along the rows."""
  shape = (CHUNK, columns)
  return jax.lax.broadcast_in_dim(x, shape, (axis,))


def _iotas():
  """Row and column of each entry."""
  return [plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis,
                                 layout=plgpu.Layout.WGMMA)
          for axis in (0, 1)]


def _keeps(same_JC, strict):
  """Pairs of a query and a key not after it, in one document."""
  j, c = _iotas()
  keeps = j < c if strict else j <= c
  return keeps if same_JC is None else keeps & same_JC


def _gate(static, z_s, low_s, slope_ref, bias_ref, real_ref):
  """Replaces gate inputs by the log2 decay, in two terms of bfloat16."""
  x = z_s[...].astype(jnp.float32)
  if static.gate:
    x = x * _wide(_vector(slope_ref, COLUMN), 1) + _wide(
        _vector(bias_ref, COLUMN), 1)
    # a reciprocal is a call, and this two instructions
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x))
    x = (static.floor * LOG2E) * (root * root)
  else:
    x *= LOG2E
  if static.marks:
    x *= _wide(_vector(real_ref, ROW), 0)
  z_s[...], low_s[...] = _split(x)


def _weights(weights_ref, name):
  return plgpu.load(weights_ref.at[WEIGHTS.index(name)],
                    layout=plgpu.Layout.WGMMA, optimized=False)


def _split(x):
  """Two terms of bfloat16 whose sum has 16 bits of a float32."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  high = jax.lax.bitcast_convert_type(bits & -65536, jnp.float32)
  return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def _sums(static, z_s, low_s, weights, half):
  """2^(sums of the decays over tokens with some weights), half the channels."""
  return jnp.exp2(product(
      static, (CHUNK, 64), (weights, z_s.at[:, _at(half)]),
      (weights, low_s.at[half])))


def _scale(static, x_s):
  """What the rows are to be multiplied by."""
  if not static.normalize:
    return jnp.ones((CHUNK,), jnp.float32)
  square = 0.0
  for half in (0, 1):
    x = _load(x_s, half)
    square += jnp.sum(x * x, axis=1)
  return jax.lax.rsqrt(square + UNIT_EPSILON)


def _ends(weights_ref, sums, q_s, k_s, k_read_s, q_scale, k_scale, k_last):
  """Decays queries and keys from the chunk's start, keys to its end."""
  weights = _weights(weights_ref, "read")
  for half in (0, 1):
    read = sums(weights, half)
    _store(q_s, half, _load(q_s, half) * _wide(q_scale, 0) * read)
    _store(k_read_s, half, _load(k_s, half) * _wide(k_scale, 0) * read)
  weights = _weights(weights_ref, "write")
  for half in (0, 1):
    write = sums(weights, half)
    _store(k_s, half, _load(k_s, half) * _wide(k_last, 0) * write)


def _inverse(static, upper, x_s, y_s):
  """(I + upper)^-1, strictly upper; merges blocks of 2, 4, ... rows.

  Each merge is [[a, c], [0, b]]^-1 = [[a', -a' c b'], [0, b']]: as stable as
  substitution, which a power series with its large terms is not. A Newton step
  with the residual to 16 bits takes out the merges' rounding.
  """
  shape = (CHUNK, CHUNK)
  narrow = lambda y: y.astype(jnp.bfloat16)

  def times(left, right_s, right):
    right_s[...] = right
    plgpu.commit_smem()
    return product(static, shape, *((x, right_s) for x in left))

  row, column = _iotas()
  eye = jnp.where(row == column, 1.0, 0.0)
  x = eye - jnp.where(row // 2 == column // 2, upper, 0.0)
  for level in range(1, 6):
    joins = (row >> (level + 1) == column >> (level + 1)) & (
        row >> level != column >> level)
    y = times([narrow(jnp.where(joins, upper, 0.0))], x_s, narrow(x))
    x -= times([narrow(x)], y_s, narrow(y))
  high, low = _split(x)
  y = times(_split(upper), x_s, high)
  # y leaves out what x's own rounding left out
  residual = narrow(eye - x - y + low.astype(jnp.float32))
  return x - low.astype(jnp.float32) + times([high], y_s, residual)
