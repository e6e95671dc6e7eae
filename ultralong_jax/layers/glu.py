"""Gated linear units: the bounded SiTU of Kimi K3, and SwiGLU."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from ultralong_jax.layers import linear, norm


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
  return _situ(gate, up, gate_bound, up_bound)


def _branches(gate, up, gate_bound, up_bound):
  """The three factors of f but for the bounds, in float32."""
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  return (jnp.tanh(gate / gate_bound), jax.nn.sigmoid(gate),
          jnp.tanh(up / up_bound))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _situ(gate, up, gate_bound, up_bound):
  capped, open_, value = _branches(gate, up, gate_bound, up_bound)
  f = gate_bound * capped * open_ * up_bound * value
  return f.astype(gate.dtype)


def _situ_fwd(gate, up, gate_bound, up_bound):
  # Only the inputs are kept: automatic differentiation would keep five
  # float32 arrays of their shape, and the factors are cheap to have again.
  return _situ(gate, up, gate_bound, up_bound), (gate, up)


def _situ_bwd(gate_bound, up_bound, residuals, d_f):
  gate, up = residuals
  capped, open_, value = _branches(gate, up, gate_bound, up_bound)
  d_f = d_f.astype(jnp.float32)
  slope = open_ * (1. - capped * capped
                   + gate_bound * capped * (1. - open_))
  d_gate = d_f * slope * up_bound * value
  d_up = d_f * gate_bound * capped * open_ * (1. - value * value)
  # Weight gradients read these transposed. Without the barrier XLA's CPU
  # backend computes the tanh once more for them, column by column.
  return jax.lax.optimization_barrier(
      (d_gate.astype(gate.dtype), d_up.astype(up.dtype)))


_situ.defvjp(_situ_fwd, _situ_bwd)


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


def normalize_input(x, epsilon):
  """Scales the input of a unit to mean square one along its last axis.

  Without parameters: the projections that read it can learn a scale for every
  channel, and one for every expert would let their activations grow apart
  again, which this is to prevent. Experts that read one latent share it.

  Args:
    x: any shape.
    epsilon: added to the mean square.

  Returns:
    x / sqrt(mean(x^2) + epsilon), shape and dtype of `x`.
  """
  return norm.rms_norm(x, jnp.ones(x.shape[-1]), epsilon)


class GatedUnit(nn.Module):
  """A dense gated unit, width to hidden to width.

  Attributes:
    hidden: width between the projections.
    kind: name of the activation in ACTIVATIONS.
    input_norm: see `normalize_input`.
    epsilon: of that norm.
  """
  hidden: int
  kind: str = "situ"
  input_norm: bool = False
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x_BTD):
    width = x_BTD.shape[-1]
    if self.input_norm:
      x_BTD = normalize_input(x_BTD, self.epsilon)
    w_gate_DF = linear.weight(self, "w_gate_DF", width, self.hidden)
    w_up_DF = linear.weight(self, "w_up_DF", width, self.hidden)
    w_down_FD = linear.weight(self, "w_down_FD", self.hidden, width)
    gate_BTF = linear.linear(x_BTD, w_gate_DF)
    up_BTF = linear.linear(x_BTD, w_up_DF)
    f_BTF = activate(self.kind, gate_BTF, up_BTF)
    return linear.linear(f_BTF, w_down_FD)
