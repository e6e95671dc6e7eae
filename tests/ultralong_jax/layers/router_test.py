"""Routing: choice, cutoff, weights, and where gradients go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import router


def some_scores(tokens=40, experts=10):
  logits_XE = np.random.default_rng(0).normal(size=(tokens, experts))
  return np.float32(1 / (1 + np.exp(-logits_XE)))


def test_scores_are_float32_for_bfloat16_inputs():
  rng = np.random.default_rng(1)
  x_XD = rng.normal(size=(64, 128)).astype(jnp.bfloat16)
  w_DE = rng.normal(size=(128, 16)).astype(np.float32)
  s_XE = router.scores(x_XD, w_DE)
  logits = x_XD.astype(np.float64) @ np.float64(w_DE)
  assert s_XE.dtype == jnp.float32
  np.testing.assert_allclose(s_XE, 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_thresholds_choose_but_do_not_weigh():
  s_XE = some_scores()
  threshold_E = jnp.zeros(10).at[3].set(2.)
  choice_XA, _ = router.choose(s_XE, threshold_E, 4)
  assert (choice_XA[:, 0] == 3).all()
  weight_XA = router.weights(s_XE, choice_XA, 2.5)
  chosen = np.take_along_axis(s_XE, np.asarray(choice_XA), 1)
  np.testing.assert_allclose(
      weight_XA, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


def test_cutoff_is_the_best_score_not_chosen():
  s_XE, threshold_E = some_scores(), np.linspace(-.3, .3, 10, dtype=np.float32)
  choice_XA, cutoff_X = router.choose(s_XE, threshold_E, 4)
  biased = s_XE + threshold_E[None]
  kept = np.take_along_axis(biased, np.asarray(choice_XA), 1)
  np.put_along_axis(biased, np.asarray(choice_XA), -np.inf, 1)
  np.testing.assert_array_equal(biased.max(1), cutoff_X)
  assert (kept.min(1) >= cutoff_X).all()


def test_of_equals_at_the_cutoff_the_lower_index_is_chosen():
  s_XE = jnp.array([[.5, .9, .5, .5]])
  choice_XA, cutoff_X = router.choose(s_XE, jnp.zeros(4), 2)
  assert choice_XA.tolist() == [[1, 0]] and cutoff_X.tolist() == [.5]
  weight_XA = router.weights(s_XE, choice_XA, 1.)
  np.testing.assert_allclose(weight_XA, [[.9 / 1.4, .5 / 1.4]], rtol=1e-6)


def test_gradient_passes_through_the_weights_alone():
  s_XE, threshold_E = some_scores(), np.linspace(-.3, .3, 10, dtype=np.float32)

  def everything(s_XE, threshold_E):
    choice_XA, cutoff_X = router.choose(s_XE, threshold_E, 4)
    weight_XA = router.weights(s_XE, choice_XA, 1.)
    return jnp.sum(weight_XA[:, 0]) + jnp.sum(cutoff_X)

  d_s_XE, d_threshold_E = jax.grad(everything, (0, 1))(s_XE, threshold_E)
  assert not d_threshold_E.any()
  choice_XA, _ = router.choose(s_XE, threshold_E, 4)
  chosen = np.zeros(s_XE.shape, bool)
  np.put_along_axis(chosen, np.asarray(choice_XA), True, 1)
  np.testing.assert_array_equal(np.asarray(d_s_XE) != 0, chosen)


def test_weights_survive_scores_that_underflow():
  s_XE = jnp.zeros((3, 4))
  choice_XA, _ = router.choose(s_XE, jnp.zeros(4), 2)
  weight_XA, vjp = jax.vjp(lambda s: router.weights(s, choice_XA, 1.), s_XE)
  assert np.isfinite(weight_XA).all()
  assert np.isfinite(vjp(jnp.ones((3, 2)))[0]).all()


@pytest.mark.parametrize("top", [0, 10, 11])
def test_choosing_none_or_all_names_the_field(top):
  with pytest.raises(ValueError, match="experts_per_token"):
    router.choose(some_scores(), jnp.zeros(10), top)


def test_groups_limit_the_choice_to_the_best_pairs():
  s_XE, threshold_E = some_scores(), np.linspace(.3, -.3, 10, dtype=np.float32)
  choice_XA, cutoff_X = router.choose(s_XE, threshold_E, 3, 5, 2)
  for x, biased_E in enumerate(s_XE + threshold_E[None]):
    # Groups of two: their sum is the group's score.
    best = np.argsort(-biased_E.reshape(5, 2).sum(1))[:2]
    inside = np.concatenate([2 * best, 2 * best + 1])
    ranked = inside[np.argsort(-biased_E[inside])]
    assert choice_XA[x].tolist() == ranked[:3].tolist()
    assert cutoff_X[x] == biased_E[ranked[3]]


def test_one_group_or_all_groups_limit_nothing():
  s_XE, threshold_E = some_scores(), np.linspace(-.3, .3, 10, dtype=np.float32)
  free = router.choose(s_XE, threshold_E, 4)
  for groups, open_ in ((1, 1), (5, 5)):
    limited = router.choose(s_XE, threshold_E, 4, groups, open_)
    jax.tree.map(np.testing.assert_array_equal, free, limited)


@pytest.mark.parametrize("top, groups, open_", [(2, 3, 1), (2, 5, 1),
                                                (2, 5, 6), (2, 5, 0)])
def test_refuses_groups_that_leave_no_choice(top, groups, open_):
  with pytest.raises(ValueError, match=f"expert_groups={groups}"):
    router.choose(some_scores(), jnp.zeros(10), top, groups, open_)


def test_weights_without_renormalisation_are_scores():
  s_XE = some_scores()
  choice_XA, _ = router.choose(s_XE, jnp.zeros(10), 4)
  chosen = np.take_along_axis(s_XE, np.asarray(choice_XA), 1)
  np.testing.assert_allclose(
      router.weights(s_XE, choice_XA, 2.5, renormalize=False), 2.5 * chosen,
      rtol=1e-6)


def test_noise_keeps_scores_between_their_bounds_and_has_no_gradient():
  logits_XE = jnp.asarray(np.random.default_rng(2).normal(size=(300, 40)),
                          jnp.float32)
  key = jax.random.key(0)
  s_XE = router.disturbed_scores(logits_XE, .5, key)
  assert 0 < s_XE.min() and s_XE.max() < 1
  noise_XE = np.log(s_XE / (1 - s_XE)) - logits_XE
  assert abs(noise_XE.std() - .5) < .02 and abs(noise_XE.mean()) < .02
  np.testing.assert_array_equal(
      s_XE, router.disturbed_scores(logits_XE, .5, key))
  assert np.any(s_XE != router.disturbed_scores(logits_XE, .5,
                                                jax.random.key(1)))
  assert not jax.grad(lambda x: jnp.sum(
      router.disturbed_scores(x, .5, key)))(logits_XE).any()


def test_soft_assignment_sums_to_the_scale_and_survives_large_logits():
  logits_XE = 1e4 * some_scores()
  choice_XA, _ = router.choose(some_scores(), jnp.zeros(10), 4)
  weight_XA, vjp = jax.vjp(
      lambda x: router.soft_assignment(x, choice_XA, 2.5), logits_XE)
  np.testing.assert_allclose(weight_XA.sum(1), 2.5, rtol=1e-5)
  assert np.isfinite(vjp(weight_XA)[0]).all()
