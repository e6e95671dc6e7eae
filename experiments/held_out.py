"""Bits per byte of states that train side by side under vmap."""
import math

import jax
import numpy as np

from ultralong_jax import objectives
from ultralong_jax.models import hybrid


def evaluator(model):
  """Returns (states, batches) -> bits per byte of each state, [lanes].

  Args:
    model: Hybrid that the states are of; it sees text of one byte a token.
  """
  @jax.jit
  def nats_of(states, batch):
    def one(state):
      hidden_BTD, _ = model.apply(
          {"params": state.params, "router": state.router}, batch["tokens"],
          batch["segment_ids"], batch["positions"], None, method="features")
      return objectives.next_token_loss(
          hidden_BTD, hybrid.unembedding(state.params), batch["targets"],
          batch["weights"])[0]
    return jax.vmap(one)(states)

  def bits_per_byte(states, batches):
    nats, counted = 0., 0
    for batch in batches:
      nats += np.asarray(nats_of(states, batch))
      counted += np.sum(batch["weights"] > 0)
    return nats / math.log(2) / counted

  return bits_per_byte
