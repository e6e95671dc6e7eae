"""Multi-token prediction: one more layer, which is told the next token.

In training it predicts the token after the next, beside the model's own loss.
Later it drafts: see `Hybrid.draft`. Nothing in the model reads it.
"""
from flax import linen as nn
import jax.numpy as jnp

from ultralong_jax.layers import linear
from ultralong_jax.models import stack


class Ahead(nn.Module):
  """A layer on what the model says of a token, and on the token after it.

    y_t = layer(W [norm(h_t); norm(e_{t+1})])

  with W as two matrices, one for each half (arXiv 2412.19437, 2.2).

  Attributes:
    parts: makes what the layer consists of.
    blocks: a plan of one layer.
  """
  parts: stack.Parts
  blocks: tuple

  @nn.compact
  def __call__(self, h_BTD, next_BTD, tokens, state):
    """Args are those of `Stack`; next_BTD embeds each token's successor."""
    shape = h_BTD.shape[-1:] * 2
    h_BTD = self.parts.norm(name="hidden_norm")(h_BTD)
    next_BTD = self.parts.norm(name="next_norm")(next_BTD)
    x_BTD = (linear.linear(h_BTD, linear.weight(self, "w_hidden_DD", *shape))
             + linear.linear(next_BTD, linear.weight(self, "w_next_DD",
                                                     *shape)))
    return stack.Stack(self.parts, self.blocks, name="stack")(x_BTD, tokens,
                                                              state)


def look_ahead(tokens_BT, targets_BT, weights_BT, segment_ids_BT):
  """Returns what `Ahead` is told, and asked, at each token of packed rows.

  Args:
    tokens_BT: token ids.
    targets_BT: each one's successor in its document.
    weights_BT: loss weights of the targets.
    segment_ids_BT: documents; 0 is padding.

  Returns:
    next_BT: the token after it, x_{t+1}.
    targets_BT: the one after that, x_{t+2}.
    weights_BT: of those; 0 where x_{t+2} is in another document.
  """
  def shift(a_BT):
    return jnp.pad(a_BT[:, 1:], ((0, 0), (0, 1)))

  inside_BT = (segment_ids_BT > 0) & (shift(segment_ids_BT) == segment_ids_BT)
  next_BT = jnp.where(inside_BT, shift(tokens_BT), targets_BT)
  weights_BT = jnp.where(inside_BT, shift(weights_BT), 0)
  return next_BT, shift(targets_BT), weights_BT
