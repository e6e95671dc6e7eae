"""A state that is a function of its step alone: what is saved, and by whom."""
import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax import sharding
from ultralong_jax.train import checkpoint
from ultralong_jax.train.state import TrainState

SIDE = 64  # of a parameter and of its momentum
# A process of its own, started in the root, begins with this.
IMPORTS = """
import os, subprocess, sys, time
import jax, numpy as np
from tests.ultralong_jax.train import checkpoint_states
from tests.ultralong_jax.train.checkpoint_states import (
    same, shapes, start, state_at, train)
from ultralong_jax.train import check, checkpoint
"""


def start():
  """Returns the state before the first step."""
  return TrainState(
      {"w_DF": jnp.ones((SIDE, SIDE))}, (jnp.zeros((SIDE, SIDE)),),
      {"threshold_E": jnp.arange(4.)}, jnp.int32(0), jax.random.PRNGKey(7))


def train(state):
  """Returns the state a step later."""
  key = jax.random.fold_in(state.rng, state.step)
  momentum = 0.9 * state.opt_state[0] + jax.random.normal(key, (SIDE, SIDE))
  return state.replace(
      params={"w_DF": state.params["w_DF"] - 0.01 * momentum},
      opt_state=(momentum,), step=state.step + 1)


def state_at(step):
  """Returns the state after so many steps."""
  state, go = start(), jax.jit(train)
  for _ in range(step):
    state = go(state)
  return state


def shapes():
  """Returns what restore() is asked for."""
  return sharding.with_sharding(
      jax.eval_shape(start), sharding.whole(sharding.data_mesh()))


def same(a, b):
  """Are all arrays of two states equal to the last bit?"""
  return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def newest(workdir, states, **how):
  """Returns (step, what was said); what is restored has to be that step's."""
  said = []
  checkpoints = checkpoint.Checkpoints(workdir, say=said.append, **how)
  step = checkpoints.latest()
  if step is not None:
    restored, record = checkpoints.restore(step, shapes())
    assert same(restored, states[step])
    assert record["position"] == step
  checkpoints.close()
  return step, "\n".join(said)
