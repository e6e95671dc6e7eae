"""Switches: what those of released models change, and that all go together.

That a split and a cache give the same with all of the former on is shown in
tests/ultralong_jax/interop, on a released model.
"""
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax import optim, tree
from ultralong_jax.data import images
from ultralong_jax.models import depth_plan, hybrid, vision
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib


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
               "balance", "expert_activations", "glu_input_norm",
               "injection_stride", "injection_span", "share"):
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


# Each line is a switch with its forms: what they change in a model's fields.
# A new one is one more line; `ROWS` then grows by itself.
SWITCHES = {
    "pattern": [{"pattern": x} for x in ("dm", "mf", "fd")],
    "depth": [{"depth": x} for x in ("block_attention", "residual")],
    "block_layers": [{"block_layers": x} for x in (2, 4)],
    "injection": [{}, {"injection_stride": 1, "injection_span": 1},
                  {"injection_stride": 3, "injection_span": 2}],
    "share": [{"share": x} for x in ("none", "latent", "gates",
                                     "latent+gates")],
    "fusion": [{"fusion": x} for x in ("token", "head", "layer")],
    "latent_gate": [{"latent_gate": x} for x in ("output", "latent", "none")],
    "position": [{}, {"position": "rope"},
                 {"position": "rope", "rope_scaling": "linear",
                  "rope_factor": 2.},
                 {"position": "rope", "rope_scaling": "yarn",
                  "rope_factor": 4., "rope_context": 16}],
    "query_rank": [{"query_rank": x} for x in (0, 5)],
    "gate_rank": [{"gate_rank": x} for x in (0, 3)],
    "floor": [{"floor": x} for x in (-5., None)],
    "glu": [{"glu": x} for x in ("situ", "swiglu")],
    "dense_layers": [{"dense_layers": x} for x in (1, 0, 4)],
    "expert_latent": [{"expert_latent": x} for x in (0, 8)],
    "shared_experts": [{"shared_experts": x} for x in (1, 0)],
    "routed": [{}, {"routed_renormalize": False, "routed_scale": 2.}],
    "expert_groups": [{}, {"expert_groups": 2, "expert_groups_per_token": 1}],
    "tied_embedding": [{"tied_embedding": x} for x in (False, True)],
    "mtp": [{"mtp": x} for x in (False, True)],
    "remat": [{"remat": x} for x in ("none", "layer")],
    "dtype": [{"dtype": x} for x in ("float32", "bfloat16")],
    "router": [{}, {"router": "prototype", "routing_width": 4},
               {"router": "prototype", "routing_width": 4,
                "router_similarity": "distance"}],
    "router_noise": [{"router_noise": x} for x in (0., 0.1)],
    "capacity_factor": [{"capacity_factor": x} for x in (0., 1.)],
    "balance": [{"balance": x} for x in (
        "quantile", "load_quantile", "sign_bias", "aux_loss", "none")],
    "glu_input_norm": [{"glu_input_norm": x} for x in (False, True)],
    "expert_activations": [{"expert_activations": x} for x in (False, True)],
    "vision": [{"vision": x} for x in ("none", "tower", "direct")],
}


def pairs_of(row):
  """All pairs of (switch, number of its form) that a row has."""
  return set(itertools.combinations(sorted(row.items()), 2))


def covering_rows(switches, tries=10):
  """Rows of one form for each switch, in which every pair of forms meets.

  Greedy: of `tries` rows, each begun with a pair that is missing and completed
  switch by switch by what covers most, the one with most new pairs is taken.
  """
  rng = random.Random(0)
  missing = set()
  for one, other in itertools.combinations(sorted(switches), 2):
    missing |= set(itertools.product(
        [(one, n) for n in range(len(switches[one]))],
        [(other, n) for n in range(len(switches[other]))]))
  rows = []
  while missing:
    best = {}
    for _ in range(tries):
      row = dict(rng.choice(sorted(missing)))
      rest = [name for name in switches if name not in row]
      for name in rng.sample(rest, len(rest)):
        forms = range(len(switches[name]))
        row[name] = max(
            rng.sample(forms, len(forms)),
            key=lambda n: len(missing & {tuple(sorted((item, (name, n))))
                                         for item in row.items()}))
      if len(missing & pairs_of(row)) > len(missing & pairs_of(best)):
        best = row
    missing -= pairs_of(best)
    rows.append(best)
  return rows


ROWS = covering_rows(SWITCHES)


