"""Quantile balancing: estimate, invariances, effect, refusals."""

import functools

import jax
import numpy as np
import pytest

from ultralong_jax.layers import balance, router

EXPERTS, TOP = 16, 4
ZERO_E = np.zeros(EXPERTS, np.float32)
# An expert that is itself the cutoff has margin -threshold, so there are heaps
# of equal margins; off the edges of the bins, they fall into one bin safely.
RAMP_E = np.linspace(-.2137, .2939, EXPERTS, dtype=np.float32)


def skewed_scores(seed, tokens, experts=EXPERTS):
  """A router that likes some experts far better than others."""
  rng = np.random.default_rng(seed)
  logits_XE = rng.normal(size=(tokens, experts)) + rng.normal(size=experts)
  return np.float32(1 / (1 + np.exp(-logits_XE)))


@functools.partial(jax.jit, static_argnums=3)
def _measure(s_XE, threshold_E, valid_X, top):
  choice_XA, cutoff_X = router.choose(s_XE, threshold_E, top)
  return choice_XA, cutoff_X, balance.histogram(
      s_XE, cutoff_X, threshold_E, valid_X)


def measure(s_XE, threshold_E, top=TOP, valid_X=None):
  """Choice, cutoff and histogram."""
  if valid_X is None:
    valid_X = np.ones(len(s_XE), bool)
  return jax.tree.map(np.asarray, _measure(s_XE, threshold_E, valid_X, top))


_quantiles = jax.jit(balance.quantile_thresholds, static_argnums=2)


def quantiles(threshold_E, histogram_EZ, top=TOP):
  return np.asarray(_quantiles(threshold_E, histogram_EZ, top))


def exact(s_XE, threshold_E, valid_X=True):
  return np.asarray(balance.exact_thresholds(
      s_XE, threshold_E, TOP, np.broadcast_to(valid_X, len(s_XE))))


def loads(choice_XA, experts=EXPERTS):
  return np.bincount(np.asarray(choice_XA).reshape(-1), minlength=experts)


def test_histogram_counts_required_biases():
  s_XE = skewed_scores(0, 300)
  _, cutoff_X, histogram_EZ = measure(s_XE, RAMP_E)
  required_XE = np.float64(cutoff_X)[:, None] - np.float64(s_XE)
  for expert in (0, 7):
    counts, _ = np.histogram(required_XE[:, expert], balance.BINS,
                             range=(RAMP_E[0] - 1, RAMP_E[-1] + 1))
    # A margin on the edge of two bins may round into either.
    moved = np.abs(np.cumsum(counts) - np.cumsum(histogram_EZ[expert]))
    assert moved.max() <= 1 and moved.sum() < 10
  assert histogram_EZ.dtype == np.int32
  assert (histogram_EZ.sum(1) == 300).all()


@pytest.mark.parametrize("tokens", [6000, 5999])
def test_estimate_is_within_a_bin_of_the_exact_quantile(tokens):
  s_XE = skewed_scores(1, tokens)
  _, _, histogram_EZ = measure(s_XE, RAMP_E)
  new_E = quantiles(RAMP_E, histogram_EZ)
  exact_E = exact(s_XE, RAMP_E)
  assert np.abs(new_E - exact_E).max() <= 2.4 / balance.BINS
  assert np.abs(exact_E - RAMP_E).max() > .1
  np.testing.assert_allclose(new_E.mean(), 0., atol=1e-6)


def test_with_cutoffs_fixed_every_expert_gets_its_share():
  tokens = 4096
  share = tokens * TOP // EXPERTS
  s_XE = skewed_scores(2, tokens)
  _, cutoff_X, histogram_EZ = measure(s_XE, ZERO_E)
  required_XE = cutoff_X[:, None] - s_XE
  exact_E = exact(s_XE, ZERO_E)
  # Centring moved all thresholds by one amount; expert 0 tells which.
  offset = np.sort(required_XE[:, 0])[share] - exact_E[0]
  distance_XE = required_XE - (exact_E + offset)[None]
  # There can be a heap of equal margins at the quantile.
  below_E, reached_E = (distance_XE < -1e-6).sum(0), (distance_XE < 1e-6).sum(0)
  assert (below_E <= share).all() and (share <= reached_E).all()
  assert (below_E == share).sum() > EXPERTS / 2
  # The estimate is off by what lies within a bin of it, at most.
  new_E = quantiles(ZERO_E, histogram_EZ)
  new_E = new_E + np.mean(np.sort(required_XE, axis=0)[share])
  distance_XE = required_XE - new_E[None]
  near_E = (np.abs(distance_XE) < 2. / balance.BINS).sum(0)
  assert (np.abs((distance_XE < 0).sum(0) - share) <= near_E).all()
  assert np.abs((required_XE < 0).sum(0) - share).max() > 4 * near_E.max()


