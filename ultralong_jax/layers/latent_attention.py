"""Gated multi-head latent attention: keys and values from one narrow latent.

A token leaves behind `rank` latent channels and `shared_width` key channels,
whatever the number of heads; keys and values are made from them when needed.
"""
from typing import NamedTuple

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from ultralong_jax.layers import attention, linear, norm, position


@flax.struct.dataclass
class LatentState:
  """What the tokens so far left behind, in buffers of fixed capacity S.

  Attributes:
    latent_BSR: normalised latents.
    key_BSU: the key channels that all heads share.
    documents_BS: each entry's document; 0 where nothing is written yet.
    length_B: entries written.
  """
  latent_BSR: jax.Array
  key_BSU: jax.Array
  documents_BS: jax.Array
  length_B: jax.Array


class Latents(NamedTuple):
  """What keys and values are made from; a layer's own or an earlier one's.

  Attributes:
    state: with the tokens of this call; where none is carried on, of these
      alone, without a length.
    index_BT: each token's entry in `state`.
  """
  state: LatentState
  index_BT: jax.Array


def empty_latent_state(batch, capacity, rank, shared, dtype):
  """A state before the first token, with room for `capacity` tokens a row."""
  return LatentState(
      latent_BSR=jnp.zeros((batch, capacity, rank), dtype),
      key_BSU=jnp.zeros((batch, capacity, shared), dtype),
      documents_BS=jnp.zeros((batch, capacity), jnp.int32),
      length_B=jnp.zeros(batch, jnp.int32))


