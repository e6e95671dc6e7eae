"""A step with each form of balancing, and with noise: what it adds up to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ultralong_jax.train import step_test
from ultralong_jax.layers import balance
from ultralong_jax.train import summary


@functools.cache
def compiled(accumulate=1, numbers=(), **fields):
  # AdamW compiles in half of Muon's time.
  state, make = step_test.parts(optimizer="adamw", **fields)
  return state, jax.jit(make(accumulate=accumulate, balance=dict(numbers)))


def run(steps, state, train_step, batch):
  for _ in range(steps):
    state, metrics = train_step(state, batch)
  return state, metrics


def test_state_moves_once_a_step_by_all_micro_batches():
  batch = step_test.make_batch()
  start, one = compiled(balance="load_quantile")
  _, four = compiled(4, balance="load_quantile")
  whole, _ = one(start, batch)
  parts, _ = four(start, batch)
  step_test.assert_close(whole.router, parts.router, atol=1e-6)
  step_test.assert_moved(start.router, whole.router)
  # The second step starts from the first one's: an average goes on.
  again, metrics = one(whole, batch)
  steps = balance.Settings().load_steps
  recent_E = whole.router["experts"]["recent_E"]
  np.testing.assert_allclose(
      again.router["experts"]["recent_E"],
      recent_E + (metrics["load"][0] - recent_E) / steps, rtol=1e-5)
  broken = {**batch, "weights": np.where(batch["weights"] > 0, np.inf, 0)}
  after, skipped = one(whole, broken)
  assert skipped["skipped"] == 1
  step_test.assert_same(after.router, whole.router)


@pytest.mark.slow
@pytest.mark.parametrize("form, moves", [
    ("aux_loss", set()), ("sign_bias", {"threshold_E"}),
    ("load_quantile", {"threshold_E", "recent_E"})])
def test_one_step_of_each_form_routes_by_distance(form, moves):
  """And only the auxiliary loss has a gradient for the router to descend."""
  batch = step_test.make_batch()
  numbers = dict(loss_coefficient=5.) if form == "aux_loss" else {}
  prototypes = dict(router="prototype", router_similarity="distance")
  start, step = compiled(numbers=tuple(numbers.items()), balance=form,
                         **prototypes)
  after, metrics = step(start, batch)
  assert metrics["skipped"] == 0 and np.isfinite(metrics["loss"])
  router, before = after.router["experts"], start.router["experts"]
  assert {name for name in router
          if np.any(router[name] != before[name])} == moves
  # Adam's first step hardly depends on the gradient's size, which clipping
  # changes for all.
  _, plain = compiled(balance="none", **prototypes)
  without, same = plain(start.replace(router={"experts": {
      name: x for name, x in before.items() if name != "recent_E"}}), batch)
  step_test.assert_same(without.router["experts"]["threshold_E"],
                        before["threshold_E"])
  np.testing.assert_allclose(same["loss"], metrics["loss"], rtol=1e-6)
  for name, differs in (("w_router_DR", form == "aux_loss"),
                        ("prototype_ER", form == "aux_loss"),
                        ("w_down_EFR", False)):
    gap = np.abs(after.params["experts"][name]
                 - without.params["experts"][name]).max()
    assert gap > 1e-3 if differs else gap < 1e-4, name


def test_the_auxiliary_loss_is_descended_and_told_apart():
  batch = step_test.make_batch()
  state, step = compiled(numbers=(("loss_coefficient", .5),),
                         balance="aux_loss")
  other, metrics = step(state, batch)
  _, plain = compiled(4, balance="load_quantile")
  one, without = plain(state.replace(router=balance.remembering(
      state.router, "load_quantile")), batch)
  np.testing.assert_allclose(metrics["loss"], without["loss"], rtol=1e-5)
  assert "balance_loss" not in without
  # One layer: the coefficient, at balance.
  np.testing.assert_allclose(metrics["balance_loss"], .5, rtol=.1)
  assert np.any(one.params["experts"]["w_router_DE"]
                != other.params["experts"]["w_router_DE"])
  assert not np.any(other.router["experts"]["threshold_E"])
  # Of micro-batches, the mean by tokens.
  _, parts = compiled(4, (("loss_coefficient", .5),), balance="aux_loss")
  _, four = parts(state, batch)
  np.testing.assert_allclose(four["balance_loss"], metrics["balance_loss"],
                             rtol=.05)


def noisy(accumulate=1):
  return compiled(accumulate, balance="none", router_noise=2.)


def test_noise_is_a_function_of_seed_and_step():
  batch = step_test.make_batch()
  state, step = noisy()
  _, metrics = step(state, batch)
  _, again = step(state, batch)
  step_test.assert_same(metrics, again)
  for other in (state.replace(step=state.step + 1),
                state.replace(rng=jax.random.PRNGKey(1))):
    assert np.any(step(other, batch)[1]["load"] != metrics["load"])


def test_micro_batches_have_noise_of_their_own():
  batch = {k: np.repeat(x[:1], 2, axis=0)  # two equal rows
           for k, x in step_test.make_batch().items()}
  state, step = noisy(2)
  tokens = int(np.sum(batch["segment_ids"][0] > 0))
  load_LE = np.asarray(step(state, batch)[1]["load"])
  # Two rows, two experts of four a token: counts, which would all be even if
  # both rows were routed alike.
  count_LE = load_LE * 2 * 2 * tokens / 4
  assert np.any(np.abs(count_LE % 2 - 1) < .1)


def test_a_run_that_was_stopped_draws_the_same_noise():
  batch = step_test.make_batch()
  state, step = noisy()
  whole, metrics = run(4, state, step, batch)
  half, _ = run(2, state, step, batch)
  # As a checkpoint brings it back.
  half = jax.tree.map(jnp.asarray, jax.device_get(half))
  after, again = run(2, half, step, batch)
  step_test.assert_same((whole, metrics), (after, again))


def test_summary_counts_the_dead_the_dropped_and_the_spread():
  load_LE = np.int32([[4, 0, 2, 2], [0, 0, 8, 0]])
  square_LE = np.float32([[4, 0, 2 * 9, 2 * 4], [0, 0, 80, 0]])
  metrics = summary.of_statistics({
      "a": {"load_E": load_LE, "square_sum_E": square_LE,
            "dropped": np.int32([1, 3])}, "b": {"x": {
                "load_E": load_LE[0], "square_sum_E": square_LE[0],
                "dropped": np.int32(2)}}})
  assert metrics["dead_experts"] == 1 + 3 + 1
  np.testing.assert_allclose(metrics["dropped"], 6 / 24)
  np.testing.assert_allclose(metrics["load"][0], [2, 0, 1, 1])
  rms = np.array([1., 3., 2.])
  np.testing.assert_allclose(metrics["activation_spread"],
                             2 * rms.std() / rms.mean() / 3, rtol=1e-5)
  assert not summary.of_statistics({})
