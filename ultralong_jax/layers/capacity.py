"""Capacity of experts: which pairs of token and expert are dropped.

Training only. What a token gets depends on the other tokens here, so a text
cut in two, or in another batch, is not treated the same.
"""

import jax
import jax.numpy as jnp


def most(valid_X, top, experts, factor):
  """Tokens that an expert may take, ceil(factor * tokens * top / E).

  Args:
    valid_X: False where a token is padding and does not count.
    top: experts for each token.
    experts: how many, E.
    factor: above 0; 1 is the fair share.

  Returns:
    capacity: int32 scalar.
  """
  tokens = jnp.sum(valid_X, dtype=jnp.float32)
  # A product that is whole but for rounding is whole.
  return jnp.ceil(tokens * (factor * top / experts) * (1. - 1e-6)).astype(
      jnp.int32)


def keep(score_XA, choice_XA, valid_X, capacity, experts):
  """Keeps the best `capacity` pairs of every expert.

  Args:
    score_XA: by which pairs of one expert are compared; of equals, the
      earlier token is kept.
    choice_XA: experts of each token.
    valid_X: False where a token is padding, which takes no room.
    capacity: see `most`.
    experts: how many.

  Returns:
    keep_XA: False for pairs over capacity.
  """
  top = choice_XA.shape[1]
  pairs = choice_XA.size
  expert_I = jnp.where(valid_X[:, None], choice_XA, experts).reshape(pairs)
  pair_I = jnp.arange(pairs, dtype=jnp.int32)
  sorted_I, _, pair_I = jax.lax.sort(
      (expert_I, -jax.lax.stop_gradient(score_XA).reshape(pairs), pair_I),
      num_keys=2)
  count_E = jnp.bincount(expert_I, length=experts + 1)
  rank_I = jnp.arange(pairs) - (jnp.cumsum(count_E) - count_E)[sorted_I]
  keep_I = jnp.zeros(pairs, bool).at[pair_I].set(
      rank_I < capacity, unique_indices=True, mode="promise_in_bounds")
  return keep_I.reshape(-1, top)
