"""Injection and sharing in whole models, against a loop written out.

That no split, padding or other document changes anything with both on is in
hybrid_test; that images do not either, and all pairs of switches, elsewhere.
"""
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from pallas_kernels import kda
from ultralong_jax.layers import short_conv
from ultralong_jax.models import depth_plan, hybrid

DOCUMENTS_BT = jnp.asarray([[1] * 5 + [2] * 8, [1] * 10 + [0] * 3], jnp.int32)
TOKENS_BT = jnp.arange(26).reshape(2, 13) * 7 % 24


def build(**changes):
  c = dict(common.model())
  c.update(vocab=24, width=8, heads=2, key_width=4, value_width=4,
           latent_heads=2, latent_key_width=4, latent_shared_width=2,
           latent_value_width=4, latent_rank=6, dense_hidden=8, experts=4,
           expert_hidden=4, expert_latent=4)
  c.update(changes)
  return hybrid.Hybrid(**c)


def settled(model):
  """Variables, of which those that start at zero or one count too."""
  variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32),
      variables)


def layer_params(model, params):
  """Each layer's own parameters, in order."""
  out = []
  for path, index in depth_plan.layer_paths(model.plan()):
    own = params["stack"]
    for name in path:
      own = own[name]
    out.append(jax.tree.map(lambda x, index=index: x[index], own))
  return out


def normed(x, scale, epsilon=1e-5):
  return scale * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def mixed(p, sources):
  """A softmax over depth; without a query, the embedding or the one sum."""
  if p is None:
    return sources[0]
  score = [normed(v, p["scale_D"]) @ p["query_D"] for v in sources]
  weight = jnp.exp(jnp.stack(score) - jnp.max(jnp.stack(score), 0))
  return jnp.einsum("MBT,MBTD->BTD", weight / weight.sum(0),
                    jnp.stack(sources))


def latent_attention(p, x, first, first_x):
  """With keys and values made of what the layer `first` saw."""
  latent = normed(first_x @ first["w_down_DR"], first["latent_scale_R"], 1e-6)
  k = jnp.tensordot(latent, p["w_k_up_RHK"], 1)
  shared = (first_x @ first["w_shared_DU"])[:, :, None]
  shared = jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))
  k = jnp.concatenate([k, shared], -1)
  q = jnp.tensordot(x, p["w_q_DHK"], 1) / np.sqrt(k.shape[-1])
  seen = DOCUMENTS_BT[:, :, None] == DOCUMENTS_BT[:, None]
  seen &= np.tril(np.ones(seen.shape[1:], bool))[None]
  logits = jnp.where(seen[:, None], jnp.einsum("BTHK,BSHK->BHTS", q, k), -99.)
  o = jnp.einsum("BHTS,BSHV->BTHV", jax.nn.softmax(logits),
                 jnp.tensordot(latent, p["w_v_up_RHV"], 1))
  o *= jax.nn.sigmoid(jnp.tensordot(x, p["w_gate_DHV"], 1))
  return jnp.tensordot(o, p["w_out_HVD"], 2)


def delta_attention(p, x, first, first_x):
  """With the decay and the write strength that the layer `first` has."""
  def conv(name, axis):
    y = jnp.tensordot(x, p[f"w_{name}_DH{axis}"], 1)
    return jax.nn.silu(short_conv.short_conv(
        y, p[f"conv_{name}_IH{axis}"], DOCUMENTS_BT, jnp.zeros(2, bool),
        None)[0])

  z = jnp.tensordot(first_x @ first["w_decay_down_DR"],
                    first["w_decay_up_RHK"], 1)
  o, _ = kda.kda(conv("q", "K"), conv("k", "K"), conv("v", "V"), z,
                 first_x @ first["w_beta_DH"], a_log=first["a_log_H"],
                 dt_bias=first["dt_bias_HK"], floor=-5., normalize_qk=True,
                 sigmoid_beta=True, segment_ids=DOCUMENTS_BT,
                 implementation="reference")
  o = normed(o, p["scale_V"])
  o *= jax.nn.sigmoid(jnp.tensordot(x, p["w_gate_DHV"], 1))
  return jnp.tensordot(o, p["w_out_HVD"], 2)


def situ(p, x):
  gate, up = x @ p["w_gate_DF"], x @ p["w_up_DF"]
  f = 4 * jnp.tanh(gate / 4) * jax.nn.sigmoid(gate) * 25 * jnp.tanh(up / 25)
  return f @ p["w_down_FD"]


