"""Prototypes: similarity, where scores lie, how they start and drift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import balance, experts, prototypes, router

KINDS = sorted(prototypes.SLOPE)
X, D, R, E = 30, 12, 6, 10


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def inputs():
  return (normal(0, X, D), normal(1, D, R), normal(2, E, R),
          np.float32(.3))


def slow_logits(x_XD, w_DR, prototype_ER, temperature, kind):
  """One pair at a time, in float64."""
  wide = [np.asarray(a, np.float64)
          for a in (x_XD, w_DR, prototype_ER, temperature)]
  x_XD, w_DR, prototype_ER, temperature = wide
  factor = np.sqrt(R) * 4 ** np.tanh(temperature)
  out = np.zeros((len(x_XD), len(prototype_ER)))
  for x, row in enumerate(x_XD):
    z = row @ w_DR
    z = z / np.linalg.norm(z)
    for e, p in enumerate(prototype_ER):
      out[x, e] = factor * (
          z @ p / np.linalg.norm(p) if kind == "cosine"
          else (1. + np.mean(np.sum(prototype_ER ** 2, axis=1))
                - np.sum((z - p) ** 2)) / 2)
  return out


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_one_pair_at_a_time(kind):
  args, d_XE = inputs(), normal(3, X, E)
  logits_XE, vjp = jax.vjp(
      lambda *a: prototypes.logits(*a, kind), *args)
  np.testing.assert_allclose(logits_XE, slow_logits(*args, kind), rtol=1e-4,
                             atol=1e-4)
  # Along a random direction of all arguments, by central differences.
  way = [normal(4 + i, *np.shape(a)) for i, a in enumerate(args)]
  slope = sum(np.sum(np.float64(a) * b) for a, b in zip(vjp(d_XE), way))
  far, near = (np.sum(d_XE * slow_logits(
      *(np.float64(a) + h * b for a, b in zip(args, way)), kind))
               for h in (1e-5, -1e-5))
  np.testing.assert_allclose(slope, (far - near) / 2e-5, rtol=1e-3)


def test_of_unit_prototypes_both_kinds_are_one_function():
  x_XD, w_DR, prototype_ER, temperature = inputs()
  prototype_ER = np.asarray(prototypes.unit(prototype_ER))
  both = [prototypes.logits(x_XD, w_DR, prototype_ER, temperature, kind)
          for kind in KINDS]
  np.testing.assert_allclose(*both, atol=1e-4)
  # Lengths count in one of them, but all at once they move no score off.
  one_ER = prototype_ER * np.where(np.arange(E) == 3, 2, 1)[:, None]
  one, all_ = (np.asarray(prototypes.logits(x_XD, w_DR, p, 0., "distance"))
               for p in (one_ER, 5 * prototype_ER))
  assert one[:, 3].mean() < both[0][:, 3].mean() - 1.
  assert abs(all_.mean()) < .3 * all_.std()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_many_experts_stay_where_the_bins_are(kind):
  prototype_ER = prototypes.dispersed(jax.random.key(0), (896, 64))
  x_XD, w_DR = 100 * normal(0, 200, 128), normal(1, 128, 64)
  logits_XE = np.asarray(prototypes.logits(x_XD, w_DR, prototype_ER, 0., kind))
  assert .8 < logits_XE.std() < 1.2 and abs(logits_XE.mean()) < .1
  s_XE = 1 / (1 + np.exp(-logits_XE))
  width = 2 / balance.BINS
  assert np.ptp(np.percentile(s_XE, [5, 95])) > 200 * width
  softmax_XE = np.asarray(jax.nn.softmax(logits_XE))
  assert np.percentile(softmax_XE, 95) < 3 * width  # what the sigmoid is for


def test_temperature_has_bounds_that_can_be_left_again():
  x_XD, w_DR, prototype_ER, _ = inputs()
  most = np.sqrt(R) * prototypes.TEMPERATURE_RANGE
  for raw in (-50., 3., 50.):
    logits_XE = prototypes.logits(x_XD, w_DR, prototype_ER, raw, "cosine")
    assert np.abs(logits_XE).max() <= most
  slope = jax.grad(lambda t: prototypes.logits(
      x_XD, w_DR, prototype_ER, t, "cosine")[0, 0])(3.)
  assert slope != 0


@pytest.mark.parametrize("experts_, width", [(6, 8), (8, 8), (40, 16)])
def test_prototypes_start_far_apart(experts_, width):
  p_ER = np.asarray(prototypes.dispersed(jax.random.key(1),
                                         (experts_, width)))
  angle_EE = p_ER @ p_ER.T
  np.testing.assert_allclose(np.diag(angle_EE), 1., atol=1e-5)
  off = np.abs(angle_EE - np.eye(experts_))
  for first in range(0, experts_, width):
    assert off[first:first + width, first:first + width].max() < 1e-5
  assert off.max() < .95
  other = prototypes.dispersed(jax.random.key(2), (experts_, width))
  assert np.abs(other - p_ER).max() > .1


@pytest.mark.parametrize("kind", ["hid", "euclid"])
def test_refusals_name_the_field(kind):
  with pytest.raises(ValueError, match=f"router_similarity='{kind}'"):
    prototypes.similarity(normal(0, 2, R), normal(1, E, R), kind)
  module = experts.LatentExperts(4, 2, 8, router=kind)
  with pytest.raises(ValueError, match=f"router='{kind}'"):
    jax.eval_shape(module.init, jax.random.key(0), normal(0, 1, 3, 8),
                   np.ones((1, 3), bool))


def test_soft_assignment_is_the_posterior_of_equal_gaussians():
  x_XD, w_DR, prototype_ER, temperature = inputs()
  logits_XE = prototypes.logits(x_XD, w_DR, prototype_ER, temperature,
                                "distance")
  choice_XA, _ = router.choose(jax.nn.sigmoid(logits_XE), jnp.zeros(E), 3)
  weight_XA = router.soft_assignment(logits_XE, choice_XA, 2.5)
  z_XR = x_XD @ w_DR
  z_XR /= np.linalg.norm(z_XR, axis=1, keepdims=True)
  square_XE = np.sum((z_XR[:, None] - prototype_ER[None]) ** 2, axis=2)
  density_XE = np.exp(-np.sqrt(R) / 2 * 4 ** np.tanh(temperature) * square_XE)
  chosen_XA = np.take_along_axis(density_XE, np.asarray(choice_XA), 1)
  np.testing.assert_allclose(
      weight_XA, 2.5 * chosen_XA / chosen_XA.sum(1, keepdims=True), rtol=1e-3)


def layer(**fields):
  return experts.LatentExperts(
      experts=4, experts_per_token=2, hidden=8, router="prototype",
      routing_width=R, **fields)


def test_the_layer_learns_all_parts_of_its_router_and_its_drift_shows():
  module, x_BTD = layer(), normal(0, 2, 9, D)
  valid_BT = np.ones((2, 9), bool)
  variables = jax.jit(module.init)(jax.random.key(0), x_BTD, valid_BT)
  params, state = variables["params"], variables["router"]
  np.testing.assert_array_equal(state["start_ER"], params["prototype_ER"])
  assert prototypes.drift({"a": params}, {"a": state}) == pytest.approx(
      0., abs=1e-5)
  d = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(
      {"params": p, "router": state}, x_BTD, valid_BT) * x_BTD)))(params)
  for leaf in ("w_router_DR", "prototype_ER", "temperature"):
    assert np.any(d[leaf])
  turned = params | {"prototype_ER": -params["prototype_ER"].at[:2].set(
      -params["prototype_ER"][:2])}
  assert prototypes.drift({"a": turned}, {"a": state}) == pytest.approx(
      1., abs=1e-4)
  assert prototypes.drift({"a": params}, {"a": {"threshold_E": 0.}}) is None
