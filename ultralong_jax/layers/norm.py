"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def rms_norm(x, scale, epsilon):
  """Scales the last axis of `x` to mean square one, then by `scale`.

    y = x / sqrt(mean(x^2) + epsilon) * scale

  Args:
    x: any shape; the mean is taken in float32 whatever its dtype.
    scale: one weight for each channel of the last axis.
    epsilon: added to the mean square.

  Returns:
    y: shape and dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  rstd = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
  scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
  return (x32 * rstd * scale).astype(x.dtype)


class RMSNorm(nn.Module):
  """`rms_norm` over the last axis with a learned scale that starts at one.

  Attributes:
    epsilon: added to the mean square.
  """
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x):
    scale_D = self.param("scale_D", nn.initializers.ones, (x.shape[-1],),
                         jnp.float32)
    return rms_norm(x, scale_D, self.epsilon)