def by_hand(model, params, mixed=mixed):
  """The features of a model of dense delta and latent layers."""
  with jax.numpy_rank_promotion("allow"):
    return _by_hand(model, params, mixed)


def _by_hand(m, params, mixed):
  kinds = (m.pattern * m.layers)[:m.layers]
  mixes = m.depth == "block_attention"
  sources = [params["w_embed_WD"][TOKENS_BT]]
  outputs, first = {}, {}
  for i, p in enumerate(layer_params(m, params)):
    if i % m.block_layers == 0:
      first = {}
      sources += [None] * mixes  # a block's sum, which its first layer starts

    def read(name, p=p):
      return mixed(p.get(name), [v for v in sources if v is not None])

    def add(y):
      sources[-1] = y if sources[-1] is None else sources[-1] + y

    x = normed(read("attention_mix"), p["attention_norm"]["scale_D"])
    for s in range(0, i, m.injection_stride or m.layers):
      if m.injection_stride and i - s <= m.injection_span:
        w_DD = outputs[s][0]["injection"]["w_inject_DD"]
        x += normed(outputs[s][1], 1) @ w_DD
    leader = p["attention"], x
    if {"m": "latent", "d": "gates"}[kinds[i]] in m.share:
      leader = first.setdefault(kinds[i], leader)
    attention = latent_attention if kinds[i] == "m" else delta_attention
    outputs[i] = p, attention(p["attention"], x, *leader)
    add(outputs[i][1])
    x = normed(read("feed_forward_mix"), p["feed_forward_norm"]["scale_D"])
    add(situ(p["dense"], x))
  out = mixed(params["stack"].get("output_mix"), sources)
  return normed(out, params["final_norm"]["scale_D"])


@pytest.mark.parametrize("changes", [
    # Two equal blocks of two leaders and their followers.
    pytest.param(dict(
        layers=8, pattern="dm", block_layers=4, injection_stride=4,
        injection_span=3, share="latent+gates", remat="layer"),
                 marks=pytest.mark.slow),
    # Inside each, followers that repeat.
    dict(layers=6, pattern="m", block_layers=3, injection_stride=3,
         injection_span=2, share="latent"),
    # Nothing repeats, and what is injected crosses blocks.
    dict(layers=3, pattern="d", block_layers=2, injection_stride=2,
         injection_span=2, share="gates"),
    # Equal blocks without a mix over depth.
    pytest.param(
        dict(layers=6, pattern="m", block_layers=2, depth="residual",
             injection_stride=2, injection_span=1, share="latent"),
        marks=pytest.mark.slow),
    # One block, in which source and reader repeat.
    dict(layers=4, pattern="m", depth="residual", injection_stride=2,
         injection_span=1),
], ids=["blocks", "followers", "crossing", "residual", "group"])
def test_equals_a_loop_over_layers(changes):
  model = build(dense_layers=changes["layers"], **changes)
  params = settled(model)["params"]

  def with_gradient(features):
    def loss(params):
      x_BTD = jnp.where(DOCUMENTS_BT[..., None] > 0, features(params), 0)
      return jnp.sum(jnp.sin(2 * x_BTD)), x_BTD
    (_, x_BTD), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return x_BTD, grads

  x_BTD, grads = with_gradient(lambda params: model.apply(
      {"params": params}, TOKENS_BT, DOCUMENTS_BT, method="features")[0])
  want_BTD, wanted = with_gradient(lambda params: by_hand(model, params))
  np.testing.assert_allclose(x_BTD, want_BTD, atol=1e-4)
  del wanted["w_unembed_DW"], grads["w_unembed_DW"]
  for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted),
                        strict=True):
    assert np.abs(other).max() > 0
    np.testing.assert_allclose(one, other, atol=1e-3 * np.abs(other).max())


class Unrolled(hybrid.Hybrid):
  """The same model, every block and every layer by itself."""

  def plan(self):
    blocks, at = [], 0
    for _, block, repeats in super().plan():
      for _ in range(repeats):
        layers = [x for _, group, count in block for x in group * count]
        blocks.append((f"block_{len(blocks)}", tuple(
            (f"layer_{at + i}", (x._replace(name="layer_0"),), 1)
            for i, x in enumerate(layers)), 1))
        at += len(layers)
    return tuple(blocks)


