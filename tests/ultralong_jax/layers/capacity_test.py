"""Capacity: the count, who is dropped, and that all forms of mix obey."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import capacity, experts

E, A, X = 5, 2, 40


def pairs(seed=0):
  """Choices that crowd the first experts, scores with ties, some padding."""
  rng = np.random.default_rng(seed)
  likes_XE = rng.normal(size=(X, E)) - np.arange(E)
  choice_XA = np.argsort(-likes_XE)[:, :A].astype(np.int32)
  score_XA = rng.integers(1, 12, (X, A)).astype(np.float32) / 12
  return score_XA, choice_XA, rng.random(X) > .2


def slow_keep(score_XA, choice_XA, valid_X, most):
  keep_XA = np.zeros(choice_XA.shape, bool)
  for expert in range(E):
    wants = [(-score_XA[x, a], x, a) for x in range(X) for a in range(A)
             if valid_X[x] and choice_XA[x, a] == expert]
    for _, x, a in sorted(wants)[:most]:
      keep_XA[x, a] = True
  return keep_XA


keep = jax.jit(capacity.keep, static_argnums=4)


@pytest.mark.parametrize("most", [0, 1, 7, 13, 99])
def test_the_best_of_each_expert_are_kept(most):
  score_XA, choice_XA, valid_X = pairs()
  got_XA = np.asarray(keep(score_XA, choice_XA, valid_X, most, E))
  wanted_XA = slow_keep(score_XA, choice_XA, valid_X, most)
  np.testing.assert_array_equal(got_XA & valid_X[:, None], wanted_XA)
  for expert in range(E):
    mine_XA = (choice_XA == expert) & valid_X[:, None]
    assert (got_XA & mine_XA).sum() == min(most, mine_XA.sum())
    dropped, kept = (score_XA[mine_XA & m] for m in (~got_XA, got_XA))
    assert not (len(dropped) and len(kept)) or dropped.max() <= kept.min()


def test_padding_takes_no_room():
  score_XA, choice_XA, valid_X = pairs()
  got_XA = keep(score_XA, choice_XA, valid_X, 6, E)
  score_XA = np.where(valid_X[:, None], score_XA, 99.).astype(np.float32)
  np.testing.assert_array_equal(
      keep(score_XA, choice_XA, valid_X, 6, E)[valid_X], got_XA[valid_X])


@pytest.mark.parametrize("tokens, top, of, factor, wanted", [
    (40, 2, 5, 1., 16), (41, 2, 5, 1., 17), (40, 2, 5, 1.1, 18),
    (10, 1, 1, 1.1, 11), (0, 2, 5, 1., 0), (1, 1, 100, .5, 1)])
def test_capacity_is_the_fair_share_rounded_up(tokens, top, of, factor,
                                               wanted):
  valid_X = np.arange(64) < tokens
  assert capacity.most(valid_X, top, of, factor) == wanted


X_BTD = np.random.default_rng(1).normal(size=(2, 13, 16)).astype(np.float32)
VALID_BT = np.arange(26).reshape(2, 13) < 20


def layer(implementation="", **fields):
  return experts.LatentExperts(
      experts=E, experts_per_token=A, hidden=8, shared=0, training=True,
      implementation=implementation, **fields)


@functools.cache
def variables():
  module = layer()
  made = jax.jit(module.init)(jax.random.key(0), X_BTD, VALID_BT)
  # Everyone's favourite is expert 1.
  router = {"threshold_E": jnp.zeros(E).at[1].set(.5)}
  return jax.tree.map(lambda x: 8 * x, made["params"]), router


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(module, params, state):
  def loss(params):
    y_BTD, written = module.apply({"params": params, "router": state}, X_BTD,
                                  VALID_BT, mutable=["statistics"])
    return jnp.sum(y_BTD * X_BTD), (y_BTD, written["statistics"])
  return jax.grad(loss, has_aux=True)(params)


def run(module):
  return value_and_gradient(module, *variables())


@pytest.mark.parametrize("implementation", [
    "blocks", "ragged", "dense", pytest.param("tokamax", marks=(
        pytest.mark.skipif(not importlib.util.find_spec("tokamax"),
                           reason="tokamax is not installed")))])
def test_dropped_pairs_add_nothing_and_get_no_gradient(implementation):
  # 20 tokens x 2 / 5 experts x .5: four of the twenty that want expert 1.
  d, (y_BTD, statistics) = run(layer(implementation, capacity_factor=.5))
  load_E = np.asarray(statistics["load_E"])
  assert load_E.sum() == 40 and load_E[1] == 20  # as asked for
  assert statistics["dropped"] == np.maximum(load_E - 4, 0).sum()
  wanted, (wanted_BTD, _) = run(layer("dense", capacity_factor=.5))
  np.testing.assert_allclose(y_BTD, wanted_BTD, rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-3, atol=1e-4), d, wanted)
  free, (free_BTD, _) = run(layer("dense"))
  assert np.abs(free_BTD - y_BTD).max() > .01
  # Four tokens teach expert 1 instead of twenty.
  taught, all_taught = (np.abs(g["w_down_EFR"][1]).sum() for g in (d, free))
  assert 0 < taught < all_taught / 2


def test_room_for_all_drops_nothing_and_evaluation_never_does():
  _, (wanted_BTD, _) = run(layer())
  _, (y_BTD, statistics) = run(layer(capacity_factor=float(E)))
  assert statistics["dropped"] == 0
  np.testing.assert_array_equal(y_BTD, wanted_BTD)
  _, (y_BTD, statistics) = run(
      layer(capacity_factor=.1).clone(training=False))
  assert "dropped" not in statistics
  np.testing.assert_array_equal(y_BTD, wanted_BTD)
