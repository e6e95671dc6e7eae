"""Chunked Kimi delta attention in plain JAX: dense matmuls, any device.

Chunks of 64 tokens (32 for narrow heads) meet only in the state. Within a
chunk, tokens meet in tiles of 16, and every tile pair is one dense matmul of
decayed queries and keys. With a bounded decay that holds for diagonal tiles
too; the unbounded gate pays for its diagonal tiles with one exponent a token
pair and channel.
"""
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import inputs
from pallas_kernels.kda.config import TILE, chunk_tokens, group_rows
from pallas_kernels.kda.triangular import lift, solve_unit_lower


class Options(NamedTuple):
  """What is static in a call."""
  floor: float | None
  normalize_qk: bool
  sigmoid_beta: bool
  scale: float


class Tokens(NamedTuple):
  """The arrays that have a token axis; in groups, [N, B, heads, C, ...]."""
  q: jax.Array
  k: jax.Array
  v: jax.Array
  decay: jax.Array
  beta: jax.Array


class Marks(NamedTuple):
  """Documents of tokens, [B, C], and of the token before each chunk, [B]."""
  documents: jax.Array
  before: jax.Array
  real: jax.Array


class Terms(NamedTuple):
  """What a chunk contributes; see `terms`."""
  q_NBGCK: jax.Array
  att_NBGCJ: jax.Array
  solved_NBGCV: jax.Array
  key_NBGCK: jax.Array
  keep_NBGK: jax.Array


def unsupported(*_, **__):
  """Plain JAX runs everywhere."""
  return None


