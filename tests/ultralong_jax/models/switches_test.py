"""Switches of released models: what each changes, and that off changes nothing.

That a split and a cache give the same with all of them on is shown in
tests/ultralong_jax/interop, on a released model.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax import optim, tree
from ultralong_jax.models import depth_plan, hybrid


def build(**changes):
  c = dict(common.model())
  c.update(vocab=24, width=16, layers=1, pattern="d", heads=2, key_width=8,
           value_width=4, latent_heads=2, dense_layers=1, dense_hidden=16,
           depth="residual")
  c.update(changes)
  return hybrid.Hybrid(**c)


TOKENS_BT = jnp.arange(10, dtype=jnp.int32)[None]


def shapes(model):
  variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
  return {name: x.shape for name, x in tree.named_leaves(
      variables["params"]).items()}


def test_a_config_from_before_the_switches_is_the_same_model():
  old = dict(common.model())
  for name in ("gate_rank", "routed_renormalize", "expert_groups",
               "expert_groups_per_token", "tied_embedding", "fusion",
               "position", "rope_base", "rope_scaling", "rope_factor",
               "rope_context", "mtp", "router", "routing_width",
               "router_similarity", "router_noise", "capacity_factor",
               "balance", "expert_activations", "glu_input_norm"):
    del old[name]
  assert hybrid.Hybrid(**old) == hybrid.Hybrid(**common.model())


def test_tied_embedding_reads_and_writes_one_matrix():
  tied, free = build(tied_embedding=True), build()
  assert set(shapes(free)) - set(shapes(tied)) == {"w_unembed_DW"}
  params = jax.jit(free.init)(jax.random.key(0), TOKENS_BT)["params"]
  params["w_unembed_DW"] = params["w_embed_WD"].T
  logits_BTW, _ = free.apply({"params": params}, TOKENS_BT)
  np.testing.assert_array_equal(hybrid.unembedding(params),
                                params.pop("w_unembed_DW"))
  np.testing.assert_array_equal(hybrid.unembedding(params),
                                params["w_embed_WD"].T)
  tied_BTW, _ = tied.apply({"params": params}, TOKENS_BT)
  np.testing.assert_allclose(tied_BTW, logits_BTW, atol=1e-6)


def test_full_gate_of_low_rank_equals_the_low_rank_gate():
  low, full = build(gate_rank=3), build()
  params = jax.jit(low.init)(jax.random.key(0), TOKENS_BT)["params"]
  wanted_BTW, _ = low.apply({"params": params}, TOKENS_BT)
  attention = params["stack"]["block_0"]["layer_0"]["attention"]
  attention["w_gate_DHV"] = jnp.einsum(
      "DR,RHV->DHV", attention.pop("w_gate_down_DR"),
      attention.pop("w_gate_up_RHV"))
  got_BTW, _ = full.apply({"params": params}, TOKENS_BT)
  np.testing.assert_allclose(got_BTW, wanted_BTW, atol=1e-6)


def test_positions_have_no_parameters():
  """A stage of longer context goes on with the ones that are there."""
  latent = dict(pattern="m", latent_shared_width=4, latent_rank=6)
  short = build(**latent, position="rope")
  wanted = shapes(build(**latent))
  for model in (short, short.clone(rope_base=1e6),
                short.clone(rope_scaling="yarn", rope_factor=32.)):
    assert shapes(model) == wanted


def test_new_parameters_have_an_optimizer():
  model = build(gate_rank=3, router="prototype", dense_layers=0)
  params = {name: jnp.zeros(shape) for name, shape in shapes(model).items()}
  optim.make(common.get_config().optim, params, 100).init(params)
  # No centre is drawn to the origin.
  for name, group in tree.map_named(lambda n, _: optim.group(n),
                                    params).items():
    if name.endswith(("prototype_ER", "temperature")):
      assert group.optimizer == "adamw" and not group.decay


@pytest.mark.parametrize("pattern, traced", [("dddm" * 6 + "ddm", 9),
                                             ("dddm", 8)])
def test_an_irregular_end_still_scans(pattern, traced):
  plan = depth_plan.plan(pattern, 27, 1, 27)
  (_, block, _), = plan
  assert sum(len(group) for _, group, _ in block) <= traced
  assert len(set(depth_plan.layer_paths(plan))) == 27
  kinds = "".join(layer.kind for layer in depth_plan.all_layers(plan))
  assert kinds == (pattern * 27)[:27]