class LatentAttention(nn.Module):
  """Causal attention inside documents, gated by the query.

    c_t = norm(W_down x_t);  k_t = [W_uk c_t, W_shared x_t];  v_t = W_uv c_t
    y_t = W_out (sigmoid(W_gate x_t) * attention(W_q x, k, v)_t)

  That gate weighs what was found. The other form, gate = "latent", weighs
  where to look as well: query t sees sigmoid(W_gate x_t) * c_s in place of
  c_s, in key and value, and the output is not gated.

  Without `rotary` a token's place counts for nothing but the order in time;
  with it the shared channels of the key, and what they meet in the query, are
  turned by the position in the document. States hold turned keys.

  Attributes:
    heads: heads of queries, keys and values.
    key_width: channels of a head's own key.
    shared_width: channels of the key that all heads share (not normalised).
    value_width: channels of a head's value.
    rank: channels of the latent.
    query_rank: channels of the queries' latent; 0 for none.
    gate: "output", "latent" or "none".
    rotary: position.Rotary; None: no position.
    epsilon: of the norms on latents.
    implementation: of the attention over whole sequences; see `attention`.
  """
  heads: int
  key_width: int
  shared_width: int
  value_width: int
  rank: int
  query_rank: int = 0
  gate: str = "output"
  rotary: position.Rotary | None = None
  epsilon: float = 1e-6
  implementation: str = ""

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared=None):
    """Mixes tokens of the same document.

    Args:
      x_BTD: normed inputs.
      documents_BT: ordinals, strictly increasing along a row, also past what
        `state` holds; 0 is trailing padding, which changes nothing.
      positions_BT: inside the document; looked at with `rotary` only.
      continues_B: not looked at: another document has another ordinal.
      state: a `LatentState`, or None when nothing precedes or follows.
      shared: may have, as `latent`, the `Latents` of an earlier layer, which
        are then used instead of own ones; `state` is None.

    Returns:
      y_BTD: outputs.
      state: with the new tokens written at `length_B`, those past the capacity
        dropped; None for None.
      shared: the `Latents` that were used, as `latent`.
    """
    del continues_B
    o_BTHV, state, shared = self.mix(x_BTD, documents_BT, positions_BT, state,
                                     shared)
    if self.gate == "output":
      o_BTHV = linear.gate(self, o_BTHV, x_BTD)
    return linear.merge(self, o_BTHV, x_BTD.shape[-1]), state, shared

  def mix(self, x_BTD, documents_BT, positions_BT, state, shared):
    """As `__call__`, up to the heads' outputs: o_BTHV."""
    width = x_BTD.shape[-1]
    heads, query_width = self.heads, self.key_width + self.shared_width
    scale = query_width ** -0.5

    def project(x, name, *shape):
      return linear.linear(x, linear.weight(self, name, *shape))

    def scale_of(name, width):
      return self.param(name, nn.initializers.ones, (width,), jnp.float32)

    if self.query_rank:
      q_BTQ = project(x_BTD, "w_q_down_DQ", width, self.query_rank)
      q_BTQ = norm.rms_norm(
          q_BTQ, scale_of("query_scale_Q", self.query_rank), self.epsilon)
      q_BTHK = project(q_BTQ, "w_q_up_QHK", self.query_rank, heads,
                       query_width)
    else:
      q_BTHK = project(x_BTD, "w_q_DHK", width, heads, query_width)

    if shared and "latent" in shared:
      latents = shared["latent"]
    else:
      latent_BTR = norm.rms_norm(
          project(x_BTD, "w_down_DR", width, self.rank),
          scale_of("latent_scale_R", self.rank), self.epsilon)
      key_BTU = project(x_BTD, "w_shared_DU", width, self.shared_width)
      if self.rotary is not None:
        key_BTU = position.rotate(key_BTU, positions_BT, self.rotary)
      latents = append(state, latent_BTR, key_BTU, documents_BT)
      state = None if state is None else latents.state
    if self.rotary is not None:
      scale *= self.rotary.logit_scale()
      q_BTHK = jnp.concatenate([
          q_BTHK[..., :self.key_width],
          position.rotate(q_BTHK[..., self.key_width:], positions_BT,
                          self.rotary)], -1)
    w_k_up_RHK = linear.weight(self, "w_k_up_RHK", self.rank, heads,
                               self.key_width)
    w_v_up_RHV = linear.weight(self, "w_v_up_RHV", self.rank, heads,
                               self.value_width)

    gate_BTR = None
    if self.gate == "latent":
      gate_BTR = jax.nn.sigmoid(project(x_BTD, "w_gate_DR", width, self.rank))
    elif self.gate not in ("output", "none"):
      raise ValueError(f"gate={self.gate!r} is none of 'output', 'latent', "
                       "'none'")

    seen, index_BT = latents
    query = (q_BTHK, documents_BT, index_BT, seen,
             w_k_up_RHK.astype(x_BTD.dtype), w_v_up_RHV.astype(x_BTD.dtype))
    if gate_BTR is not None or (seen.length_B is not None
                                and x_BTD.shape[1] == 1):
      o_BTHV = absorbed(*query, scale, gate_BTR)
    elif seen.length_B is not None:
      o_BTHV = expanded(*query, scale)
    else:
      o_BTHV = attention.causal_attention(
          q_BTHK, linear.linear(seen.latent_BSR, w_k_up_RHK),
          linear.linear(seen.latent_BSR, w_v_up_RHV), documents_BT,
          k_shared_BSU=seen.key_BSU, scale=scale,
          implementation=self.implementation)
    return o_BTHV, state, {"latent": latents}


def append(state, latent_BTR, key_BTU, documents_BT):
  """The `Latents` of a call's tokens, after those of `state` if there is one.
  """
  index_BT = jnp.broadcast_to(jnp.arange(
      documents_BT.shape[1], dtype=jnp.int32)[None], documents_BT.shape)
  if state is None:
    alone = LatentState(latent_BTR, key_BTU, documents_BT, None)
    return Latents(alone, index_BT)
  index_BT += state.length_B[:, None]
  state = write(state, latent_BTR, key_BTU, documents_BT, index_BT)
  return Latents(state, index_BT)


