"""What an attention layer gives to the attention of later layers.

Its output, normalised and transformed, is added to their inputs (`Injection`).
Which layers give and which take is decided in `models/depth_plan.py`, as is
who uses another's latents or gates instead of own ones.
"""
import jax.numpy as jnp
from flax import linen as nn

from ultralong_jax.layers import linear, norm


class Injection(nn.Module):
  """Turns an attention's output into what later layers add to their inputs.

    z = W y / sqrt(mean(y^2) + epsilon),   W = 0 at the start

  so that training starts as the model without it. The norm has no scale of its
  own, which would be a part of W. W moves from the first step on: its gradient
  is made of y and of what the readers pull. It is a matrix like others, so Muon
  updates it, whose step does not depend on its size.

  Attributes:
    epsilon: of the norm.
  """
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, y_BTD):
    width = y_BTD.shape[-1]
    w_inject_DD = self.param("w_inject_DD", nn.initializers.zeros,
                             (width, width), jnp.float32)
    y_BTD = norm.rms_norm(y_BTD, jnp.ones(width), self.epsilon)
    return linear.linear(y_BTD, w_inject_DD)
