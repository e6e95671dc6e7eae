"""Routing of tokens to experts: scores, choice, combine weights."""

import jax
import jax.numpy as jnp

EPSILON = 1e-20  # keeps the weights finite if every chosen score underflows


def scores(x_XD, w_DE):
  """Affinity of each token to each expert, sigmoid(x w).

  Near ties between experts flip with the last bits of a matmul, so this one
  runs in float32 at the highest precision whatever the model computes in.

  Args:
    x_XD: tokens at full model width, any dtype.
    w_DE: one prototype an expert.

  Returns:
    s_XE: float32 in (0, 1).
  """
  logits_XE = jnp.einsum(
      "XD,DE->XE", x_XD.astype(jnp.float32), w_DE.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST)
  return jax.nn.sigmoid(logits_XE)


def choose(s_XE, threshold_E, top):
  """Picks the `top` experts of largest score plus threshold.

  No gradient passes: thresholds move by balancing only, and the router learns
  through the combine weights.

  Args:
    s_XE: scores in (0, 1).
    threshold_E: float32, added for the choice and for nothing else.
    top: experts for each token, below the number of experts.

  Returns:
    choice_XA: int32, best first; of equals the lower index goes first.
    cutoff_X: the largest biased score that was not chosen. Balancing asks how
      much bias an expert would have needed to pass it.
  """
  experts = s_XE.shape[-1]
  if not 0 < top < experts:
    raise ValueError(
        f"experts_per_token={top} must be in [1, experts={experts}): the "
        "cutoff is the best score that was not chosen")
  biased_XE = jax.lax.stop_gradient(s_XE + threshold_E[None])
  best_XA, choice_XA = jax.lax.top_k(biased_XE, top + 1)
  return choice_XA[:, :top].astype(jnp.int32), best_XA[:, top]


def weights(s_XE, choice_XA, scale):
  """Combine weights: the unbiased scores of the choice, summing to `scale`.

  Args:
    s_XE: scores in (0, 1).
    choice_XA: experts of each token.
    scale: sum of a token's weights.

  Returns:
    weight_XA: float32.
  """
  s_XA = jnp.take_along_axis(s_XE, choice_XA, axis=1)
  total = jnp.sum(s_XA, axis=1, keepdims=True) + EPSILON
  # The derivative of a quotient squares the total, and float32 underflows.
  return scale * s_XA * jnp.exp(-jnp.log(total))