def move(tree, old, new):
  """A stack's variables or states from one model's plan to another's."""
  tree = dict(tree)
  moved = {name: x for name, x in tree.items() if not name.startswith("block")}
  paths = (depth_plan.layer_paths(model.plan()) for model in (old, new))
  for (path, index), (to, _) in zip(*paths):
    own = tree
    for name in path:
      # Only the variables of scanned blocks have a level called "block".
      own = own[name] if name in own or name != "block" else own
    moved.setdefault(to[0], {})[to[1]] = jax.tree.map(lambda x: x[index], own)
  return moved


@pytest.mark.slow  # a loop without a state, and hybrid_test, are near it
def test_scans_change_nothing_with_a_state():
  """Of fused layers too, each of which leads with latents and with gates."""
  changes = dict(layers=8, pattern="f", block_layers=4, dense_layers=8,
                 injection_stride=4, injection_span=3, share="latent+gates")
  model = build(**changes)
  apart = Unrolled(**{name: getattr(model, name)
                      for name in model.__dataclass_fields__
                      if name not in ("parent", "name")})
  (_, (_, (*_, followers)), blocks), = model.plan()
  assert followers == 3 and blocks == 2
  variables = settled(model)
  params = variables["params"]
  stacks = {"params": {**params, "stack": move(params["stack"], model, apart)}}

  def run(model, variables):
    @jax.jit
    def call(tokens_BT, documents_BT, state):
      return model.apply(variables, tokens_BT, documents_BT, None, state)
    state = hybrid.empty_state(model, 2, 13)
    first_BTW, state = call(TOKENS_BT[:, :7], DOCUMENTS_BT[:, :7], state)
    then_BTW, state = call(TOKENS_BT[:, 7:], DOCUMENTS_BT[:, 7:], state)
    logits_BTW = jnp.concatenate([first_BTW, then_BTW], 1)
    return jnp.where(DOCUMENTS_BT[..., None] > 0, logits_BTW, 0), state

  logits_BTW, state = run(model, variables)
  want_BTW, wanted = run(apart, stacks)
  np.testing.assert_allclose(logits_BTW, want_BTW, atol=1e-4)
  chex.assert_trees_all_close(move(state.layers, model, apart), wanted.layers,
                              atol=1e-4)


def test_training_starts_as_the_model_without_injection():
  plain = build(layers=4, pattern="dm", dense_layers=4, block_layers=2)
  model = plain.clone(injection_stride=2, injection_span=1)

  def run(model):
    def loss(params):
      state = hybrid.empty_state(model, 2, 13)
      logits_BTW, state = model.apply(
          {**variables, "params": params}, TOKENS_BT, DOCUMENTS_BT, None,
          state)
      real_BTW = jnp.where(DOCUMENTS_BT[..., None] > 0, logits_BTW, 0)
      return jnp.sum(jnp.sin(real_BTW)), (logits_BTW, state)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS_BT)
    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        variables["params"])
    return variables["params"], grads, out

  params, grads, out = run(model)
  plain_params, plain_grads, wanted = run(plain)
  def injection(tree):
    return tree["stack"]["blocks_0"]["block"]["layer_0"].pop("injection")

  assert not injection(params)["w_inject_DD"].any()
  dw_LDD = injection(grads)["w_inject_DD"]
  assert len(dw_LDD) == 2 and np.abs(dw_LDD).max((1, 2)).min() > 0
  chex.assert_trees_all_equal(params, plain_params)
  chex.assert_trees_all_close((out, grads), (wanted, plain_grads), rtol=1e-5,
                              atol=1e-6)


def test_zero_queries_give_the_mean_of_the_sources():
  model = build(layers=6, pattern="dm", dense_layers=6, block_layers=2)
  variables = jax.jit(model.init)(jax.random.key(0), TOKENS_BT)
  x_BTD, _ = jax.jit(lambda v: model.apply(
      v, TOKENS_BT, DOCUMENTS_BT, method="features"))(variables)
  want_BTD = jax.jit(lambda params: by_hand(
      model, params, lambda _, sources: sum(sources) / len(sources)))(
          variables["params"])
  real_BT1 = DOCUMENTS_BT[..., None] > 0
  np.testing.assert_allclose(jnp.where(real_BT1, x_BTD, 0),
                             jnp.where(real_BT1, want_BTD, 0), atol=1e-5)


@pytest.mark.parametrize("share, factor", [("latent", 1 / 3), ("gates", 1)])
def test_a_token_costs_one_latent_a_block(share, factor):
  """Of 6 latent layers, 2 hold latents: 6 + 2 numbers, and a document."""
  model = build(layers=8, pattern="mmmd", block_layers=4, share=share)
  assert hybrid.bytes_per_token(model) == 6 * factor * 4 * (6 + 2 + 1)