def test_every_pair_of_forms_meets():
  for one, other in itertools.combinations(SWITCHES, 2):
    met = {(row[one], row[other]) for row in ROWS}
    assert len(met) == len(SWITCHES[one]) * len(SWITCHES[other])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_switches_go_together(number):
  """A minute each on one slow core."""
  fields = dict(width=8, layers=4, heads=2, key_width=4, value_width=4,
                latent_key_width=4, latent_shared_width=4,
                latent_value_width=4, latent_rank=6, dense_hidden=8,
                experts=4, experts_per_token=1, expert_hidden=4,
                vision_patch=2, vision_grid=3, vision_layers=1,
                vision_width=4, vision_heads=1, vision_key_width=4,
                vision_hidden=4)
  for name, n in ROWS[number].items():
    fields.update(SWITCHES[name][n])
  model = build(**fields)
  batch = _batch(model)
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
      lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype),
      jax.eval_shape(model.init, jax.random.key(0), batch["tokens"]))
  _takes_a_step(model, variables, batch)
  looked = vision.see(model, variables, batch)

  @jax.jit
  def run(tokens_BT, documents_BT, states, looked, ahead):
    """Hidden states of all that predicts, and the state of each."""
    def outputs(model):
      hidden_BTD, own = model.features(tokens_BT, documents_BT, None,
                                       states[0], **looked)
      if not model.mtp:
        return (hidden_BTD,), (own, None)
      ahead_BTD, draft = model.draft(hidden_BTD, (tokens_BT * 5 + 1) % 24,
                                     documents_BT, None, states[1], **ahead)
      return (hidden_BTD, ahead_BTD), (own, draft)
    return model.apply(variables, method=outputs)

  def run_part(part, states):
    return run(batch["tokens"][:, part], batch["segment_ids"][:, part], states,
               *({name: (media_BND, index_BT[:, part])
                  for name, (media_BND, index_BT) in x.items()}
                 for x in (looked, vision.ahead(looked))))

  def real(x_BTD):
    return jnp.where(batch["segment_ids"][..., None] > 0, x_BTD, 0)

  whole, _ = run_part(slice(0, 10), (None, None))
  assert all(x.dtype == model.dtype for x in whole)
  states = (hybrid.empty_state(model, 2, 10),
            hybrid.empty_draft_state(model, 2, 10) if model.mtp else None)
  parts = []
  for part in (slice(0, 5), slice(5, 10)):
    hidden, states = run_part(part, states)
    parts.append(hidden)
  for one, *halves in zip(whole, *parts):
    split = real(jnp.concatenate(halves, 1))
    assert jnp.isfinite(split).all()
    if model.dtype == "float32":  # rounding to bfloat16 moves tokens to others
      np.testing.assert_allclose(split, real(one), atol=2e-4)


def _batch(model):
  """Two rows, with images for a model that sees: one of them is split."""
  documents_BT = jnp.asarray([[1] * 3 + [2] * 7, [1] * 8 + [0] * 2])
  tokens_BT = jnp.arange(20).reshape(2, 10) * 7 % 24
  batch = {"tokens": tokens_BT, "targets": (tokens_BT * 5 + 1) % 24,
           "segment_ids": documents_BT, "positions": None,
           "weights": (documents_BT > 0).astype(jnp.float32)}
  if model.vision == "none":
    return batch
  form = images.Form(patch=2, merge=2, channels=1, pixels=64,
                     decoded_pixels=64, patches=12)
  rng = np.random.default_rng(0)
  one, two = (rng.integers(0, 256, (4, 4 * n, 1), np.uint8) for n in (1, 2))
  index_BT = jnp.asarray([[-1, 0, -1, -1, 1, 2] + [-1] * 4,
                          [-1] * 4 + [0, 1] + [-1] * 4])
  return {**batch, "media_index": index_BT,
          **images.pack([[one, two], [two]], form)}


def _takes_a_step(model, variables, batch):
  """Gradients reach every parameter's optimizer, and they are finite."""
  c = common.get_config()
  c.optim.warmup_steps = 0
  optimizer = optim.make(c.optim, variables["params"], 10)
  state = state_lib.create(variables, optimizer, jax.random.PRNGKey(0))
  step = jax.jit(step_lib.make_train_step(
      model, optimizer, 1, c.balance, mtp_weight=0.3 * model.mtp))
  after, metrics = step(state, batch)
  assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0
  for name, leaf in tree.named_leaves(after.params).items():
    assert jnp.isfinite(leaf).all(), name
  for name, leaf in tree.named_leaves(after.router).items():
    assert jnp.isfinite(leaf).all(), name
