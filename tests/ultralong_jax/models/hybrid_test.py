"""The decoder's properties: causal, walled, and the same however split."""
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax.models import depth_plan, hybrid

T = 40
# Row 0: three documents, the last going on to the end; row 1: padding.
SEGMENTS = np.asarray([[1] * 11 + [2] * 9 + [3] * 20,
                       [1] * 23 + [2] * 10 + [0] * 7], np.int32)
CLOSE = 2e-5
# Parameters that differ by a unit in their last place move the last layer's
# state by 6e-5, but no logit that far.
CLOSE_STATE = 1e-4


def sizes(**changes):
  c = dict(common.model())
  c.update(vocab=40, width=16, layers=4, pattern="dm", heads=2, key_width=8,
           value_width=4, latent_heads=2, latent_key_width=4,
           latent_shared_width=4, latent_value_width=4, latent_rank=8,
           dense_hidden=16, experts=4, expert_hidden=8, expert_latent=8,
           block_layers=1, dtype="float32")
  c.update(changes)
  return c


def settled(model, tokens):
  """Variables in which also what starts at zero or one counts."""
  # Not `init`, which takes longer to compile than the model.
  rng = np.random.default_rng(7)
  return jax.tree.map(
      lambda x: 0.3 * rng.normal(size=x.shape).astype(x.dtype),
      jax.eval_shape(model.init, jax.random.key(1), tokens))


# What is particular to the residual one, fused layers and no depth mix, has
# tests of its own and is in the covering array of switches_test.
@pytest.fixture(scope="module", params=[
    "unrolled", "scanned", "shared",
    pytest.param("residual", marks=pytest.mark.slow)])
def setup(request):
  changes = dict(
      unrolled=dict(layers=2, query_rank=6),
      scanned=dict(layers=7, pattern="m", block_layers=2, remat="layer",
                   position="rope", rope_base=100., rope_scaling="yarn",
                   rope_factor=4., rope_context=64),
      residual=dict(layers=5, pattern="dffff", depth="residual",
                    expert_latent=0, latent_gate="latent"),
      # Two latent and two delta layers in the first block.
      shared=dict(layers=5, dense_layers=4, block_layers=4,
                  share="latent+gates", injection_stride=2, injection_span=2),
  )[request.param]
  model = hybrid.Hybrid(**sizes(**changes))
  tokens = np.random.default_rng(0).integers(0, 40, (2, T), np.int32)
  variables = settled(model, tokens)
  # Compiling is all the time that these tests take: few shapes, few programs.
  cached = jax.jit(model.apply)
  alone = jax.jit(functools.partial(model.apply, mutable=["statistics"]))
  return (model, variables, tokens,
          lambda *args: cached(variables, *args[:2], None, *args[2:]),
          lambda *args: alone(variables, *args))


def real(x, segments=SEGMENTS):
  return np.where(segments[..., None] > 0, np.asarray(x), 0)


# Borders of parts inside documents, between them (20), and after a row ended
# (35); parts that begin inside a document and hold two borders (10 to 30).
@pytest.mark.parametrize("sizes", [(20, 20), 10 * (1,) + (20,) + 10 * (1,),
                                   40 * (1,)], ids=["halves", "mixed", "ones"])
def test_any_split_gives_the_same_logits_and_state(setup, sizes):
  model, _, tokens, cached, alone = setup
  empty = hybrid.empty_state(model, 2, T)
  whole, end = cached(tokens, SEGMENTS, empty)
  (logits, _), _ = alone(tokens, SEGMENTS)
  np.testing.assert_allclose(real(whole), real(logits), atol=CLOSE)
  state, parts = empty, []
  for stop, size in zip(np.cumsum(sizes), sizes):
    part = np.s_[:, stop - size:stop]
    logits, state = cached(tokens[part], SEGMENTS[part], state)
    parts.append(logits)
  np.testing.assert_allclose(real(np.concatenate(parts, 1)), real(whole),
                             atol=CLOSE)
  chex.assert_trees_all_close(state, end, atol=CLOSE_STATE)
  np.testing.assert_array_equal(state.length_B, [40, 33])
  np.testing.assert_array_equal(state.position_B, [19, 9])


def test_other_documents_and_the_future_have_no_gradient(setup):
  model, variables, tokens, *_ = setup
  x_BTD = variables["params"]["w_embed_WD"][tokens]

  def loss(x_BTD, weight_BT, variables):
    hidden, _ = model.apply(variables, x_BTD, SEGMENTS, method="decode")
    return jnp.sum(hidden**2 * weight_BT[..., None])

  grad = jax.jit(jax.grad(loss))
  for row, first, last in ((0, 11, 15), (1, 23, 32)):
    weight = np.zeros((2, T), np.float32)
    weight[row, last] = 1
    dx = np.array(grad(x_BTD, weight, variables))
    assert np.abs(dx[row, first:last + 1]).min(axis=-1).max() > 0
    dx[row, first:last + 1] = 0
    assert not dx.any()


