"""Routing of tokens to experts: scores, choice, combine weights."""

import jax
import jax.numpy as jnp

EPSILON = 1e-20  # keeps the weights finite if every chosen score underflows


def logits(x_XD, w_DE):
  """Affinity of each token to each expert before the sigmoid, x w.

  Near ties between experts flip with the last bits of a matmul, so this one
  runs in float32 at the highest precision whatever the model computes in.

  Args:
    x_XD: tokens at full model width, any dtype.
    w_DE: one direction an expert.

  Returns:
    logits_XE: float32.
  """
  return jnp.einsum(
      "XD,DE->XE", x_XD.astype(jnp.float32), w_DE.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST)


def scores(x_XD, w_DE):
  """sigmoid(x w), in (0, 1); see `logits`."""
  return jax.nn.sigmoid(logits(x_XD, w_DE))


def disturbed_scores(logits_XE, deviation, key):
  """Scores to choose by in training: sigmoid(logits + noise), no gradient.

  The noise is Gaussian and lies inside the sigmoid, so that scores stay in
  (0, 1), which the bins of `balance.histogram` cover. Drawn as one array of
  all tokens, it depends on the key and not on how they lie over devices.

  Args:
    logits_XE: float32.
    deviation: of the noise, in logits.
    key: of jax.random.

  Returns:
    s_XE: float32 in (0, 1).
  """
  noise_XE = jax.random.normal(key, logits_XE.shape, jnp.float32)
  return jax.nn.sigmoid(
      jax.lax.stop_gradient(logits_XE) + deviation * noise_XE)


def choose(s_XE, threshold_E, top, groups=1, groups_per_token=1):
  """Picks the `top` experts of largest score plus threshold.

  With groups, neighbours in equal shares, first the groups are picked whose
  two best experts sum highest, then experts inside them alone.

  No gradient passes: thresholds move by balancing only, and the router learns
  through the combine weights.

  Args:
    s_XE: scores in (0, 1).
    threshold_E: float32, added for the choice and for nothing else.
    top: experts for each token, below the number that it chooses among.
    groups: groups of experts.
    groups_per_token: of them, those that a token's experts come from.

  Returns:
    choice_XA: int32, best first; of equals the lower index goes first.
    cutoff_X: the largest biased score that was not chosen, in the groups that
      were. Balancing asks how much bias an expert would have needed to pass it.
  """
  experts = s_XE.shape[-1]
  if not 0 < top < experts:
    raise ValueError(
        f"experts_per_token={top} must be in [1, experts={experts}): the "
        "cutoff is the best score that was not chosen")
  if groups > 1 and (experts % groups or not 0 < groups_per_token <= groups
                     or top >= experts // groups * groups_per_token):
    raise ValueError(
        f"expert_groups={groups}, of which expert_groups_per_token="
        f"{groups_per_token}, must divide experts={experts} and leave more "
        f"than experts_per_token={top} to choose among")
  biased_XE = jax.lax.stop_gradient(s_XE + threshold_E[None])
  if groups > 1:
    biased_XE = _best_groups(biased_XE, groups, groups_per_token)
  best_XA, choice_XA = jax.lax.top_k(biased_XE, top + 1)
  return choice_XA[:, :top].astype(jnp.int32), best_XA[:, top]


def _best_groups(biased_XE, groups, groups_per_token):
  """-inf for experts outside the best groups of a token."""
  tokens, experts = biased_XE.shape
  grouped = biased_XE.reshape(tokens, groups, experts // groups)
  best, _ = jax.lax.top_k(grouped, min(2, experts // groups))
  _, chosen = jax.lax.top_k(jnp.sum(best, axis=2), groups_per_token)
  chosen = jnp.any(jax.nn.one_hot(chosen, groups, dtype=bool), axis=1)
  return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(
      biased_XE.shape)


def weights(s_XE, choice_XA, scale, renormalize=True):
  """Combine weights: the unbiased scores of the choice, summing to `scale`.

  Args:
    s_XE: scores in (0, 1).
    choice_XA: experts of each token.
    scale: sum of a token's weights.
    renormalize: False: the scores times `scale`, whatever they sum to.

  Returns:
    weight_XA: float32.
  """
  s_XA = jnp.take_along_axis(s_XE, choice_XA, axis=1)
  if not renormalize:
    return scale * s_XA
  total = jnp.sum(s_XA, axis=1, keepdims=True) + EPSILON
  # The derivative of a quotient squares the total, and float32 underflows.
  return scale * s_XA * jnp.exp(-jnp.log(total))


def soft_assignment(logits_XE, choice_XA, scale):
  """Combine weights by distance: softmax over the chosen, times `scale`.

  Of prototypes that are centres of equal Gaussians this is the probability of
  each, given that it is one of the chosen. Renormalised scores would flatten
  where the sigmoid saturates: 0.99 and 0.999 weigh the same.

  Args:
    logits_XE: temperature times similarity; what all experts have in common
      makes no difference.
    choice_XA: experts of each token.
    scale: sum of a token's weights.

  Returns:
    weight_XA: float32.
  """
  logits_XA = jnp.take_along_axis(logits_XE, choice_XA, axis=1)
  return scale * jax.nn.softmax(logits_XA, axis=1)
