"""Quantile balancing: estimate, invariances, effect, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import balance, router

EXPERTS, TOP = 16, 4


def skewed_scores(rng, tokens, experts=EXPERTS, skew=1.):
  """A router that likes some experts far better than others."""
  noise, bias = jax.random.split(rng)
  liking_E = skew * jax.random.normal(bias, (experts,))
  return jax.nn.sigmoid(
      jax.random.normal(noise, (tokens, experts)) + liking_E[None])


@functools.partial(jax.jit, static_argnames="top")
def measure(s_XE, threshold_E, top=TOP, valid_X=None):
  choice_XA, cutoff_X = router.choose(s_XE, threshold_E, top)
  if valid_X is None:
    valid_X = jnp.ones(s_XE.shape[0], bool)
  return choice_XA, cutoff_X, balance.histogram(
      s_XE, cutoff_X, threshold_E, valid_X)


quantiles = jax.jit(balance.quantile_thresholds, static_argnames="top")


def loads(choice_XA, experts=EXPERTS):
  return np.bincount(np.asarray(choice_XA).reshape(-1), minlength=experts)


def test_histogram_counts_required_biases():
  s_XE = skewed_scores(jax.random.key(0), 300)
  threshold_E = jnp.linspace(-.2, .3, EXPERTS)
  _, cutoff_X, histogram_EZ = measure(s_XE, threshold_E)
  required_XE = np.float64(cutoff_X)[:, None] - np.float64(s_XE)
  for expert in (0, 7):
    counts, _ = np.histogram(required_XE[:, expert], balance.BINS,
                             range=(-1.2, 1.3))
    # A margin on the edge of two bins may round into either.
    moved = np.abs(np.cumsum(counts) - np.cumsum(histogram_EZ[expert]))
    assert moved.max() <= 1 and moved.sum() < 10
  assert histogram_EZ.dtype == jnp.int32
  assert (histogram_EZ.sum(1) == 300).all()


@pytest.mark.parametrize("tokens", [6000, 5999])
def test_estimate_is_within_a_bin_of_the_exact_quantile(tokens):
  s_XE = skewed_scores(jax.random.key(1), tokens)
  threshold_E = jnp.linspace(-.2, .2, EXPERTS)
  _, _, histogram_EZ = measure(s_XE, threshold_E)
  new_E = quantiles(threshold_E, histogram_EZ, top=TOP)
  exact_E = balance.exact_thresholds(s_XE, threshold_E, TOP,
                                     jnp.ones(tokens, bool))
  assert np.abs(new_E - exact_E).max() <= 2.4 / balance.BINS
  assert np.abs(exact_E - threshold_E).max() > .1
  np.testing.assert_allclose(new_E.mean(), 0., atol=1e-6)


def test_with_cutoffs_fixed_every_expert_gets_its_share():
  tokens = 4096
  share = tokens * TOP // EXPERTS
  s_XE = skewed_scores(jax.random.key(2), tokens)
  threshold_E = jnp.zeros(EXPERTS)
  _, cutoff_X, histogram_EZ = measure(s_XE, threshold_E)
  required_XE = np.asarray(cutoff_X)[:, None] - np.asarray(s_XE)
  exact_E = np.asarray(balance.exact_thresholds(s_XE, threshold_E, TOP,
                                                jnp.ones(tokens, bool)))
  # Centring moved all thresholds by one amount; expert 0 tells which.
  offset = np.sort(required_XE[:, 0])[share] - exact_E[0]
  distance_XE = required_XE - (exact_E + offset)[None]
  # Where an expert is itself the cutoff its margin is its old threshold, so
  # there can be a heap of equal margins at the quantile.
  below_E, reached_E = (distance_XE < -1e-6).sum(0), (distance_XE < 1e-6).sum(0)
  assert (below_E <= share).all() and (share <= reached_E).all()
  assert (below_E == share).sum() > EXPERTS / 2
  # The estimate is off by what lies within a bin of it, at most.
  new_E = quantiles(threshold_E, histogram_EZ, top=TOP)
  new_E += np.mean(np.sort(required_XE, axis=0)[share])
  distance_XE = required_XE - np.asarray(new_E)[None]
  near_E = (np.abs(distance_XE) < 2. / balance.BINS).sum(0)
  assert (np.abs((distance_XE < 0).sum(0) - share) <= near_E).all()
  assert np.abs((required_XE < 0).sum(0) - share).max() > 4 * near_E.max()


def test_parts_of_a_batch_add_up_to_the_whole():
  s_XE = skewed_scores(jax.random.key(3), 210)
  threshold_E = jnp.linspace(-.1, .1, EXPERTS)
  whole = measure(s_XE, threshold_E)[2]
  parts = [measure(part, threshold_E)[2] for part in jnp.split(s_XE, 7)]
  np.testing.assert_array_equal(sum(parts), whole)


def test_padding_is_not_counted():
  s_XE = skewed_scores(jax.random.key(4), 200)
  valid_X = jnp.arange(200) % 3 > 0
  threshold_E = jnp.linspace(-.1, .1, EXPERTS)
  padded = measure(s_XE, threshold_E, valid_X=valid_X)[2]
  alone = measure(s_XE[valid_X], threshold_E)[2]
  np.testing.assert_array_equal(padded, alone)
  exact_E = balance.exact_thresholds(s_XE, threshold_E, TOP, valid_X)
  np.testing.assert_array_equal(exact_E, balance.exact_thresholds(
      s_XE[valid_X], threshold_E, TOP, jnp.ones(alone[0].sum(), bool)))


def test_a_batch_of_padding_leaves_the_thresholds_alone():
  threshold_E = jnp.linspace(-.2, .3, EXPERTS)
  nothing = jnp.zeros((EXPERTS, balance.BINS), jnp.int32)
  np.testing.assert_array_equal(
      quantiles(threshold_E, nothing, top=TOP), threshold_E)


def test_fewer_tokens_than_experts_give_finite_thresholds():
  s_XE = skewed_scores(jax.random.key(5), 3)
  for tokens in (1, 2, 3):
    histogram_EZ = measure(s_XE, jnp.zeros(EXPERTS),
                           valid_X=jnp.arange(3) < tokens)[2]
    new_E = quantiles(jnp.zeros(EXPERTS), histogram_EZ, top=TOP)
    assert np.isfinite(new_E).all() and np.abs(new_E).max() < 1.


def test_counts_beyond_what_float32_and_int32_products_hold():
  # 2^28 tokens: tokens * top passes 2^31, the share 2^24.
  histogram_EZ = jnp.zeros((EXPERTS, balance.BINS), jnp.int32)
  histogram_EZ = histogram_EZ.at[:, 500].set(2 ** 26).at[:, 600].set(
      3 * 2 ** 26 - 16).at[:, 700].set(16)
  histogram_EZ = histogram_EZ.at[0, 500].add(-1).at[0, 600].add(1)
  new_E = balance.quantile_thresholds(jnp.zeros(EXPERTS), histogram_EZ, 4)
  # Expert 0 lacks one token of its share in bin 500 and takes it from 600.
  assert new_E[0] - new_E[1] > .19


def test_a_skewed_router_is_balanced_by_one_update():
  experts, top, tokens = 896, 16, 4096
  first, second = jax.random.split(jax.random.key(6))
  liking_E = jnp.linspace(-2.5, 2.5, experts)

  def batch(rng):
    return jax.nn.sigmoid(
        jax.random.normal(rng, (tokens, experts)) + liking_E[None])

  @jax.jit
  def step(s_XE, threshold_E):
    choice_XA, _, histogram_EZ = measure(s_XE, threshold_E, top)
    return choice_XA, balance.quantile_thresholds(threshold_E, histogram_EZ,
                                                  top)

  before, threshold_E = step(batch(first), jnp.zeros(experts))
  again, _ = step(batch(first), threshold_E)
  fresh, _ = step(batch(second), threshold_E)
  fair = tokens * top / experts
  assert loads(before, experts).max() / fair > 4.
  assert loads(again, experts).max() / fair < 1.6
  # A fresh batch of 73 tokens an expert adds sampling noise of 12 %.
  assert loads(fresh, experts).max() / fair < 1.9


def test_renaming_the_experts_renames_the_thresholds():
  s_XE = skewed_scores(jax.random.key(7), 500)
  threshold_E = jnp.linspace(-.2, .2, EXPERTS)
  order = jax.random.permutation(jax.random.key(8), EXPERTS)
  new_E = quantiles(
      threshold_E, measure(s_XE, threshold_E)[2], top=TOP)
  renamed_E = quantiles(
      threshold_E[order], measure(s_XE[:, order], threshold_E[order])[2], top=TOP)
  np.testing.assert_allclose(renamed_E, new_E[order], atol=1e-6)


def stacked_statistics():
  threshold_LE = jnp.stack([jnp.zeros(EXPERTS), jnp.linspace(-.2, .2,
                                                             EXPERTS)])
  histogram_LEZ = jnp.stack([
      measure(skewed_scores(jax.random.key(9 + layer), 100), threshold_E)[2]
      for layer, threshold_E in enumerate(threshold_LE)])
  router_ = {"stack": {"experts": {"threshold_E": threshold_LE}},
             "last": {"threshold_E": threshold_LE[1]}}
  statistics = {
      "stack": {"experts": {"histogram_EZ": histogram_LEZ,
                            "load_E": jnp.zeros((2, EXPERTS))},
                "delta": {"decay_GK": jnp.zeros((2, 3))}},
      "last": {"histogram_EZ": histogram_LEZ[1]}}
  return router_, statistics


def test_update_treats_stacked_layers_one_by_one():
  router_, statistics = stacked_statistics()
  new = jax.jit(functools.partial(balance.update, top=TOP))(router_,
                                                            statistics)
  assert jax.tree.structure(new) == jax.tree.structure(router_)
  new_LE = new["stack"]["experts"]["threshold_E"]
  for layer in range(2):
    np.testing.assert_allclose(new_LE[layer], quantiles(
        router_["stack"]["experts"]["threshold_E"][layer],
        statistics["stack"]["experts"]["histogram_EZ"][layer], top=TOP),
        atol=1e-6)
  np.testing.assert_allclose(new["last"]["threshold_E"], new_LE[1], atol=1e-6)


def test_update_refuses_collections_of_different_modules():
  router_, statistics = stacked_statistics()
  missing = {"stack": statistics["stack"]}
  extra = statistics | {"other": statistics["last"]}
  narrow = statistics | {
      "last": {"histogram_EZ": statistics["last"]["histogram_EZ"][:3]}}
  for wrong in (missing, extra, {}):
    with pytest.raises(ValueError, match="not of the same modules"):
      balance.update(router_, wrong, TOP)
  with pytest.raises(ValueError, match="histogram_EZ"):
    balance.update(router_, narrow, TOP)
  with pytest.raises(ValueError, match="not of the same modules"):
    balance.update(router_ | {"last": {"bias_E": jnp.zeros(3)}}, statistics,
                   TOP)
