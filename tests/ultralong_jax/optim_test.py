"""Groups by name, Muon's blocks, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import common
from ultralong_jax import optim
from ultralong_jax import tree
from ultralong_jax.models import hybrid

# Leading axes: 2 stacked layers.
PARAMS = {
    "delta": {"w_q_DHK": (2, 12, 3, 4), "a_log_G": (2, 3),
              "dt_bias_GK": (2, 3, 4), "w_out_GVD": (2, 3, 4, 12),
              "conv_q_IHK": (2, 4, 3, 4), "norm": {"scale_D": (2, 12)}},
    "moe": {"w_up_EDF": (2, 4, 12, 6), "w_router_DE": (2, 12, 4)},
    "dense": {"w_down_FD": (6, 12)},
    "query_D": (12,), "w_embed_WD": (20, 12), "w_unembed_DW": (12, 20)}


def make_params(seed=0):
  flat, treedef = jax.tree.flatten(
      PARAMS, is_leaf=lambda x: isinstance(x, tuple))
  keys = jax.random.split(jax.random.key(seed), len(flat))
  return jax.tree.unflatten(
      treedef, [jax.random.normal(k, s) for k, s in zip(keys, flat)])


def config(**leaves):
  c = common.get_config().optim
  c.update(leaves)
  return c


def update(c, gradients, params):
  optimizer = optim.make(c, params, steps=100)
  updates, _ = jax.jit(optimizer.update)(
      gradients, optimizer.init(params), params)
  return updates


def tiny_hybrid_params(**changes):
  model = hybrid.Hybrid(**{**common.get_config().model, **changes})
  return jax.eval_shape(model.init, jax.random.key(0),
                        jnp.zeros((1, 1), jnp.int32))["params"]


@pytest.mark.parametrize("changes", [
    dict(), dict(pattern="f", latent_gate="latent", injection_stride=2),
    dict(vision="tower"), dict(vision="direct")], ids=str)
def test_every_parameter_of_the_model_has_a_group(changes):
  params = tiny_hybrid_params(**changes)
  optim.make(config(), params, steps=100)
  groups = {name: optim.group(name) for name in tree.named_leaves(params)}
  muon = {n for n, g in groups.items() if g.optimizer == "muon"}
  assert muon and all(n.rpartition("/")[2].startswith("w_") for n in muon)
  assert not any(part in n for n in muon
                 for part in ("router", "embed", "fusion", "position"))
  # What is not a matrix is not decayed.
  assert all(g.decay == n.rpartition("/")[2].startswith("w_")
             for n, g in groups.items())
  # Muon takes most of the parameters, or the names went astray.
  shapes = tree.named_leaves(params)
  assert sum(shapes[n].size for n in muon) > 0.8 * tree.count(params)


def test_unknown_name_says_what_to_do():
  params = {"decoder": {"kernel": jnp.zeros((2, 2))}}
  for name in ("muon", "adamw"):
    with pytest.raises(ValueError, match=r"'decoder/kernel'.*w_<what>_<AXES>"):
      optim.make(config(name=name), params, steps=100)


def orthogonalised(gradients, muon="per_head"):
  """Updates of Muon alone: first step, nothing clipped or decayed."""
  params = jax.tree.map(jnp.zeros_like, gradients)
  c = config(weight_decay=0., clip_norm=1e9, warmup_steps=0, lr=1., muon=muon)
  return update(c, gradients, params)


@pytest.fixture(scope="module")
def muon_updates():
  return orthogonalised(make_params())


def test_layers_experts_and_heads_are_orthogonal_alone(muon_updates):
  updates = tree.named_leaves(muon_updates)
  # As matrices [..., in, out]; all axes before the last two are a batch.
  blocks = {
      "delta/w_q_DHK": updates["delta/w_q_DHK"].transpose(0, 2, 1, 3),
      "delta/w_out_GVD": updates["delta/w_out_GVD"].reshape(2, 12, 12),
      "moe/w_up_EDF": updates["moe/w_up_EDF"],
      "dense/w_down_FD": updates["dense/w_down_FD"]}
  for name, x in blocks.items():
    assert jnp.sqrt(jnp.mean(x**2)) == pytest.approx(0.2, rel=0.1)
    values = np.linalg.svd(x, compute_uv=False)
    values = values / (0.2 * max(x.shape[-2:])**0.5)
    # Square Gaussian matrices have one value near 0, slow to come up.
    if x.shape[-1] != x.shape[-2]:
      assert abs(values - 1).max() < 0.2, (name, values)


def test_a_head_and_a_layer_do_not_see_the_others(muon_updates):
  gradients = make_params()
  q_LDHK = gradients["delta"]["w_q_DHK"].at[1, :, 0].multiply(-7.)
  old = muon_updates["delta"]["w_q_DHK"]
  new = orthogonalised({"w_q_DHK": q_LDHK})["w_q_DHK"]
  np.testing.assert_allclose(new[:, :, 1:], old[:, :, 1:], atol=1e-5)
  np.testing.assert_allclose(new[0], old[0], atol=1e-5)
  np.testing.assert_allclose(new[1, :, 0], -old[1, :, 0], rtol=1e-3, atol=1e-4)
  alone = orthogonalised({"w_q_DHK": gradients["delta"]["w_q_DHK"][0]})
  np.testing.assert_allclose(alone["w_q_DHK"], old[0], rtol=1e-3, atol=1e-4)


def test_all_heads_can_be_one_matrix_and_then_see_each_other():
  q_DHK = jax.random.normal(jax.random.key(0), (24, 3, 4))
  other_DHK = q_DHK.at[:, 0].multiply(-7.)
  for muon, couples in (("full_matrix", True), ("per_head", False)):
    one, two = (orthogonalised({"w_q_DHK": x, "w_out_HVD": q_DHK.T}, muon)
                for x in (q_DHK, other_DHK))
    values = np.linalg.svd(one["w_q_DHK"].reshape(24, 12), compute_uv=False)
    values = values / (0.2 * 24**0.5)
    assert (abs(values - 1).max() < 0.2) == couples, values
    change = abs(one["w_q_DHK"] - two["w_q_DHK"])[:, 1:].max()
    assert (change > 1e-2) == couples, change
    # Out of all heads is one matrix in both forms.
    values = np.linalg.svd(one["w_out_HVD"].reshape(12, 24), compute_uv=False)
    assert abs(values / (0.2 * 24**0.5) - 1).max() < 0.2


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_only_matrices_decay(name):
  params = make_params()
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates = tree.named_leaves(update(config(name=name), zeros, params))
  for leaf, x in updates.items():
    decays = leaf.rpartition("/")[2].startswith("w_")
    assert bool(jnp.any(x != 0)) == decays, leaf


def test_adamw_is_optax_adamw():
  params, gradients = make_params(0), make_params(1)
  c = config(name="adamw", clip_norm=1e9, schedule="constant", warmup_steps=0)
  ours = update(c, gradients, params)
  mask = tree.map_named(lambda name, _: "w_" in name, params)
  theirs = optax.adamw(c.lr, c.b1, c.b2, weight_decay=c.weight_decay,
                       mask=mask)
  expected, _ = theirs.update(gradients, theirs.init(params), params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
               ours, expected)


def test_gradients_are_clipped_by_their_common_norm():
  params, gradients = make_params(0), make_params(1)
  c = config(name="adamw", schedule="constant", warmup_steps=0)
  optimizer = optim.make(c, params, 10)
  _, state = optimizer.update(gradients, optimizer.init(params), params)
  moment = optax.tree.get(state, "mu")
  np.testing.assert_allclose(tree.norm(moment), (1 - c.b1) * c.clip_norm,
                             rtol=1e-5)


def test_adam_rate_is_its_own_under_muon():
  gradients = make_params()
  params = jax.tree.map(jnp.zeros_like, gradients)
  updates = update(config(adam_lr=1e-3, lr=0.5, weight_decay=0.,
                          schedule="constant", warmup_steps=0),
                   gradients, params)
  # Adam's first step is the sign of the gradient.
  np.testing.assert_allclose(jnp.abs(updates["query_D"]), 1e-3, rtol=1e-3)


@pytest.mark.parametrize("schedule, expected", [
    ("cosine", {0: .1, 9: 1., 10: 1., 55: .55, 100: .1, 120: .1}),
    ("wsd", {0: .1, 9: 1., 79: 1., 80: 1., 90: .55, 100: .1, 120: .1}),
    ("constant", {0: .1, 9: 1., 99: 1.})])
def test_schedules(schedule, expected):
  c = config(schedule=schedule, lr=2., warmup_steps=10, decay_steps=20,
             final_fraction=0.1)
  rate = optim.schedule(c, steps=100)
  for step, fraction in expected.items():
    np.testing.assert_allclose(rate(step), 2. * fraction, rtol=1e-5)


def test_rate_is_readable_in_the_state():
  params = make_params()
  c = config(lr=1., warmup_steps=10)
  optimizer = optim.make(c, params, 100)
  state = optimizer.init(params)
  for step in range(2):
    _, state = jax.jit(optimizer.update)(params, state, params)
    np.testing.assert_allclose(optim.learning_rate(state), (step + 1) / 10,
                               rtol=1e-6)


@pytest.mark.parametrize("leaves, message", [
    ({"name": "sgd"}, "optim.name='sgd'"),
    ({"muon": "heads"}, "optim.muon='heads'"),
    ({"schedule": "step"}, "optim.schedule='step'"),
    ({"warmup_steps": 100}, "optim.warmup_steps=100"),
    ({"schedule": "wsd", "decay_steps": 0}, "optim.decay_steps=0")])
def test_refusals_name_the_leaf(leaves, message):
  with pytest.raises(ValueError, match=message):
    optim.make(config(**leaves), make_params(), 100)


def test_table_has_a_line_for_each_parameter():
  lines = optim.table(jax.eval_shape(make_params)).splitlines()
  assert len(lines) == len(tree.named_leaves(make_params()))
  assert any(line.split() == ["delta/w_q_DHK", "2x12x3x4", "muon", "6", "of",
                              "12x4", "decay"] for line in lines)
  full = optim.table(jax.eval_shape(make_params), muon="full_matrix")
  assert "muon 2 of 12x12" in next(
      line for line in full.splitlines() if "w_q_DHK" in line)
  assert any(line.split() == ["query_D", "12", "adamw", "no", "decay"]
             for line in lines)