def test_parts_of_a_batch_add_up_to_the_whole():
  s_XE = skewed_scores(3, 210)
  whole = measure(s_XE, RAMP_E)[2]
  parts = [measure(part, RAMP_E)[2] for part in np.split(s_XE, 7)]
  np.testing.assert_array_equal(sum(parts), whole)


def test_padding_is_not_counted():
  s_XE = skewed_scores(4, 200)
  valid_X = np.arange(200) % 3 > 0
  padded = measure(s_XE, RAMP_E, valid_X=valid_X)[2]
  alone = measure(s_XE[valid_X], RAMP_E)[2]
  np.testing.assert_array_equal(padded, alone)
  exact_E = exact(s_XE, RAMP_E, valid_X)
  np.testing.assert_array_equal(exact_E, exact(s_XE[valid_X], RAMP_E))


def test_a_batch_of_padding_leaves_the_thresholds_alone():
  nothing = np.zeros((EXPERTS, balance.BINS), np.int32)
  np.testing.assert_array_equal(
      quantiles(RAMP_E, nothing), RAMP_E)


def test_fewer_tokens_than_experts_give_finite_thresholds():
  s_XE = skewed_scores(5, 3)
  for tokens in (1, 2, 3):
    histogram_EZ = measure(s_XE, ZERO_E,
                           valid_X=np.arange(3) < tokens)[2]
    new_E = quantiles(ZERO_E, histogram_EZ)
    assert np.isfinite(new_E).all() and np.abs(new_E).max() < 1.


def test_counts_beyond_what_float32_and_int32_products_hold():
  # 2^28 tokens: tokens * top passes 2^31, the share 2^24.
  histogram_EZ = np.zeros((EXPERTS, balance.BINS), np.int32)
  histogram_EZ[:, [500, 600]] = 2 ** 26, 3 * 2 ** 26
  histogram_EZ[0, [500, 600]] += -1, 1
  new_E = quantiles(ZERO_E, histogram_EZ)
  # Expert 0 lacks one token of its share in bin 500 and takes it from 600.
  assert new_E[0] - new_E[1] > .19


def test_a_skewed_router_is_balanced_by_one_update():
  experts, top, tokens = 896, 16, 4096
  rng = np.random.default_rng(6)
  first, second = (
      np.float32(1 / (1 + np.exp(-rng.normal(size=(tokens, experts))
                                 - np.linspace(-2.5, 2.5, experts))))
      for _ in range(2))
  before, _, histogram_EZ = measure(first, np.zeros(experts, np.float32), top)
  threshold_E = quantiles(np.zeros(experts, np.float32), histogram_EZ, top)
  again = measure(first, threshold_E, top)[0]
  fresh = measure(second, threshold_E, top)[0]
  fair = tokens * top / experts
  assert loads(before, experts).max() / fair > 4.
  assert loads(again, experts).max() / fair < 1.6
  # A fresh batch of 73 tokens an expert adds sampling noise of 12 %.
  assert loads(fresh, experts).max() / fair < 1.9


def test_renaming_the_experts_renames_the_thresholds():
  s_XE = skewed_scores(7, 500)
  order = np.random.default_rng(8).permutation(EXPERTS)
  new_E = quantiles(RAMP_E, measure(s_XE, RAMP_E)[2])
  renamed_E = quantiles(RAMP_E[order],
                        measure(s_XE[:, order], RAMP_E[order])[2])
  np.testing.assert_allclose(renamed_E, new_E[order], atol=1e-6)


def stacked_statistics():
  threshold_LE = np.stack([ZERO_E, RAMP_E])
  histogram_LEZ = np.stack([
      measure(skewed_scores(9 + layer, 100), threshold_E)[2]
      for layer, threshold_E in enumerate(threshold_LE)])
  router_ = {"stack": {"experts": {"threshold_E": threshold_LE}},
             "last": {"threshold_E": threshold_LE[1]}}
  statistics = {
      "stack": {"experts": {"histogram_EZ": histogram_LEZ,
                            "load_E": np.zeros((2, EXPERTS))},
                "delta": {"decay_GK": np.zeros((2, 3))}},
      "last": {"histogram_EZ": histogram_LEZ[1]}}
  return router_, statistics


def test_update_treats_stacked_layers_one_by_one():
  router_, statistics = stacked_statistics()
  new = jax.jit(balance.update, static_argnums=2)(router_, statistics, TOP)
  assert jax.tree.structure(new) == jax.tree.structure(router_)
  new_LE = new["stack"]["experts"]["threshold_E"]
  for layer in range(2):
    np.testing.assert_allclose(new_LE[layer], quantiles(
        router_["stack"]["experts"]["threshold_E"][layer],
        statistics["stack"]["experts"]["histogram_EZ"][layer]),
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
    balance.update(router_ | {"last": {"bias_E": np.zeros(3)}}, statistics,
                   TOP)