def write(state, latent_BTR, key_BTU, documents_BT, index_BT):
  """Appends the tokens that are not padding; drops those past the capacity."""
  capacity = state.documents_BS.shape[1]
  index_BT = jnp.where(documents_BT > 0, index_BT, capacity)
  put = jax.vmap(lambda buffer, index, new: buffer.at[index].set(
      new.astype(buffer.dtype), mode="drop"))
  return LatentState(
      latent_BSR=put(state.latent_BSR, index_BT, latent_BTR),
      key_BSU=put(state.key_BSU, index_BT, key_BTU),
      documents_BS=put(state.documents_BS, index_BT, documents_BT),
      length_B=state.length_B + (documents_BT > 0).sum(1, dtype=jnp.int32))


def expanded(q_BTHK, documents_BT, index_BT, state, w_k_up_RHK, w_v_up_RHV,
             scale):
  """Attends to the state with keys and values made a block at a time."""
  o_BHTV = attention.blockwise(
      _expand, scale, None, jnp.swapaxes(q_BTHK, 1, 2),
      documents_BT, index_BT, state.documents_BS, (w_k_up_RHK, w_v_up_RHV),
      (state.latent_BSR, state.key_BSU))
  return jnp.swapaxes(o_BHTV, 1, 2)


def absorbed(q_BTHK, documents_BT, index_BT, state, w_k_up_RHK, w_v_up_RHV,
             scale, gate_BTR=None):
  """Attends in the latent space; no key or value of a head ever exists.

    q . (W_uk c) = (W_uk^T q) . c,   sum_s p_s (W_uv c_s) = W_uv sum_s p_s c_s

  Dearer than `expanded` by (2 rank + U) / (K + U + V) a pair and cheaper by
  the expansion: what a single query wants. And query t may see its own
  gate_t * c_s in place of c_s, which no expansion before the pairs can give:

    q . (W_uk (gate * c)) = (gate * W_uk^T q) . c,   likewise for the values
  """
  width = w_k_up_RHK.shape[-1]
  heads = q_BTHK.shape[2]
  q_BTHR = jnp.einsum("BTHK,RHK->BTHR", q_BTHK[..., :width], w_k_up_RHK)
  if gate_BTR is not None:
    q_BTHR *= gate_BTR[:, :, None]
  q_BTHR = jnp.concatenate([q_BTHR, q_BTHK[..., width:]], -1)
  # The heads stand side by side as queries at one place: T H queries.
  q_B1TR = q_BTHR.reshape(q_BTHR.shape[0], 1, -1, q_BTHR.shape[-1])
  latent_B1TR = attention.blockwise(
      _absorb, scale, None, q_B1TR,
      jnp.repeat(documents_BT, heads, 1), jnp.repeat(index_BT, heads, 1),
      state.documents_BS, (),
      (state.latent_BSR, state.key_BSU))
  latent_BTHR = latent_B1TR.reshape(*q_BTHK.shape[:3], -1)
  if gate_BTR is not None:
    latent_BTHR *= gate_BTR[:, :, None]
  return jnp.einsum("BTHR,RHV->BTHV", latent_BTHR, w_v_up_RHV)


def _expand(weights, keys):
  """Every head's keys and values of a block of the state."""
  w_k_up_RHK, w_v_up_RHV = weights
  latent_BJR, key_BJU = keys
  k_BHJK = jnp.einsum("BJR,RHK->BHJK", latent_BJR, w_k_up_RHK)
  v_BHJV = jnp.einsum("BJR,RHV->BHJV", latent_BJR, w_v_up_RHV)
  key_BHJU = jnp.broadcast_to(
      key_BJU[:, None], (*k_BHJK.shape[:3], key_BJU.shape[-1]))
  return jnp.concatenate([k_BHJK, key_BHJU], -1), v_BHJV


def _absorb(weights, keys):
  """One head, with latent and shared key as its key, the latent as value."""
  del weights
  latent_B1JR, key_B1JU = (a[:, None] for a in keys)
  return jnp.concatenate([latent_B1JR, key_B1JU], -1), latent_B1JR
