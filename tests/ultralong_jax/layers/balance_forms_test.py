"""The other forms of balancing: bands, signs, averages, the loss term."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import balance, router

E, TOP = 20, 2
ZERO_E = np.zeros(E, np.float32)


def own_state(threshold_E=ZERO_E, recent_E=ZERO_E + 1):
  return {"threshold_E": np.float32(threshold_E),
          "recent_E": np.float32(recent_E)}


@functools.partial(jax.jit, static_argnums=(2, 3))
def update(router_, statistics, name, settings):
  return balance.update(router_, statistics, TOP, name, settings)


def move(name, load_E, own=None, **numbers):
  """The state of one layer after a step of these loads."""
  own = own or own_state()
  if name not in balance.REMEMBERS:
    own = {"threshold_E": own["threshold_E"]}
  counted = {"load_E": np.asarray(load_E, np.int32),
             "score_sum_E": np.ones(np.shape(load_E), np.float32)}
  new = update({"a": {"b": own}}, {"a": {"b": counted}}, name,
               balance.Settings(**numbers))["a"]["b"]
  return jax.tree.map(np.asarray, new)


def loads(seed=0, skew=1.):
  """Counts whose mean is 100."""
  x_E = np.exp(skew * np.random.default_rng(seed).normal(size=E))
  load_E = np.floor(100 * E * x_E / x_E.sum()).astype(np.int64)
  load_E[0] += 100 * E - load_E.sum()
  return load_E


@pytest.mark.parametrize("steps", [1, 5])
def test_load_quantile_equals_its_formula(steps):
  load_E, own = loads(), own_state(np.linspace(-1, 1, E),
                                   loads(1, .2) / 100)
  recent_E = own["recent_E"] + (load_E / 100 - own["recent_E"]) / steps
  low, high = np.quantile(np.float64(recent_E), [.2, .7])
  assert low > .2
  wanted_E = [.3 * (low - n if n < low else min(high - n, 0))
              for n in recent_E]
  new = move("load_quantile", load_E, own, load_steps=steps, load_low=.2,
             load_high=.7, load_rate=.3, load_least=.2)
  np.testing.assert_allclose(new["recent_E"], recent_E, rtol=1e-5)
  np.testing.assert_allclose(new["threshold_E"] - own["threshold_E"],
                             wanted_E, atol=1e-5)


def test_inside_the_band_nothing_moves_and_outside_it_grows():
  load_E = np.sort(loads())
  move_E = move("load_quantile", load_E, load_steps=1,
                load_least=0.)["threshold_E"]
  low, high = np.quantile(load_E, [.1, .9])
  inside_E = (low <= load_E) & (load_E <= high)
  assert inside_E.sum() == 16 and not move_E[inside_E].any()
  assert (move_E[load_E < low] > 0).all() and (move_E[load_E > high] < 0).all()
  # The further outside, the more: strictly down along sorted loads.
  outside_E = move_E[~inside_E]
  assert (np.diff(outside_E) < 0).all()
  np.testing.assert_allclose(
      move_E[-1] / move_E[-2], (load_E[-1] - high) / (load_E[-2] - high),
      rtol=1e-3)


def test_dormant_experts_are_lifted_however_many_they_are():
  load_E = np.where(np.arange(E) < 12, 0, 250)
  move_E = move("load_quantile", load_E, load_steps=1)["threshold_E"]
  assert (move_E[:12] > 0).all() and not move_E[12:].any()
  literal_E = move("load_quantile", load_E, load_steps=1,
                   load_least=0.)["threshold_E"]
  assert not literal_E.any()  # the band alone sees nothing wrong


def test_one_odd_step_in_a_window_moves_little():
  odd_E = loads(2, 2.)
  once, far = (np.abs(move("load_quantile", odd_E, load_steps=steps)[
      "threshold_E"]).max() for steps in (50, 1))
  assert once < far / 20


def test_sign_bias_is_a_fixed_step_towards_balance():
  load_E = loads()
  load_E[3:5] += [100 - load_E[3], load_E[3] - 100]  # expert 3 is balanced
  own = own_state(np.linspace(-1, 1, E))
  new_E = move("sign_bias", load_E, own, sign_rate=.01)["threshold_E"]
  np.testing.assert_allclose(new_E, own["threshold_E"]
                             + .01 * np.sign(100. - load_E), atol=1e-6)
  assert new_E[3] == own["threshold_E"][3]


def test_quantile_over_several_steps_is_a_running_average():
  own = own_state(np.linspace(-.2, .2, E))
  s_XE = np.random.default_rng(3).random((400, E)).astype(np.float32)
  _, cutoff_X = router.choose(s_XE, own["threshold_E"], TOP)
  counted = {"load_E": np.zeros(E, np.int32),
             "histogram_EZ": balance.histogram(
                 s_XE, cutoff_X, own["threshold_E"], np.ones(400, bool))}
  one, four = (balance.quantile(own, counted, TOP, balance.Settings(
      quantile_steps=n))["threshold_E"] for n in (1, 4))
  np.testing.assert_array_equal(one, balance.quantile_thresholds(
      own["threshold_E"], counted["histogram_EZ"], TOP))
  np.testing.assert_allclose(
      four, .75 * own["threshold_E"] + .25 * np.asarray(one), atol=1e-6)


@pytest.mark.parametrize("name", ["aux_loss", "none"])
def test_baselines_without_thresholds_leave_them(name):
  own = own_state(np.linspace(-1, 1, E))
  np.testing.assert_array_equal(move(name, loads(), own)["threshold_E"],
                                own["threshold_E"])


@pytest.mark.parametrize("name", ["load_quantile", "sign_bias"])
def test_a_batch_of_padding_moves_nothing(name):
  own = own_state(np.linspace(-1, 1, E), loads(4) / 100)
  new = move(name, ZERO_E, own)
  for leaf, x in new.items():
    np.testing.assert_array_equal(x, own[leaf])


@pytest.mark.parametrize("name", ["load_quantile", "sign_bias"])
def test_stacked_layers_are_treated_one_by_one(name):
  pair = [loads(5), loads(6)]
  both = move(name, np.stack(pair), own_state(
      np.zeros((2, E)), np.ones((2, E))))
  for layer, load_E in enumerate(pair):
    for leaf, x in move(name, load_E).items():
      np.testing.assert_allclose(both[leaf][layer], x, atol=1e-6)


@pytest.mark.parametrize("name, numbers, steps", [
    ("load_quantile", dict(load_steps=4, load_rate=.03), 60),
    ("sign_bias", dict(sign_rate=.01), 60)])
def test_a_skewed_router_becomes_balanced(name, numbers, steps):
  rng = np.random.default_rng(7)
  likes_E, own = rng.normal(size=E), own_state()
  spread = []
  for _ in range(steps):
    logits_XE = rng.normal(size=(512, E)) + likes_E
    biased_XE = 1 / (1 + np.exp(-logits_XE)) + own["threshold_E"]
    choice_XA = np.argsort(-biased_XE)[:, :TOP]
    load_E = np.bincount(choice_XA.reshape(-1), minlength=E)
    spread.append(load_E.max() / load_E.mean())
    own = own | move(name, load_E, own, **numbers)
  assert spread[0] > 3. and max(spread[-5:]) < .6 * spread[0]


def test_aux_loss_is_its_formula():
  rng = np.random.default_rng(8)
  s_XE = rng.random((50, E)).astype(np.float32)
  valid_X = np.arange(50) < 41
  choice_XA, _ = router.choose(s_XE, ZERO_E, TOP)
  f_E = np.bincount(np.asarray(choice_XA)[:41].reshape(-1),
                    minlength=E) / (41 * TOP)
  p_XE = s_XE[:41] / s_XE[:41].sum(1, keepdims=True)
  layer = {"load_E": np.int32(41 * TOP * f_E + .5),
           "score_sum_E": balance.score_sums(s_XE, valid_X)}
  wanted = E * np.sum(f_E * p_XE.mean(0))
  np.testing.assert_allclose(balance.loss({"a": layer}, TOP), wanted,
                             rtol=1e-5)
  stacked = jax.tree.map(lambda x: np.stack([x, x]), layer)
  np.testing.assert_allclose(
      balance.loss({"a": stacked, "b": {"c": layer}}, TOP), 3 * wanted,
      rtol=1e-5)
  even = {"load_E": np.full(E, 4, np.int32),
          "score_sum_E": np.full(E, 2 / E * TOP, np.float32) * 10}
  np.testing.assert_allclose(balance.loss({"a": even}, TOP), 1., rtol=1e-5)
  nothing = {"load_E": np.zeros(E, np.int32), "score_sum_E": ZERO_E}
  assert balance.loss({"a": nothing}, TOP) == 0


def test_descending_the_aux_loss_balances():
  logits_XE = jnp.asarray(np.random.default_rng(9).normal(size=(200, E))
                          + np.linspace(-1, 1, E), jnp.float32)

  @jax.jit
  def measure(shift_E):
    s_XE = jax.nn.sigmoid(logits_XE + shift_E[None])
    choice_XA, _ = router.choose(s_XE, jnp.zeros(E), TOP)
    load_E = jnp.zeros(E, jnp.int32).at[choice_XA].add(1)
    loss = balance.loss({"a": {"load_E": load_E, "score_sum_E":
                               balance.score_sums(s_XE, jnp.ones(200, bool))}},
                        TOP)
    return loss, load_E

  slope = jax.jit(jax.grad(measure, has_aux=True))
  d_E, load_E = slope(jnp.zeros(E))
  # Experts with more than their share are pushed down, the others up.
  assert np.corrcoef(d_E, load_E)[0, 1] > .8
  assert d_E[np.argmax(load_E)] > 0 > d_E[np.argmin(load_E)]
  shift_E = jnp.zeros(E)
  for _ in range(100):
    shift_E -= 5. * slope(shift_E)[0]
  assert measure(shift_E)[1].max() < .6 * load_E.max()
  assert measure(shift_E)[0] < measure(jnp.zeros(E))[0]


def test_update_passes_on_what_is_not_its_own_and_refuses_what_is_missing():
  counted = {"load_E": loads().astype(np.int32)}
  start_ER = np.ones((E, 3), np.float32)
  new = balance.update(
      {"a": {"threshold_E": ZERO_E, "start_ER": start_ER}},
      {"a": counted, "delta": {"sampled": np.float32(1)}}, TOP, "sign_bias")
  np.testing.assert_array_equal(new["a"]["start_ER"], start_ER)
  thresholds = {"a": {"threshold_E": ZERO_E}}
  with pytest.raises(ValueError, match="load_quantile.*not of the same"):
    balance.update(thresholds, {"a": counted}, TOP, "load_quantile")
  full = balance.remembering(thresholds, "load_quantile")
  np.testing.assert_array_equal(full["a"]["recent_E"], ZERO_E + 1)
  balance.update(full, {"a": counted}, TOP, "load_quantile")
  for name in ("quantile", "aux_loss"):  # count more than loads
    with pytest.raises(ValueError, match=f"{name}.*not of the same"):
      balance.update(thresholds, {"a": counted}, TOP, name)
  with pytest.raises(ValueError, match="balance='mean'"):
    balance.update(thresholds, {"a": counted}, TOP, "mean")