def test_padding_and_other_rows_change_nothing(setup):
  _, _, tokens, _, alone = setup
  (logits, _), out = alone(tokens, SEGMENTS)
  padded, other = tokens.copy(), tokens.copy()
  padded[1, 33:] = other[1, 33:] = 5
  other[0] = 3
  (changed, _), _ = alone(other, SEGMENTS)
  np.testing.assert_allclose(logits[1, :33], changed[1, :33], atol=1e-6)
  _, padded = alone(padded, SEGMENTS)
  chex.assert_trees_all_equal(out["statistics"], padded["statistics"])


def test_padding_row_returns_its_state(setup):
  model, _, tokens, cached, _ = setup
  _, state = cached(tokens, SEGMENTS, hybrid.empty_state(model, 2, T))
  _, after = cached(tokens[:, :20], np.zeros((2, 20), np.int32), state)
  chex.assert_trees_all_equal(state, after)


def test_outgrown_state_shows(setup):
  model, _, tokens, cached, _ = setup
  state = hybrid.empty_state(model, 2, T)
  for part in (np.s_[:, :20], np.s_[:, :1], np.s_[:, 20:]):
    logits, state = cached(tokens[part], SEGMENTS[part], state)
  assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
  np.testing.assert_array_equal(state.length_B, [41, 34])


def test_ids_past_the_vocabulary_show(setup):
  _, _, tokens, _, alone = setup
  tokens = tokens.copy()
  tokens[0, 3] = 40
  (logits, _), _ = alone(tokens, SEGMENTS)
  assert np.isnan(logits[0, 3]).all() and np.isfinite(logits[1]).all()


def test_statistics_and_router_are_untouched_in_evaluation(setup):
  model, variables, tokens, *_ = setup
  _, written = jax.eval_shape(
      functools.partial(model.apply, mutable=["other"]), variables, tokens,
      SEGMENTS)
  assert not written
  assert set(variables) == {"params", "router"}


def test_only_what_has_one_source_has_no_query():
  """That zero queries average the sources is in cross_layer_test."""
  model = hybrid.Hybrid(**sizes(layers=2))
  tokens = jnp.zeros((1, 8), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  stack = params["stack"]
  # The first attention reads the embedding alone.
  assert "attention_mix" not in stack["block_0"]["layer_0"]
  assert "attention_mix" in stack["block_1"]["layer_1"]
  assert "output_mix" in stack


@pytest.mark.slow
# A mix over depth has a term for each source: six more blocks, a few lines.
@pytest.mark.parametrize("pattern, depth, growth", [
    ("dddm", "residual", 1.02), ("dddm", "block_attention", 1.2),
    ("f", "residual", 1.02)])
def test_depth_costs_no_program(pattern, depth, growth):
  def lines(layers):
    model = hybrid.Hybrid(**sizes(layers=layers, pattern=pattern, depth=depth,
                                  block_layers=4, remat="layer"))
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, router, tokens):
      logits, _ = model.apply(dict(params=params, router=router), tokens)
      return jnp.sum(logits)

    lowered = jax.jit(jax.grad(loss)).lower(variables["params"],
                                            variables["router"], tokens)
    return lowered.as_text().count("\n")

  assert lines(40) < growth * lines(16)


@pytest.mark.slow
def test_depth_mix_costs_little_memory_beside_plain_residuals():
  def peak(depth):
    model = hybrid.Hybrid(**sizes(layers=16, pattern="m", depth=depth,
                                  width=64, block_layers=2, remat="layer",
                                  experts_per_token=1, dense_layers=0))
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, router, tokens):
      hidden, _ = model.apply(dict(params=params, router=router), tokens,
                              method="features")
      return jnp.sum(hidden)

    grad = jax.jit(jax.grad(loss)).lower(variables["params"],
                                         variables["router"], tokens)
    return grad.compile().memory_analysis().temp_size_in_bytes

  one = 2048 * 64 * 4  # bytes of B T D
  # Nine sums and their cotangents, and what one mix of them computes with.
  assert peak("block_attention") < peak("residual") + (2 * 9 + 8) * one


def test_plan_names_every_layer_once():
  plan = depth_plan.plan("dddm", 93, 1, 12)
  paths = depth_plan.layer_paths(plan)
  assert len(paths) == 93 and len(set(paths)) == 93
  assert [name for name, *_ in plan] == ["block_0", "blocks_1", "block_7"]
  traced = sum(len(group) for _, block, _ in plan for _, group, _ in block)
  assert traced <= 20


@pytest.mark.parametrize("layers, block", [(1, 1), (4, 2), (7, 3), (24, 8)])
def test_plan_covers_the_pattern(layers, block):
  plan = depth_plan.plan("ddm", layers, 1, block)
  kinds = "".join(layer.kind for layer in depth_plan.all_layers(plan))
  assert kinds == ("ddm" * layers)[:layers]
