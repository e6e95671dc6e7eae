"""Mosaic GPU body of what a chunk's tokens do to each other.

One warpgroup works on one chunk of one head. All C x C matrices are kept
transposed, keys in rows (J) and queries in columns (C): so the decayed keys
are the operand in registers, and each half of the queries has its own
reference decay.
"""
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.inputs import UNIT_EPSILON
from pallas_kernels.kda.mosaic import CHUNK, LOG2E, TILE, WIDTH
from pallas_kernels.kda.mosaic_tile import (
    COLUMN, ROW, SWIZZLED, inverse, iotas, multiply, narrow, split, store,
    vector, wide)


def intra(static, size):
  """Returns the kernel: see `_intra` for its inputs and outputs."""
  b, g, n = (size[x] for x in "BGN")
  tokens = plgpu.SMEM((CHUNK, WIDTH), jnp.bfloat16, transforms=SWIZZLED)
  square = plgpu.SMEM((CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED)
  deep = jax.ShapeDtypeStruct((b, g, n, CHUNK, WIDTH), jnp.bfloat16)
  return plgpu.kernel(
      functools.partial(_intra, static, size["G"] // size["H"]),
      out_type=(
          deep, deep, deep, deep,
          jax.ShapeDtypeStruct((b, g, n, CHUNK, CHUNK), jnp.bfloat16),
          jax.ShapeDtypeStruct((b, g, n, WIDTH), jnp.float32)),
      scratch_types=dict(
          z_s=tokens, q_s=tokens, k_s=tokens, k_read_s=tokens, low_s=square,
          q_up_s=square, k_up_s=square, square_s=square, running_s=square,
          gate_s=plgpu.SMEM((2, WIDTH), jnp.float32),
          column_s=plgpu.SMEM((2, CHUNK), jnp.float32),
          sums_s=plgpu.SMEM((8, WIDTH), jnp.float32),
          gamma_s=plgpu.SMEM((WIDTH,), jnp.float32),
          gate_barrier=plgpu.Barrier(num_arrivals=2),
          token_barrier=plgpu.Barrier(num_arrivals=2),
          value_barrier=plgpu.Barrier(num_arrivals=2)),
      kernel_name="kda_intra", interpret=static.interpret,
      grid=(g, n, b), grid_names=("head", "chunk", "batch"),
      compiler_params=plgpu.CompilerParams(
          approx_math=True, unsafe_no_auto_barriers=True,
          reduction_scratch_bytes=512,  # two blocks must fit a multiprocessor
          lowering_semantics=plgpu.LoweringSemantics.Lane))


def _intra(
    static, repeats,
    # inputs
    q_ref,  # [B, T, H, K]
    k_ref,  # [B, T, H, K]
    v_ref,  # [B, T, G, V]
    z_ref,  # [B, T, G, K]
    gate_ref,  # [G, 2, K]: slope and bias of the gate's argument
    beta_ref,  # [B, G, N * C]: write strength, 0 on padding
    marks_ref,  # [B, N, 5, C]: see mosaic._rows
    # outputs
    w_ref,  # [B, G, N, C, K]: -M (k e^G)
    u_ref,  # [B, G, N, V / 2, 2 C]: (M v)^T, its halves side by side
    q_g_ref,  # [B, G, N, C, K]: q e^G
    k_g_ref,  # [B, G, N, C, K]: k e^(G_C - G)
    mix_ref,  # [B, G, N, J, C]: A^T
    gamma_ref,  # [B, G, N, K]: e^G_C
    # scratch
    *, z_s, q_s, k_s, k_read_s, low_s, q_up_s, k_up_s, square_s, running_s,
    gate_s, column_s, sums_s, gamma_s, gate_barrier, token_barrier,
    value_barrier,
):
  """One chunk of one value head."""
  g, n, b = (jax.lax.axis_index(x) for x in ("head", "chunk", "batch"))
  h = jax.lax.div(g, repeats)
  tokens = pl.ds(n * CHUNK, CHUNK)
  plgpu.copy_gmem_to_smem(z_ref.at[b, tokens, g], z_s, gate_barrier)
  plgpu.copy_gmem_to_smem(gate_ref.at[g], gate_s, gate_barrier)
  plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h], k_s, token_barrier)
  plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h], q_s, token_barrier)
  beta_J = vector(beta_ref.at[b, g, tokens], ROW)
  marks = [vector(marks_ref.at[b, n, x], COLUMN if x == 4 else ROW)
           if static.marks else 1.0 for x in range(5)]
  square_s[...] = _selected_tokens()
  running_s[...] = _running_sums()

  def half(part, mix_acc, pair_acc, sum_acc, few_acc):
    """What half of the channels add to all pairs of tokens."""
    at = pl.ds(part * 64, 64)
    _gate(static, z_s.at[:, at], low_s, gate_s.at[:, at], marks[0])
    plgpu.commit_smem()
    for x_s in (z_s.at[:, at], low_s):
      multiply(static, sum_acc, running_s, x_s)
      multiply(static, few_acc, x_s.transpose((1, 0)),
               square_s.at[pl.ds(0, 8)].transpose((1, 0)))
    sum_JK = plgpu.wgmma_accumulator_load(sum_acc)
    store(sums_s.at[:, at].transpose((1, 0)), plgpu.layout_cast(
        few_acc[...], plgpu.Layout.WGMMA_TRANSPOSED))
    plgpu.commit_smem()
    *middles, last_K = (vector(sums_s.at[x, at], COLUMN) for x in range(3))
    channels = _Channels(q_s.at[:, at], k_s.at[:, at], sum_JK,
                         [wide(x, 1) for x in middles], last_K)
    _store_up(channels, q_up_s, k_up_s)
    plgpu.commit_smem()
    for tile in range(CHUNK // TILE):
      rows = pl.ds(tile * TILE, TILE)
      key = _keys_seen(channels, tile)
      for acc, up_s in ((mix_acc, q_up_s), (pair_acc, k_up_s)):
        multiply(static, acc.at[:, rows], key,
                 up_s.at[rows].transpose((1, 0)))
    # behind the products above
    _store_ends(channels, q_s.at[:, at], k_s.at[:, at], k_read_s.at[:, at],
                scales, marks)
    store(gamma_s.at[at], jnp.exp2(last_K) * marks[4])

  acc = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
  few = plgpu.ACC((CHUNK, 8), jnp.float32)

  def pairs(mix_acc, pair_acc):
    @pl.loop(0, 2)
    def _(part):
      pl.run_scoped(functools.partial(half, part, mix_acc, pair_acc), acc, few)
    return mix_acc[...], pair_acc[...]

  plgpu.commit_smem()
  plgpu.barrier_wait(token_barrier)
  q_scale, k_scale = _scales(static, square_s, q_s, k_s)
  scales = q_scale * static.scale, k_scale
  store(column_s.at[0], scales[0])
  store(column_s.at[1], k_scale * beta_J)
  plgpu.barrier_wait(gate_barrier)
  mix_JC, pair_JC = pl.run_scoped(pairs, acc, acc)
  plgpu.commit_smem()  # all products are done before their operands go
  for part, up_s in enumerate((q_up_s, k_up_s)):
    plgpu.copy_gmem_to_smem(v_ref.at[b, tokens, g, pl.ds(part * 64, 64)],
                            up_s, value_barrier)
  for x_s, x_ref in ((q_s, q_g_ref), (k_s, k_g_ref), (gamma_s, gamma_ref)):
    plgpu.copy_smem_to_gmem(x_s, x_ref.at[b, g, n])
  row, column = iotas()
  keeps = row <= column
  if static.marks:
    keeps &= wide(marks[3], 0) == wide(
        vector(marks_ref.at[b, n, 3], COLUMN), 1)
  mix_JC *= wide(k_scale, 0) * wide(vector(column_s.at[0], COLUMN), 1)
  pair_JC *= wide(k_scale, 0) * wide(vector(column_s.at[1], COLUMN), 1)
  low_s[...] = jnp.where(keeps, mix_JC, 0.0).astype(jnp.bfloat16)
  upper_JC = jnp.where(keeps & (row != column), pair_JC, 0.0)
  inverse_JC = inverse(
      static, upper_JC, z_s.at[:, pl.ds(0, 64)],
      (z_s.at[:, pl.ds(64, 64)], square_s), k_s.at[:, pl.ds(0, 64)],
      lambda: plgpu.copy_smem_to_gmem(low_s, mix_ref.at[b, g, n]))
  m_s = square_s
  m_s[...] = (inverse_JC * wide(beta_J, 0)).astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.barrier_wait(value_barrier)

  def solved(*accs):
    for part, (v_s, w_acc, u_acc) in enumerate(
        zip((q_up_s, k_up_s), accs[:2], accs[2:])):
      multiply(static, w_acc, m_s.transpose((1, 0)),
               k_read_s.at[:, pl.ds(part * 64, 64)])
      multiply(static, u_acc, v_s.transpose((1, 0)), m_s)
    return tuple(x[...] for x in accs)

  *w, u_0, u_1 = pl.run_scoped(solved, acc, acc, acc, acc)
  for part in (0, 1):
    z_s[:, pl.ds(part * 64, 64)] = (-w[part]).astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(z_s, w_ref.at[b, g, n])
  for part, u in enumerate((u_0, u_1)):
    k_read_s[:, pl.ds(part * 64, 64)] = u.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(k_read_s, u_ref.at[b, g, n])
  plgpu.wait_smem_to_gmem(0)


def _minus_one_where(mask):
  """-1, since decays are kept without their signs; else 0."""
  full = functools.partial(jnp.full, mask.shape, dtype=jnp.bfloat16)
  return jnp.where(mask, full(-1.0), full(0.0))


def _running_sums():
  """The matrix that makes running sums of a chunk's log decays."""
  row, column = iotas()
  return _minus_one_where(column <= row)


def _selected_tokens():
  """Tokens up to the middle of either tile in rows 0 and 1, all in others."""
  row, column = iotas()
  last = jnp.where(row == 0, TILE // 2,
                   jnp.where(row == 1, TILE + TILE // 2, CHUNK))
  return _minus_one_where(column <= last)


def _gate(static, z_s, low_s, gate_s, real):
  """Replaces gate inputs by minus the log2 decay, in two terms."""
  x = z_s[...].astype(jnp.float32)
  if static.gate:
    slope, bias = (wide(vector(gate_s.at[x], COLUMN), 1) for x in (0, 1))
    # -floor / (1 + 2^(..)): a division would be a call
    x = jnp.exp2(math.log2(-static.floor * LOG2E) - jnp.log2(
        1.0 + jnp.exp2(x * slope + bias)))
  else:
    x *= -LOG2E
  if static.marks:
    x *= wide(real, 0)
  z_s[...], low_s[...] = split(x)


def _scales(static, ones_s, *tiles):
  """What the rows of each tile are to be multiplied by: 1 / |row|."""
  if not static.normalize:
    one = plgpu.layout_cast(jnp.ones((CHUNK,), jnp.float32), ROW)
    return [one for _ in tiles]

  def squares(*accs):
    for acc, x_s in zip(accs, tiles):
      for half in (0, 1):
        x = x_s[:, pl.ds(half * 64, 64)]
        multiply(static, acc, x * x, ones_s.at[pl.ds(0, 8)].transpose((1, 0)))
    return tuple(acc[...] for acc in accs)

  few = plgpu.ACC((CHUNK, 8), jnp.float32)
  # Most columns have minus the sum; two leave some channels out.
  return [jax.lax.rsqrt(UNIT_EPSILON - jnp.min(x, axis=1))
          for x in pl.run_scoped(squares, *(few for _ in tiles))]


class _Channels(NamedTuple):
  """64 channels of a chunk, and running sums of their log2 decay.

  Attributes:
    q_s: queries.
    k_s: keys.
    sum_JK: the sums.
    middles: those in the middle of each tile of queries, repeated over rows.
    last_K: those of the whole chunk.
  """
  q_s: Any
  k_s: Any
  sum_JK: jax.Array
  middles: list[jax.Array]
  last_K: jax.Array


def _store_up(channels, q_up_s, k_up_s):
  """Decays queries and keys, as readers, from the middle of their tile.

  Queries and keys are loaded again for each use: registers are what the kernel
  is short of.
  """
  up = jnp.exp2(channels.sum_JK - jnp.where(
      iotas()[0] < TILE, *channels.middles))
  q_up_s[...] = channels.q_s[...] * narrow(up)
  k_up_s[...] = channels.k_s[...] * narrow(up)


def _keys_seen(channels, tile):
  """Keys decayed to the middle of a tile of queries.

  Keys after the tile may overflow: no query of the tile may read them.
  """
  return channels.k_s[...] * narrow(jnp.exp2(
      channels.middles[tile] - channels.sum_JK))


def _store_ends(channels, q_s, k_s, k_read_s, scales, marks):
  """Decays queries and keys from the chunk's start, and keys to its end."""
  q_scale, k_scale = scales
  read = jnp.exp2(channels.sum_JK)
  q_s[...] = channels.q_s[...] * narrow(read * wide(q_scale * marks[1], 0))
  k = channels.k_s[...]
  k_read_s[...] = k * narrow(read * wide(k_scale * marks[1], 0))
  write = jnp.exp2(wide(channels.last_K, 1) - channels.sum_JK)
  k_s[...] = k * narrow(write * wide(k_scale * marks[2], 0))
