"""Switches of the layer of experts: what counts, what only training does."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax import tree
from ultralong_jax.layers import balance, experts, glu, router

E, A, D = 6, 2, 16
X_BTD = np.random.default_rng(0).normal(size=(2, 20, D)).astype(np.float32)
VALID_BT = np.ones((2, 20), bool)


def layer(**fields):
  return experts.LatentExperts(
      experts=E, experts_per_token=A, hidden=8, latent=8, routing_width=8,
      **fields)


@functools.cache
def variables(**fields):
  module = layer(**fields)
  made = jax.jit(module.init)(jax.random.key(1), X_BTD, VALID_BT)
  params = tree.map_named(
      lambda name, x: 8 * x if "w_" in name else x, made["params"])
  if "prototype_ER" in params:  # of different lengths
    params["prototype_ER"] *= np.linspace(.7, 1.5, E)[:, None]
  return params, made["router"]


def run(module, key=None, **fields):
  """Output and statistics, with the variables of a layer of `fields`."""
  params, state = variables(**fields)
  y_BTD, written = module.apply(
      {"params": params, "router": state}, X_BTD, VALID_BT,
      mutable=["statistics"], rngs={} if key is None else {"noise": key})
  return np.asarray(y_BTD), written["statistics"]


@pytest.mark.parametrize("name", balance.FORMS)
def test_a_form_gets_from_the_layer_what_it_needs_and_no_more(name):
  _, statistics = run(layer(balance=name), balance=name)
  counted = balance.COUNTS.get(name)
  assert set(statistics) == {"load_E", *([counted] if counted else [])}
  _, state = variables(balance=name)
  plain = {"threshold_E": state["threshold_E"]}
  assert jax.tree.all(jax.tree.map(
      np.array_equal, state, balance.remembering({"a": plain}, name)["a"]))
  new = balance.update({"a": state}, {"a": statistics}, A, name)["a"]
  moved = np.any(new["threshold_E"] != state["threshold_E"])
  assert moved == (name not in ("aux_loss", "none"))


@pytest.mark.parametrize("kind", ["hidden", "prototype"])
def test_noise_chooses_in_training_and_never_weighs(kind):
  calm, _ = run(layer(router=kind), router=kind)
  key = jax.random.key(2)
  evaluated, _ = run(layer(router=kind, noise=3.), router=kind)
  np.testing.assert_array_equal(evaluated, calm)
  # A little noise: the few near ties flip, and all the others are the same
  # to the bit, so no weight has seen it.
  noisy, _ = run(layer(router=kind, noise=.02, training=True), key,
                 router=kind)
  same_BT = (noisy == calm).all(axis=-1)
  assert .8 < same_BT.mean()
  wild, _ = run(layer(router=kind, noise=3., training=True), key, router=kind)
  assert (wild != calm).any(axis=-1).mean() > .5
  with pytest.raises(flax.errors.InvalidRngError):
    run(layer(router=kind, noise=3., training=True), router=kind)


def test_noise_reaches_choice_and_cutoff_alike():
  """Balancing counts the margins that the choice was made by."""
  module = layer(noise=1., training=True)
  _, statistics = run(module, jax.random.key(3))
  histogram_EZ = np.asarray(statistics["histogram_EZ"])
  # Thresholds are 0, so the middle is margin 0: the tokens below it are those
  # that chose the expert. What is the cutoff itself lies on that edge.
  middle, load_E = balance.BINS // 2, np.asarray(statistics["load_E"])
  below_EZ = np.cumsum(histogram_EZ, axis=1)
  assert (below_EZ[:, middle - 2] <= load_E).all()
  assert below_EZ[:, middle - 2].sum() > .95 * load_E.sum()
  assert below_EZ[:, middle].sum() < 1.05 * load_E.sum() + len(X_BTD[0]) * 2
  _, calm = run(layer(training=True))
  assert np.any(calm["load_E"] != statistics["load_E"])


def test_activations_of_each_expert_are_counted():
  module = layer(activations=True, input_norm=True, shared=0)
  params, state = variables(shared=0)
  _, statistics = run(module, shared=0)
  x_XD = X_BTD.reshape(-1, D)
  choice_XA, _ = router.choose(
      router.scores(x_XD, params["w_router_DE"]), jnp.zeros(E), A)
  z_XR = glu.normalize_input(x_XD @ params["w_compress_DR"], 1e-5)
  wanted_E = np.zeros(E)
  for x, chosen in enumerate(np.asarray(choice_XA)):
    for e in chosen:
      f = glu.situ(z_XR[x] @ params["w_gate_ERF"][e],
                   z_XR[x] @ params["w_up_ERF"][e])
      wanted_E[e] += np.mean(np.square(f))
  np.testing.assert_allclose(statistics["square_sum_E"], wanted_E, rtol=1e-3)


def test_input_norm_makes_routed_units_blind_to_the_latents_scale():
  params, state = variables(shared=0)
  larger = params | {"w_compress_DR": 9. * params["w_compress_DR"]}
  normed, plain = (layer(shared=0, input_norm=n) for n in (True, False))
  for module, equal in ((normed, True), (plain, False)):
    before, after = (module.apply({"params": p, "router": state}, X_BTD,
                                  VALID_BT) for p in (params, larger))
    assert np.allclose(before, after, rtol=1e-2, atol=1e-2) == equal


@pytest.mark.parametrize("similarity", ["cosine", "distance"])
def test_prototypes_with_groups_equal_the_equations(similarity):
  fields = dict(router="prototype", groups=3, groups_per_token=2, shared=0,
                similarity=similarity, scale=1.7)
  module = layer(**fields)
  params, state = variables(**fields)
  y_BTD, _ = run(module, **fields)
  p = jax.tree.map(np.float64, params)
  for x, y in zip(np.float64(X_BTD).reshape(-1, D), y_BTD.reshape(-1, D)):
    z = (x / np.sqrt(np.mean(x * x) + 1e-5) * p["router_norm"]["scale_D"]
         ) @ p["w_router_DR"]
    z /= np.linalg.norm(z)
    centres = p["prototype_ER"]
    sim = (centres @ z / np.linalg.norm(centres, axis=1)
           if similarity == "cosine"
           else (1 + np.mean(np.sum(centres ** 2, axis=1))
                 - np.sum((centres - z) ** 2, axis=1)) / 2)
    logit = np.sqrt(8) * 4 ** np.tanh(p["temperature"]) * sim
    s = 1 / (1 + np.exp(-logit))
    open_ = np.argsort(-s.reshape(3, 2).sum(1))[:2]
    inside = np.concatenate([2 * open_, 2 * open_ + 1])
    chosen = inside[np.argsort(-s[inside])][:A]
    weight = np.exp(logit[chosen] - logit[chosen].max())
    latent = x @ p["w_compress_DR"]
    u = sum(1.7 * w * np.float64(glu.situ(
        np.float32(latent @ p["w_gate_ERF"][e]),
        np.float32(latent @ p["w_up_ERF"][e]))) @ p["w_down_EFR"][e]
        for w, e in zip(weight / weight.sum(), chosen))
    u = u / np.sqrt(np.mean(u * u) + 1e-5) * p["latent_norm"]["scale_D"]
    np.testing.assert_allclose(y, u @ p["w_expand_RD"], rtol=1e-3, atol=2e-3)
