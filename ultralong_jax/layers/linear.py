"""The linear map of all projections, and how heads leave an attention."""
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


def linear(x, w, axes=1):
  """Contracts the last axes of `x` with the first axes of `w`.

  Equal to jnp.tensordot(x, w.astype(x.dtype), axes). Automatic differentiation
  asks for the weight gradient's transpose, which XLA's CPU backend gets by
  transposing the larger operand, at half the speed of this form. The weight
  gradient accumulates and stays in the dtype of `w`, whatever x is in.

  Args:
    x: any leading axes, at least one.
    w: parameters, float32 as a rule.
    axes: how many axes are contracted.

  Returns:
    y: x's leading axes, then w's last axes, in the dtype of `x`.
  """
  if x.shape[x.ndim - axes:] != w.shape[:axes]:
    raise ValueError(f"the last {axes} axes of x {x.shape} are not the first "
                     f"of w {w.shape}")
  return _linear(axes, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(axes, x, w):
  return jnp.tensordot(x, w.astype(x.dtype), axes)


def _linear_fwd(axes, x, w):
  return _linear(axes, x, w), (x, w)


def _linear_bwd(axes, residuals, dy):
  x, w = residuals
  lead, out = x.ndim - axes, w.ndim - axes
  w_out = tuple(range(axes, w.ndim))
  dx = jnp.tensordot(dy, w.astype(x.dtype),
                     (tuple(range(dy.ndim - out, dy.ndim)), w_out))
  rows = tuple(range(lead))
  dw = jnp.tensordot(x, dy, (rows, rows), preferred_element_type=w.dtype)
  return dx, dw


_linear.defvjp(_linear_fwd, _linear_bwd)


def weight(module: nn.Module, name: str, *shape: int):
  """A projection's parameter: float32, normal with deviation 0.02."""
  return module.param(name, nn.initializers.normal(0.02), shape, jnp.float32)


def gate(module: nn.Module, o_BTHV, x_BTD, rank: int = 0):
  """Multiplies heads' outputs by sigmoid(W x), a factor a channel.

  Args:
    module: owns w_gate_DHV, or w_gate_down_DR and w_gate_up_RHV.
    o_BTHV: what the heads give.
    x_BTD: what the gate reads.
    rank: channels between two projections; 0: one projection.
  """
  width, shape = x_BTD.shape[-1], o_BTHV.shape[2:]
  if rank:
    gate_BTR = linear(x_BTD, weight(module, "w_gate_down_DR", width, rank))
    gate_BTHV = linear(gate_BTR, weight(module, "w_gate_up_RHV", rank, *shape))
  else:
    gate_BTHV = linear(x_BTD, weight(module, "w_gate_DHV", width, *shape))
  return o_BTHV * jax.nn.sigmoid(gate_BTHV)


def merge(module: nn.Module, o_BTHV, width: int):
  """Projects all heads' outputs together, by w_out_HVD: y_BTD."""
  w_out_HVD = weight(module, "w_out_HVD", *o_BTHV.shape[2:], width)
  return linear(o_BTHV, w_out_HVD, axes=2)
