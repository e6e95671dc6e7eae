"""Causal softmax attention over packed documents, a block at a time.

`causal_attention` is the public call, `reference_attention` its definition.
`blockwise` is the loop below both this file's call and the attention over
latents in latent_attention.py: keys and values of a block are made by a
function when the block is visited, so that they need not exist all at once.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

# exp2 is the machine's exponential; logits are scaled to base 2 once.
LOG2_E = float(np.log2(np.e))
# Where the running maximum starts. Finite, so that a row that has seen no key
# yet computes exp2(-inf - LOWEST) = 0 and never inf - inf.
LOWEST = -1e30


def causal_attention(q_BTHK, k_BSHK, v_BSHV, documents_BT, documents_BS=None,
                     *, k_shared_BSU=None, index_BT=None, scale=None,
                     block=None, implementation=""):
  """Attends from each query to the earlier keys of its own document.

    o_t = sum_s softmax_s(scale q_t . k_s) v_s,  s <= index_t,
                                                 document_s = document_t > 0

  Args:
    q_BTHK: queries.
    k_BSHK: keys; narrower than the queries by U when `k_shared_BSU` is given.
    v_BSHV: values; V may differ from K.
    documents_BT: the queries' documents, strictly increasing along a row from
      document to document; 0 is padding, which is trailing, gets zeros and
      gives zero gradients.
    documents_BS: the keys' documents, likewise; None if keys are the queries'.
    k_shared_BSU: the last U channels of the key, the same for all heads.
    index_BT: which key is the query's own; None counts from 0.
    scale: of the logits; None is the queries' width ** -0.5.
    block: queries and keys a block; None lets `block_sizes` choose.
    implementation: "" chooses; "blockwise" or "reference".

  Returns:
    o_BTHV: in the queries' dtype.
  """
  heads, width = q_BTHK.shape[2:]
  if documents_BS is None:
    documents_BS = documents_BT
  if index_BT is None:
    index_BT = jnp.broadcast_to(
        jnp.arange(q_BTHK.shape[1], dtype=jnp.int32), documents_BT.shape)
  if scale is None:
    scale = width ** -0.5
  shared = 0 if k_shared_BSU is None else k_shared_BSU.shape[2]
  batch, keys = documents_BS.shape
  for name, array, shape in (
      ("k_BSHK", k_BSHK, (batch, keys, heads, width - shared)),
      ("v_BSHV", v_BSHV, (batch, keys, heads, v_BSHV.shape[-1])),
      ("documents_BT", documents_BT, q_BTHK.shape[:2]),
      ("index_BT", index_BT, q_BTHK.shape[:2])):
    if array.shape != shape:
      raise ValueError(f"{name} has shape {array.shape}, expected {shape}")

  if implementation == "reference":
    if k_shared_BSU is not None:
      k_BSHK = jnp.concatenate([k_BSHK, _to_heads(k_shared_BSU, heads, 2)], -1)
    return reference_attention(q_BTHK, k_BSHK, v_BSHV, documents_BT,
                               documents_BS, index_BT, scale)
  if implementation not in ("", "blockwise"):
    raise ValueError(
        f"{implementation=} is not one of '', 'blockwise', 'reference'")
  o_BHTV = blockwise(
      _share_key, scale, block, jnp.swapaxes(q_BTHK, 1, 2), documents_BT,
      index_BT, documents_BS, (),
      (jnp.swapaxes(k_BSHK, 1, 2), jnp.swapaxes(v_BSHV, 1, 2), k_shared_BSU))
  return jnp.swapaxes(o_BHTV, 1, 2)


def reference_attention(q_BTHK, k_BSHK, v_BSHV, documents_BT, documents_BS,
                        index_BT, scale):
  """What `causal_attention` means: every logit at once, in float32."""
  dtype = q_BTHK.dtype
  q_BTHK, k_BSHK, v_BSHV = (
      a.astype(jnp.float32) for a in (q_BTHK, k_BSHK, v_BSHV))
  index_S = jnp.arange(documents_BS.shape[1])
  visible_BTS = _visible(documents_BT, index_BT, documents_BS, index_S)
  logits_BHTS = scale * jnp.einsum(
      "BTHK,BSHK->BHTS", q_BTHK, k_BSHK, precision="highest")
  # A row that sees nothing would be softmax of -inf only: NaN. It keeps its
  # logits and loses its output.
  row_BT = visible_BTS.any(-1)
  visible_BTS |= ~row_BT[..., None]
  logits_BHTS = jnp.where(visible_BTS[:, None], logits_BHTS, -jnp.inf)
  o_BTHV = jnp.einsum("BHTS,BSHV->BTHV", jax.nn.softmax(logits_BHTS), v_BSHV,
                      precision="highest")
  return jnp.where(row_BT[..., None, None], o_BTHV, 0).astype(dtype)


def block_sizes(queries):
  """Rows and columns of the logits that exist at once, by measurement.

  On a CPU what matters is that they stay in its caches; a few queries (a
  decoding step) take their keys in larger bites.
  """
  if jax.default_backend() != "cpu":
    return 512, 512
  if queries > 1024:
    return 256, 256
  return 128, 128 if queries > 64 else 512


def _to_heads(k_BSU, heads, axis):
  """A view of one head's keys as every head's."""
  shape = list(k_BSU.shape)
  shape.insert(axis, heads)
  return jnp.broadcast_to(jnp.expand_dims(k_BSU, axis), shape)


def _share_key(weights, keys):
  """The keys and values of a block that are given as they are."""
  del weights
  k_BHJK, v_BHJV, k_shared_BJU = keys
  if k_shared_BJU is not None:
    k_BHJK = jnp.concatenate(
        [k_BHJK, _to_heads(k_shared_BJU, k_BHJK.shape[1], 1)], -1)
  return k_BHJK, v_BHJV


def _visible(documents_BC, index_BC, documents_BJ, index_J):
  """The mask: same document, which is not padding, and not the future."""
  return ((documents_BC[..., None] == documents_BJ[:, None])
          & (documents_BC[..., None] > 0)
          & (index_BC[..., None] >= index_J[None, None]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def blockwise(expand, scale, block, q_BHTK, documents_BT, index_BT,
              documents_BS, weights, keys):
  """Attention that holds block x block logits, forward and backward.

  Forward keeps the output and the logarithm of each row's softmax sum;
  backward computes the logits again. Key blocks before a query block's
  earliest document and after its last query are not visited, and blocks that
  every query sees whole are not masked.

  Args:
    expand: a function at module level, `(weights, keys of a block) ->
      k_BHJK, v_BHJV`; differentiated by JAX. H may be 1 with queries of all
      heads side by side on the T axis.
    scale: of the logits, positive.
    block: queries and keys a block, or None.
    q_BHTK: queries; their dtype is the matmuls', which accumulate in float32.
    documents_BT: as in `causal_attention`.
    index_BT: the queries' places among the keys; where several queries stand
      at one place (heads side by side), they may repeat.
    documents_BS: the keys' documents.
    weights: what `expand` needs besides the block.
    keys: a tree of arrays whose last axis but one is S.

  Returns:
    o_BHTV: in the queries' dtype.
  """
  return _forward(expand, scale, block, q_BHTK, documents_BT, index_BT,
                  documents_BS, weights, keys)[0]


def _forward(expand, scale, block, q_BHTK, documents_BT, index_BT,
             documents_BS, weights, keys):
  block_C, block_J = _blocks(block, q_BHTK, documents_BS)
  queries = _split(block_C, _for_matmul(q_BHTK), documents_BT, index_BT)
  bounds = _bounds(block_J, *queries[1:], documents_BS)
  v_BHJV = jax.eval_shape(expand, weights, _slice(keys, 0, block_J))[1]

  def row(_, inputs):
    (q_BHCK, *query), bounds = inputs

    def step(masked, j, carry):
      o_BHCV, max_BHC, sum_BHC = carry
      start, mask_BHCJ = _key_block(masked, j, block_J, query, documents_BS)
      k_BHJK, v_BHJV = _for_matmul(
          expand(weights, _slice(keys, start, block_J)))
      logits_BHCJ = _logits(q_BHCK, k_BHJK, scale, mask_BHCJ)
      new_BHC = jnp.maximum(max_BHC, logits_BHCJ.max(-1))
      p_BHCJ = jnp.exp2(logits_BHCJ - new_BHC[..., None])
      old_BHC = jnp.exp2(max_BHC - new_BHC)
      sum_BHC = old_BHC * sum_BHC + p_BHCJ.sum(-1)
      o_BHCV = old_BHC[..., None] * o_BHCV + jnp.einsum(
          "BHCJ,BHJV->BHCV", p_BHCJ.astype(v_BHJV.dtype), v_BHJV,
          preferred_element_type=jnp.float32)
      return o_BHCV, new_BHC, sum_BHC

    rows = q_BHCK.shape[:3]
    o_BHCV, max_BHC, sum_BHC = _visit(step, bounds, (
        jnp.zeros((*rows, v_BHJV.shape[-1]), jnp.float32),
        jnp.full(rows, LOWEST), jnp.zeros(rows)))
    # Padding has met whatever its neighbours were allowed to see.
    real_BHC = (query[0] > 0)[:, None] & (sum_BHC > 0)
    sum_BHC = jnp.where(real_BHC, sum_BHC, 1)
    o_BHCV = jnp.where(real_BHC[..., None], o_BHCV / sum_BHC[..., None], 0)
    # exp2(logits - inf) = 0: padding gives no gradient in the backward pass.
    lse_BHC = jnp.where(real_BHC, max_BHC + jnp.log2(sum_BHC), jnp.inf)
    return None, (o_BHCV.astype(q_BHTK.dtype), lse_BHC)

  _, (o_NBHCV, lse_NBHC) = jax.lax.scan(row, None, (queries, bounds))
  o_BHTV = _join(o_NBHCV, q_BHTK.shape[2])
  return o_BHTV, (q_BHTK, documents_BT, index_BT, documents_BS, weights, keys,
                  o_BHTV, lse_NBHC)


def _backward(expand, scale, block, residuals, do_BHTV):
  (q_BHTK, documents_BT, index_BT, documents_BS, weights, keys, o_BHTV,
   lse_NBHC) = residuals
  block_C, block_J = _blocks(block, q_BHTK, documents_BS)
  queries = _split(block_C, _for_matmul(q_BHTK), documents_BT, index_BT)
  bounds = _bounds(block_J, *queries[1:], documents_BS)
  # sum_s p_s (do . v_s), the part of the softmax's gradient common to a row.
  mean_BHT1 = jnp.sum(do_BHTV.astype(jnp.float32) * o_BHTV, -1, keepdims=True)
  do_NBHCV, mean_NBHC1 = _split(block_C, _for_matmul(do_BHTV), mean_BHT1)
  # Both sides of every matmul as the CPU likes them, transposed once a row.
  q_NBHKC, do_NBHVC = (jnp.swapaxes(a, -1, -2) for a in (queries[0], do_NBHCV))

  def row(gradients, inputs):
    ((q_BHCK, *query), bounds, q_BHKC, do_BHCV, do_BHVC, mean_BHC1,
     lse_BHC) = inputs

    def step(masked, j, carry):
      dq_BHCK, dweights, dkeys = carry
      start, mask_BHCJ = _key_block(masked, j, block_J, query, documents_BS)
      (k_BHJK, v_BHJV), pull = jax.vjp(
          lambda *keys: _for_matmul(expand(*keys)),
          weights, _slice(keys, start, block_J))
      logits_BHCJ = _logits(q_BHCK, k_BHJK, scale, mask_BHCJ)
      p_BHCJ = jnp.exp2(logits_BHCJ - lse_BHC[..., None])
      dp_BHCJ = jnp.einsum("BHCV,BHJV->BHCJ", do_BHCV, v_BHJV,
                           preferred_element_type=jnp.float32)
      ds_BHCJ = (p_BHCJ * (dp_BHCJ - mean_BHC1)).astype(q_BHCK.dtype)
      dv_BHVJ = jnp.einsum("BHVC,BHCJ->BHVJ", do_BHVC,
                           p_BHCJ.astype(do_BHVC.dtype),
                           preferred_element_type=jnp.float32)
      dk_BHKJ = scale * jnp.einsum("BHKC,BHCJ->BHKJ", q_BHKC, ds_BHCJ,
                                   preferred_element_type=jnp.float32)
      dq_BHCK += jnp.einsum("BHCJ,BHJK->BHCK", ds_BHCJ, k_BHJK,
                            preferred_element_type=jnp.float32)
      dweights_, dkeys_ = pull((
          jnp.swapaxes(dk_BHKJ, -1, -2).astype(k_BHJK.dtype),
          jnp.swapaxes(dv_BHVJ, -1, -2).astype(v_BHJV.dtype)))
      return dq_BHCK, _add(dweights, dweights_), _add(dkeys, dkeys_, start)

    dq_BHCK, *gradients = _visit(
        step, bounds, (jnp.zeros(q_BHCK.shape, jnp.float32), *gradients))
    return gradients, (scale * dq_BHCK).astype(q_BHTK.dtype)

  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32),
                       [weights, keys])
  gradients, dq_NBHCK = jax.lax.scan(row, zeros, (
      queries, bounds, q_NBHKC, do_NBHCV, do_NBHVC, mean_NBHC1, lse_NBHC))
  dweights, dkeys = jax.tree.map(
      lambda d, a: d.astype(a.dtype), gradients, [weights, keys])
  return (_join(dq_NBHCK, q_BHTK.shape[2]), None, None, None, dweights, dkeys)


blockwise.defvjp(_forward, _backward)


def _for_matmul(tree):
  """float32 on CPU: XLA has no bfloat16 matmul for it with float32 results."""
  if jax.default_backend() != "cpu":
    return tree
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


def _blocks(block, q_BHTK, documents_BS):
  """Queries and keys a block, no more than there are."""
  queries, keys = q_BHTK.shape[2], documents_BS.shape[1]
  block_C, block_J = (block, block) if block else block_sizes(queries)
  return min(block_C, queries), min(block_J, keys)


def _split(block, *arrays):
  """Cuts T, axis 2 of 4 or the last of 2, to leading blocks; pads with 0."""
  def split(a):
    axis = 1 if a.ndim == 2 else 2
    pad = [(0, 0)] * a.ndim
    pad[axis] = (0, -a.shape[axis] % block)
    a = jnp.pad(a, pad)
    a = a.reshape(*a.shape[:axis], -1, block, *a.shape[axis + 1:])
    return jnp.moveaxis(a, axis, 0)
  return tuple(split(a) for a in arrays)


def _join(a_NBHCK, tokens):
  """The inverse of `_split` for rank 4."""
  a_BHNCK = jnp.moveaxis(a_NBHCK, 0, 2)
  batch, heads, _, _, width = a_BHNCK.shape
  return a_BHNCK.reshape(batch, heads, -1, width)[:, :, :tokens]


def _bounds(block, documents_NBC, index_NBC, documents_BS):
  """Key blocks of a query block: first, first open, first not open, end.

  An open block is one that every query (of any row) sees whole.
  """
  size = documents_BS.shape[1]
  huge = jnp.iinfo(jnp.int32).max
  real_NBC = documents_NBC > 0
  rising_BS = jnp.where(documents_BS > 0, documents_BS, huge)
  find = jax.vmap(jnp.searchsorted, in_axes=(0, 1), out_axes=1)
  low_NB = find(rising_BS, jnp.where(real_NBC, documents_NBC, huge).min(-1))
  high_NB = find(rising_BS, documents_NBC.max(-1))
  end_N = jnp.where(real_NBC, index_NBC + 1, 0).max((1, 2))
  open_end_N = jnp.where(real_NBC, index_NBC + 1, huge).min((1, 2))

  end_N = jnp.minimum(-(-end_N // block), -(-size // block))
  first_N = jnp.minimum(low_NB.min(1) // block, end_N)
  open_N = jnp.clip(-(-high_NB.max(1) // block), first_N, end_N)
  # The last block, where keys are not whole blocks, overlaps its neighbour.
  open_end_N = jnp.minimum(open_end_N // block, size // block)
  open_end_N = jnp.clip(open_end_N, open_N, end_N)
  return first_N, open_N, open_end_N, end_N


def _visit(step, bounds, carry):
  """Runs `step(masked, block, carry)` over the key blocks in sight."""
  first, open_, open_end, end = bounds
  before = open_ - first

  def masked(i, carry):
    # The blocks on both sides of the open ones in one loop: half to compile.
    j = jnp.where(i < before, first + i, open_end + i - before)
    return step(True, j, carry)

  carry = jax.lax.fori_loop(
      open_, open_end, functools.partial(step, False), carry)
  return jax.lax.fori_loop(0, before + end - open_end, masked, carry)


def _key_block(masked, j, block, query, documents_BS):
  """Where key block j starts, and its mask, or None if all is seen.

  A last block that is not whole starts early and leaves out what its
  neighbour has.
  """
  start = jnp.minimum(j * block, documents_BS.shape[1] - block)
  if not masked:
    return start, None
  index_J = start + jnp.arange(block, dtype=jnp.int32)
  documents_BJ = jax.lax.dynamic_slice_in_dim(documents_BS, start, block, 1)
  documents_BJ = jnp.where((index_J >= j * block)[None], documents_BJ, 0)
  return start, _visible(*query, documents_BJ, index_J)[:, None]


def _logits(q_BHCK, k_BHJK, scale, mask_BHCJ):
  """Logits to the base 2, masked before anyone takes an exponential."""
  logits_BHCJ = (scale * LOG2_E) * jnp.einsum(
      "BHCK,BHJK->BHCJ", q_BHCK, k_BHJK, preferred_element_type=jnp.float32)
  if mask_BHCJ is None:
    return logits_BHCJ
  return jnp.where(mask_BHCJ, logits_BHCJ, -jnp.inf)


def _slice(keys, start, block):
  return jax.tree.map(
      lambda a: jax.lax.dynamic_slice_in_dim(a, start, block, a.ndim - 2),
      keys)


def _add(total, part, start=None):
  """Adds float32; with `start`, to that slice of the last axis but one."""
  def add(total, part):
    if start is None:
      return total + part.astype(total.dtype)
    axis = total.ndim - 2
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(
        total, old + part.astype(total.dtype), start, axis)
  return jax.tree.map(add, total, part)
