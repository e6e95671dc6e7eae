"""Both paths in one layer: what remembers and what looks back, fused by head.

Beside a pattern of delta and latent layers, which alternates the two paths,
this runs them side by side on one input.
"""
from collections.abc import Callable

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from ultralong_jax.layers import delta_attention, latent_attention, linear
from ultralong_jax.layers import norm


@flax.struct.dataclass
class FusedState:
  """What the tokens so far left behind on each path.

  Attributes:
    delta: of the delta path.
    latent: of the latent path; None where it uses another layer's.
  """
  delta: delta_attention.DeltaState
  latent: latent_attention.LatentState | None


class DeltaPath(delta_attention.KimiDeltaAttention):
  """A delta layer up to its heads' outputs."""

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared):
    return self.mix(x_BTD, documents_BT, continues_B, state, shared)


class LatentPath(latent_attention.LatentAttention):
  """A latent layer up to its heads' outputs.

  Its output gate is the fused layer's own, so "output" and "none" are the same.
  """

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared):
    return self.mix(x_BTD, documents_BT, positions_BT, state, shared)


class FusedAttention(nn.Module):
  """Delta and latent attention on one input, one output projection.

    o = p_delta norm_head(delta(x)) + p_latent norm_head(latent(x))
    y = W_out (sigmoid(W_gate x) * o);  p = softmax(two logits), at first 1/2

  Attributes:
    delta: makes the `DeltaPath`, called with its `name`.
    latent: makes the `LatentPath`, with as many heads and as wide values.
    fusion: whose logits: "layer" has one pair, "head" a pair for each head,
      "token" a pair for each token and head, W x.
    gate_rank: channels between the gate's two projections; 0: one projection.
    epsilon: of the norms on the heads' outputs.
  """
  delta: Callable
  latent: Callable
  fusion: str
  gate_rank: int = 0
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared=None):
    """Mixes tokens of the same document.

    Args:
      x_BTD: normed inputs.
      documents_BT: ordinals, as both paths want them; 0 is trailing padding.
      positions_BT: inside the document.
      continues_B: whether a row's first document goes on from `state`.
      state: a `FusedState`, or None when nothing precedes or follows.
      shared: what each path uses of an earlier layer; see there.

    Returns:
      y_BTD: outputs.
      state: after the row's last real token; None for None.
      shared: what both paths used.
    """
    tokens = documents_BT, positions_BT, continues_B
    delta_BTHV, delta, gates = self.delta(name="delta")(
        x_BTD, *tokens, None if state is None else state.delta, shared)
    latent_BTHV, latent, latents = self.latent(name="latent")(
        x_BTD, *tokens, None if state is None else state.latent, shared)
    if delta_BTHV.shape != latent_BTHV.shape:
      raise ValueError(
          f"heads and value widths differ: {delta_BTHV.shape[2:]} on the delta "
          f"path, {latent_BTHV.shape[2:]} on the latent path")
    p_BTHM = self._weights(x_BTD, delta_BTHV.shape[2])
    o_BTHV = (p_BTHM[..., :1] * self._normed("delta_scale_V", delta_BTHV)
              + p_BTHM[..., 1:] * self._normed("latent_scale_V", latent_BTHV))
    o_BTHV = linear.gate(self, o_BTHV.astype(x_BTD.dtype), x_BTD,
                         self.gate_rank)
    y_BTD = linear.merge(self, o_BTHV, x_BTD.shape[-1])
    state = None if state is None else FusedState(delta, latent)
    return y_BTD, state, {**gates, **latents}

  def _normed(self, name, o_BTHV):
    scale_V = self.param(name, nn.initializers.ones, o_BTHV.shape[-1:],
                         jnp.float32)
    return norm.rms_norm(o_BTHV, scale_V, self.epsilon)

  def _weights(self, x_BTD, heads):
    """Returns each path's share, float32; axes that all share have size 1."""
    if self.fusion == "token":
      w_fusion_DHM = self.param("w_fusion_DHM", nn.initializers.zeros,
                                (x_BTD.shape[-1], heads, 2), jnp.float32)
      logits_BTHM = jnp.einsum(
          "BTD,DHM->BTHM", x_BTD, w_fusion_DHM.astype(x_BTD.dtype),
          preferred_element_type=jnp.float32)
    elif self.fusion in ("head", "layer"):
      name, shape = (("fusion_bias_HM", (heads, 2)) if self.fusion == "head"
                     else ("fusion_bias_M", (2,)))
      logits = self.param(name, nn.initializers.zeros, shape, jnp.float32)
      logits_BTHM = logits.reshape(1, 1, -1, 2)
    else:
      raise ValueError(f"fusion={self.fusion!r} is none of 'layer', 'head', "
                       "'token'")
    return jax.nn.softmax(logits_BTHM)
