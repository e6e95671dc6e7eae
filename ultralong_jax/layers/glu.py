"""Gated linear units: the bounded SiTU of Kimi K3, and SwiGLU."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def situ(gate, up, gate_bound=4., up_bound=25.):
  """SiLU with soft caps on both branches.

    f = a tanh(gate / a) sigmoid(gate) * b tanh(up / b)

  |f| never passes a*b (100 as published), the first-order behaviour at 0 is
  SwiGLU's, and so is the limit of large bounds.

  Args:
    gate: output of the gate projection; any shape.
    up: output of the up projection; same shape.
    gate_bound: a.
    up_bound: b.

  Returns:
    f: shape and dtype of `gate`. Computed in float32: a bfloat16 tanh is not
      accurate enough to train through.
  """
  gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
  capped = gate_bound * jnp.tanh(gate32 / gate_bound)
  f = capped * jax.nn.sigmoid(gate32) * up_bound * jnp.tanh(up32 / up_bound)
  return f.astype(gate.dtype)


def swiglu(gate, up):
  """silu(gate) * up in float32; the unbounded baseline."""
  f = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
  return f.astype(gate.dtype)


ACTIVATIONS = {"situ": situ, "swiglu": swiglu}


def activate(kind, gate, up):
  """Applies the gated activation called `kind`; see ACTIVATIONS."""
  if kind not in ACTIVATIONS:
    raise ValueError(f"glu={kind!r} is none of {sorted(ACTIVATIONS)}")
  return ACTIVATIONS[kind](gate, up)


class GatedUnit(nn.Module):
  """A dense gated unit, width to hidden to width.

  Attributes:
    hidden: width between the projections.
    kind: name of the activation in ACTIVATIONS.
  """
  hidden: int
  kind: str = "situ"

  @nn.compact
  def __call__(self, x_BTD):
    init = nn.initializers.normal(0.02)
    width = x_BTD.shape[-1]
    w_gate_DF = self.param("w_gate_DF", init, (width, self.hidden),
                           jnp.float32)
    w_up_DF = self.param("w_up_DF", init, (width, self.hidden), jnp.float32)
    w_down_FD = self.param("w_down_FD", init, (self.hidden, width),
                           jnp.float32)
    dtype = x_BTD.dtype
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w_gate_DF.astype(dtype))
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w_up_DF.astype(dtype))
    f_BTF = activate(self.kind, gate_BTF, up_BTF)
    return jnp.einsum("BTF,FD->BTD", f_BTF, w_down_FD.astype(dtype))
