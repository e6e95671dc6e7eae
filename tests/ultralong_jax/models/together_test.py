"""What carries on from token to token and layer to layer, all of it at once.

Pairs of these are in switches_test, each alone beside its own module.
"""
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax.models import depth_plan, hybrid

T = 8
# The first row goes on to the end, the second one has padding.
SEGMENTS_BT = np.asarray([[1] * 3 + [2] * 5, [1] * 2 + [2] * 4 + [0] * 2])
TOKENS_BT = np.arange(2 * T).reshape(2, T) * 7 % 24
NEXT_BT = (TOKENS_BT * 5 + 1) % 24


def build(pattern):
  """One block, in which each kind of layer shares what it has."""
  c = dict(common.model())
  c.update(
      vocab=24, width=8, layers=len(pattern), pattern=pattern, block_layers=4,
      dense_layers=4, dense_hidden=8, heads=2, key_width=4, value_width=4,
      latent_heads=2, latent_key_width=4, latent_shared_width=4,
      latent_value_width=4, latent_rank=6, depth="block_attention",
      share="latent+gates", latent_gate="latent", injection_stride=2,
      injection_span=2, position="rope", rope_base=20., rope_scaling="yarn",
      rope_factor=4., rope_context=8, mtp=True)
  return hybrid.Hybrid(**c)


@functools.partial(jax.jit, static_argnums=0)
def run(model, variables, tokens_BT, next_BT, segment_ids_BT, states):
  """Logits of the next token and of the one after it; the state of each."""
  def logits(model):
    hidden_BTD, own = model.features(tokens_BT, segment_ids_BT, None,
                                     states[0])
    ahead_BTD, draft = model.draft(hidden_BTD, next_BT, segment_ids_BT, None,
                                   states[1])
    w_DW = model.w_unembed_DW
    return (hidden_BTD @ w_DW, ahead_BTD @ w_DW), (own, draft)
  return model.apply(variables, method=logits)


@functools.cache
def in_parts(pattern, size, carried=True):
  """Logits of real tokens, and the states, from parts of `size` tokens."""
  model = build(pattern)
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
      lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype),
      jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT))
  states, found = (None, None), []
  if carried:
    states = (hybrid.empty_state(model, 2, T),
              hybrid.empty_draft_state(model, 2, T))
  for start in range(0, T, size):
    part = np.s_[:, start:start + size]
    logits, states = run(model, variables, TOKENS_BT[part], NEXT_BT[part],
                         SEGMENTS_BT[part], states)
    found.append(logits)
  return [np.concatenate(x, 1)[SEGMENTS_BT > 0] for x in zip(*found)], states


def test_all_of_it_is_on():
  layers = list(depth_plan.all_layers(build("dmdm").plan()))
  assert [x.follows for x in layers] == [(), (), ("gates",), ("latent",)]
  assert [x.reads for x in layers] == [False, True, True, True]
  _, follower = depth_plan.all_layers(build("mm").plan())
  assert follower.follows == ("latent",) and follower.reads


@pytest.mark.parametrize("pattern, size", [
    ("mm", 1), *(pytest.param("dmdm", n, marks=pytest.mark.slow)
                 for n in (1, 3))])
def test_parts_give_the_same_logits_and_state(pattern, size):
  """Of drafts too."""
  whole, end = in_parts(pattern, T)
  assert all(np.std(x) > 0.1 for x in whole)
  np.testing.assert_array_equal(end[1].length_B, [8, 6])
  parts, state = in_parts(pattern, size)
  chex.assert_trees_all_close(parts, whole, atol=1e-4)
  chex.assert_trees_all_close(state, end, atol=1e-4)


@pytest.mark.slow
def test_without_a_state_it_is_the_same():
  whole, _ = in_parts("dmdm", T)
  chex.assert_trees_all_close(in_parts("dmdm", T, False)[0], whole, atol=1e-4)