def kda(q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG, *, a_log, dt_bias, floor,
        normalize_qk, sigmoid_beta, scale, initial_state, segment_ids):
  """Runs the gated delta rule chunk by chunk. Arguments: see api.kda."""
  batch, _, heads, value = v_BTGV.shape
  if initial_state is None:
    initial_state = jnp.zeros((batch, heads, q_BTHK.shape[-1], value),
                              jnp.promote_types(jnp.float32, q_BTHK.dtype))
  options = Options(floor, normalize_qk, sigmoid_beta, scale)
  tokens = Tokens(q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG)
  return _kda(options, tokens, (a_log, dt_bias), initial_state, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(options, tokens, gate, s_BGKV, segment_ids):
  return _kda_fwd(options, tokens, gate, s_BGKV, segment_ids)[0]


def _kda_fwd(options, tokens, gate, s_BGKV, segment_ids):
  """Keeps the inputs and one state a group of chunks."""
  grouped, marks = _groups(tokens, segment_ids)

  def group(s_BGKV, xs):
    o_NBGCV, end_BGKV = _forward(options, *xs, gate, s_BGKV)
    return end_BGKV, (o_NBGCV, s_BGKV)

  end_BGKV, (o, starts) = jax.lax.scan(group, s_BGKV.astype(_dtype(tokens)),
                                       (grouped, marks))
  o_BTGV = _ungroup(o, tokens.v.shape[1]).astype(tokens.v.dtype)
  residuals = tokens, gate, starts, s_BGKV, segment_ids
  return (o_BTGV, end_BGKV), residuals


def _kda_bwd(options, residuals, cotangents):
  """Walks the groups backwards, recomputing each from its first state."""
  tokens, gate, starts, s_BGKV, segment_ids = residuals
  do_BTGV, ds_BGKV = cotangents
  grouped, marks = _groups(tokens, segment_ids)
  do = _group(do_BTGV.astype(_dtype(tokens)), _shape(tokens))

  def group(carry, xs):
    ds_BGKV, dgate = carry
    tokens, marks, do_NBGCV, s_BGKV = xs
    dtokens, dgate_here, ds_BGKV = _backward(
        options, tokens, marks, gate, s_BGKV, do_NBGCV, ds_BGKV)
    return (ds_BGKV, jax.tree.map(jnp.add, dgate, dgate_here)), dtokens

  zeros = jax.tree.map(jnp.zeros_like, gate)
  (ds_BGKV, dgate), dtokens = jax.lax.scan(
      group, (ds_BGKV, zeros), (grouped, marks, do, starts), reverse=True)
  dtokens = jax.tree.map(lambda x: _ungroup(x, tokens.q.shape[1]), dtokens)
  return dtokens, dgate, ds_BGKV.astype(s_BGKV.dtype), None


_kda.defvjp(_kda_fwd, _kda_bwd)


def terms(options, tokens, marks, gate):
  """Everything about a chunk that does not depend on the incoming state.

  With G the cumulative log decay, P_ij = sum_K k_i k_j exp(G_i - G_j) and
  T = (I + tril(beta P, -1))^-1:

    att = tril(sum_K q_i k_j exp(G_i - G_j)),  q = q exp(G)
    solved = [w, u] = T beta [k exp(G), v],  key = k exp(G_last - G)
    keep = exp(G_last)

  so that, with S the incoming state, o = q S + att (u - w S) and
  S' = keep S + key^T (u - w S). Where a document starts inside the chunk,
  masks cut the products and the paths from and to the state.
  """
  real = None if marks is None else marks.real[:, :, None]
  q_NBGCK, k_NBGCK, v_NBGCV, g_NBGCK, beta_NBGC = inputs.prepare(
      *tokens, real, *gate, **options._asdict(), heads_axis=-3)
  precision = _precision(tokens.q.dtype)
  same = None
  if marks is not None:
    same = marks.documents[..., None] == marks.documents[:, :, None]
  sum_NBGCK = _cumulative(g_NBGCK, same)
  last_NBGK = sum_NBGCK[..., -1, :]
  att, mix = _pairs(q_NBGCK, k_NBGCK, sum_NBGCK, options.floor, precision)
  causal = lift(np.tri(att.shape[-1], dtype=bool), att)
  if same is not None:
    causal = causal & same[:, :, None]
  att_NBGCJ = jnp.where(causal, att, 0)
  strict = causal & ~lift(np.eye(att.shape[-1], dtype=bool), att)
  mix_NBGCJ = jnp.where(strict, mix, 0) * beta_NBGC[..., None]
  from_start = jnp.exp(sum_NBGCK)
  to_end = jnp.exp(last_NBGK[..., None, :] - sum_NBGCK)
  keep_NBGK = jnp.exp(last_NBGK)
  if marks is not None:
    first, last = marks.before, marks.documents[..., -1]
    reached = marks.documents == first[..., None]
    kept = marks.documents == last[..., None]
    from_start = jnp.where(reached[:, :, None, :, None], from_start, 0)
    to_end = jnp.where(kept[:, :, None, :, None], to_end, 0)
    keep_NBGK = jnp.where((first == last)[..., None, None], keep_NBGK, 0)
  written = jnp.concatenate([k_NBGCK * from_start, v_NBGCV], axis=-1)
  solved_NBGCV = solve_unit_lower(
      mix_NBGCJ, written * beta_NBGC[..., None], precision)
  return Terms(q_NBGCK * from_start, att_NBGCJ, solved_NBGCV,
               k_NBGCK * to_end, keep_NBGK)


def _forward(options, tokens, marks, gate, s_BGKV):
  """One group of chunks: outputs and state after."""
  einsum = functools.partial(jnp.einsum, precision=_precision(tokens.q.dtype))
  t = terms(options, tokens, marks, gate)
  states_NBGKV, end_BGKV, _ = _states(t, s_BGKV, einsum)
  write_NBGCV = _write(t, states_NBGKV, einsum)
  o_NBGCV = einsum("NBGCK,NBGKV->NBGCV", t.q_NBGCK, states_NBGKV)
  o_NBGCV += einsum("NBGCJ,NBGJV->NBGCV", t.att_NBGCJ, write_NBGCV)
  return o_NBGCV, end_BGKV


def _states(t, s_BGKV, einsum):
  """Passes the state through a group's chunks: S' = step S + add.

  With step = keep - key^T w and add = key^T u, a chunk's turn is one small
  matmul, whatever the chunk's length.
  """
  key = s_BGKV.shape[-2]
  both = einsum("NBGCK,NBGCV->NBGKV", t.key_NBGCK, t.solved_NBGCV)
  keep_NBGKJ = t.keep_NBGK[..., None] * lift(
      np.eye(key, dtype=both.dtype), both)
  step_NBGKJ = keep_NBGKJ - both[..., :key]

  def chunk(s_BGJV, xs):
    step_BGKJ, add_BGKV = xs
    after_BGKV = einsum("BGKJ,BGJV->BGKV", step_BGKJ, s_BGJV) + add_BGKV
    return after_BGKV, s_BGJV

  end_BGKV, states_NBGKV = jax.lax.scan(chunk, s_BGKV,
                                        (step_NBGKJ, both[..., key:]))
  return states_NBGKV, end_BGKV, step_NBGKJ


def _write(t, states_NBGKV, einsum):
  """What a chunk's tokens write: u - w S."""
  key = states_NBGKV.shape[-2]
  return t.solved_NBGCV[..., key:] - einsum(
      "NBGCK,NBGKV->NBGCV", t.solved_NBGCV[..., :key], states_NBGKV)


def _backward(options, tokens, marks, gate, s_BGKV, do_NBGCV, ds_BGKV):
  """Gradients of one group, given those of its outputs and last state."""
  einsum = functools.partial(jnp.einsum, precision=_precision(tokens.q.dtype))
  t, pull = jax.vjp(
      lambda tokens, gate: terms(options, tokens, marks, gate), tokens, gate)
  states_NBGKV, _, step_NBGKJ = _states(t, s_BGKV, einsum)
  write_NBGCV = _write(t, states_NBGKV, einsum)
  w_NBGCK = t.solved_NBGCV[..., :s_BGKV.shape[-2]]
  dwrite_NBGJV = einsum("NBGCJ,NBGCV->NBGJV", t.att_NBGCJ, do_NBGCV)
  here_NBGKV = einsum("NBGCK,NBGCV->NBGKV", t.q_NBGCK, do_NBGCV)
  here_NBGKV -= einsum("NBGCK,NBGCV->NBGKV", w_NBGCK, dwrite_NBGJV)

  def chunk(ds_BGKV, xs):
    here_BGJV, step_BGKJ = xs
    before_BGJV = here_BGJV + einsum("BGKJ,BGKV->BGJV", step_BGKJ, ds_BGKV)
    return before_BGJV, ds_BGKV

  ds_BGKV, after_NBGKV = jax.lax.scan(
      chunk, ds_BGKV, (here_NBGKV, step_NBGKJ), reverse=True)
  dwrite_NBGJV += einsum("NBGCK,NBGKV->NBGCV", t.key_NBGCK, after_NBGKV)
  dw_NBGCK = -einsum("NBGCV,NBGKV->NBGCK", dwrite_NBGJV, states_NBGKV)
  dtokens, dgate = pull(Terms(
      q_NBGCK=einsum("NBGCV,NBGKV->NBGCK", do_NBGCV, states_NBGKV),
      att_NBGCJ=einsum("NBGCV,NBGJV->NBGCJ", do_NBGCV, write_NBGCV),
      solved_NBGCV=jnp.concatenate([dw_NBGCK, dwrite_NBGJV], axis=-1),
      key_NBGCK=einsum("NBGCV,NBGKV->NBGCK", write_NBGCV, after_NBGKV),
      keep_NBGK=jnp.sum(states_NBGKV * after_NBGKV, axis=-1)))
  return dtokens, dgate, ds_BGKV


@jax.custom_vjp
def _cumulative(g_NBGCK, same_NBCJ):
  """Inclusive sum over a chunk, as a matmul: faster than cumsum on CPU.

  The sum runs over documents, since only differences inside one are used. For
  the same reason gradients of other documents' sums add up to zero; leaving
  them out makes that zero exact.
  """
  lower_CJ = np.tri(g_NBGCK.shape[-2], dtype=g_NBGCK.dtype)
  del same_NBCJ
  return jnp.einsum("CJ,NBGJK->NBGCK", lower_CJ, g_NBGCK, precision="highest")


def _cumulative_fwd(g_NBGCK, same_NBCJ):
  return _cumulative(g_NBGCK, same_NBCJ), same_NBCJ


def _cumulative_bwd(same_NBCJ, dsum_NBGCK):
  lower_CJ = np.tri(dsum_NBGCK.shape[-2], dtype=dsum_NBGCK.dtype)
  if same_NBCJ is None:
    return jnp.einsum("CJ,NBGCK->NBGJK", lower_CJ, dsum_NBGCK,
                      precision="highest"), None
  lower_NBCJ = jnp.where(same_NBCJ, lift(lower_CJ, same_NBCJ), 0)
  return jnp.einsum("NBCJ,NBGCK->NBGJK", lower_NBCJ, dsum_NBGCK,
                    precision="highest"), None


_cumulative.defvjp(_cumulative_fwd, _cumulative_bwd)


def _pairs(q_NBGCK, k_NBGCK, sum_NBGCK, floor, precision):
  """Decayed products of all causal pairs; what is above is arbitrary.

  Returns sum_K q_i k_j exp(G_i - G_j) and the same with k_i for q_i. Rows of
  tile y are scaled by exp(G_i - ref_y), columns by exp(ref_y - G_j). With a
  bounded decay ref_y is G in the tile's middle: exponents stay within
  +-8 floors, masked pairs included. Unbounded, it is G before the tile, which
  serves the columns of earlier tiles (both exponents <= 0).
  """
  lead, chunk = q_NBGCK.shape[:-2], q_NBGCK.shape[-2]
  tiles = chunk // TILE

  def tiled(x):
    return x.reshape(*lead, tiles, TILE, x.shape[-1])

  sum_YIK = tiled(sum_NBGCK)
  if floor is None:
    ref_YK = jnp.pad(sum_YIK[..., :-1, -1, :],
                     [(0, 0)] * len(lead) + [(1, 0), (0, 0)])
  else:
    ref_YK = sum_YIK[..., TILE // 2, :]
  ref_YK = jax.lax.stop_gradient(ref_YK)  # the product does not depend on it
  row_YIK = jnp.exp(sum_YIK - ref_YK[..., None, :])
  rows_YIK = jnp.concatenate(
      [tiled(q_NBGCK) * row_YIK, tiled(k_NBGCK) * row_YIK], axis=-2)
  tile_Y1, tile_1J = np.ogrid[:tiles, :chunk]
  seen_YJ = tile_1J // TILE < tile_Y1 + (floor is not None)
  gap_YJK = ref_YK[..., None, :] - sum_NBGCK[..., None, :, :]
  gap_YJK = jnp.where(lift(seen_YJ[..., None], gap_YJK), gap_YJK, -jnp.inf)
  columns_YJK = k_NBGCK[..., None, :, :] * jnp.exp(gap_YJK)
  strips_YIJ = jnp.einsum("...YIK,...YJK->...YIJ", rows_YIK, columns_YJK,
                          precision=precision)
  att, mix = (x.reshape(*lead, chunk, chunk)
              for x in jnp.split(strips_YIJ, 2, axis=-2))
  if floor is None:
    diagonal_att, diagonal_mix = _diagonal(tiled(q_NBGCK), tiled(k_NBGCK),
                                           sum_YIK)
    att, mix = att + diagonal_att, mix + diagonal_mix
  return att, mix


def _diagonal(q_YIK, k_YIK, sum_YIK):
  """Pairs inside a tile by one exponent each, masked before exp."""
  causal_IJ = np.tri(TILE, dtype=bool)[..., None]
  gap_YIJK = sum_YIK[..., :, None, :] - sum_YIK[..., None, :, :]
  decay_YIJK = jnp.exp(jnp.where(lift(causal_IJ, gap_YIJK), gap_YIJK,
                                 -jnp.inf))
  key_YIJK = k_YIK[..., None, :, :] * decay_YIJK
  out = []
  for x_YIK in (q_YIK, k_YIK):
    tile_YIJ = jnp.sum(x_YIK[..., :, None, :] * key_YIJK, axis=-1)
    tiles = tile_YIJ.shape[-3]
    spread = tile_YIJ[..., None, :]
    spread *= lift(np.eye(tiles, dtype=spread.dtype)[:, None, :, None],
                   spread)
    out.append(spread.reshape(*tile_YIJ.shape[:-3], tiles * TILE,
                              tiles * TILE))
  return out


def _dtype(tokens):
  return jnp.promote_types(jnp.float32, tokens.q.dtype)


def _precision(dtype):
  """Full float32 for float32 inputs; else what bfloat16 inputs deserve."""
  return "highest" if dtype in (jnp.float32, jnp.float64) else "high"


def _shape(tokens):
  """How tokens are cut: groups, chunks a group, tokens a chunk."""
  batch, time, heads = tokens.v.shape[:3]
  chunk = chunk_tokens(tokens.q.shape[-1])
  chunks = -(-time // chunk)
  size = max(1, min(chunks, group_rows() // (batch * heads * chunk)))
  groups = -(-chunks // size)
  return groups, -(-chunks // groups), chunk


def _groups(tokens, segment_ids):
  """Cuts all arrays into groups of chunks; padding neither decays nor writes.

  Returns:
    tokens: leaves [groups, N, B, heads, C, ...].
    marks: Marks with leaves [groups, N, B(, C)]; None without documents and
      without padding.
  """
  batch, time = tokens.q.shape[:2]
  shape = _shape(tokens)
  grouped = jax.tree.map(lambda x: _group(x, shape), tokens)
  padding = math.prod(shape) - time
  if segment_ids is None and not padding:
    return grouped, None
  if segment_ids is None:
    segment_ids = jnp.ones((batch, time), jnp.int32)
  real = segment_ids != 0
  documents = inputs.documents(segment_ids)
  documents = jnp.pad(documents, ((0, 0), (0, padding)), mode="edge")
  before = jnp.pad(documents, ((0, 0), (1, 0)), mode="edge")[:, :-1]
  marks = (_group(x[..., None], shape)[:, :, :, 0]
           for x in (documents, before, real))
  documents, before, real = marks
  return grouped, Marks(documents, before[..., 0], real)


def _group(x, shape):
  """[B, T, heads, ...] -> [groups, N, B, heads, C, ...], padded by zeros."""
  padding = math.prod(shape) - x.shape[1]
  x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], *shape, *x.shape[2:])
  return jnp.transpose(x, (1, 2, 0, 4, 3, *range(5, x.ndim)))


def _ungroup(x, time):
  """The inverse of `_group`."""
  x = jnp.transpose(x, (2, 0, 1, 4, 3, *range(5, x.ndim)))
  return x.reshape(x.shape[0], -1, *x.shape[4:])[:, :time]
