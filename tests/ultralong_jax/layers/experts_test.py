"""Experts: all forms agree, tokens do not meet, nothing is dropped."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from ultralong_jax.layers import balance, dispatch, experts

E, D, F, A = 6, 16, 12, 2
GROUPED = [name for name in experts.IMPLEMENTATIONS if name != "dense"]
IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.skipif(
        name == "tokamax" and not importlib.util.find_spec("tokamax"),
        reason="tokamax is not installed")) for name in GROUPED]


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def choices(kind, tokens):
  """Experts of each token, different within a token."""
  if kind == "random":
    return np.argsort(normal(0, tokens, E))[:, :A].astype(np.int32)
  if kind == "all to one":
    return np.tile(np.int32([[4, 1]]), (tokens, 1))
  assert kind == "some empty"
  return np.tile(np.int32([[5, 0], [0, 3]]), (tokens, 1))[:tokens]


@functools.partial(jax.jit, static_argnums=0)
def run(implementation, choice_XA, d_XD, *inputs):
  y_XD, vjp = jax.vjp(
      lambda x_XD, weight_XA, *w: experts.mix(
          x_XD, *w, choice_XA, weight_XA, "situ", implementation)[0], *inputs)
  return y_XD, *vjp(d_XD)


def value_and_gradients(implementation, dtype, kind, tokens):
  """Output and every gradient of `mix`, for fixed random inputs.

  Inputs are rounded to bfloat16, so that both dtypes see the same numbers.
  """
  choice_XA = choices(kind, tokens)
  weight_XA = np.abs(normal(1, tokens, A))
  inputs = (normal(2, tokens, D), normal(3, E, D, F) / 4,
            normal(4, E, D, F) / 4, normal(5, E, F, D) / 4)
  x_XD, *w = (a.astype(jnp.bfloat16).astype(dtype) for a in inputs)
  results = run(implementation, choice_XA, normal(6, tokens, D), x_XD,
                weight_XA, *w)
  assert results[1].dtype == results[3].dtype == dtype
  return [np.asarray(a).astype(np.float32) for a in results]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind, tokens", [
    ("random", 77), ("all to one", 77), ("some empty", 77), ("random", 1)])
def test_equals_every_token_through_every_expert(implementation, kind, tokens):
  expected = value_and_gradients("dense", jnp.float32, kind, tokens)
  for got, want in zip(
      value_and_gradients(implementation, jnp.float32, kind, tokens),
      expected, strict=True):
    assert np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition_in_bfloat16(implementation):
  expected = value_and_gradients("dense", jnp.float32, "random", 77)
  for got, want in zip(
      value_and_gradients(implementation, jnp.bfloat16, "random", 77),
      expected, strict=True):
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want ** 2)) < .02


@pytest.mark.parametrize("block", [8, 32])
def test_every_pair_has_one_row_among_those_of_its_expert(block):
  choice_XA = choices("random", 45)
  layout = jax.jit(dispatch.arrange, static_argnums=(1, 2))(choice_XA, E, block)
  pair_I, row_XA, size_E = map(np.asarray, layout)
  assert (size_E % block == 0).all() and len(pair_I) % block == 0
  np.testing.assert_array_equal(pair_I[row_XA.reshape(-1)], np.arange(90))
  assert (pair_I != 90).sum() == 90
  expert_XA = np.searchsorted(np.cumsum(size_E), row_XA, side="right")
  np.testing.assert_array_equal(expert_XA, choice_XA)


@pytest.mark.parametrize("block", [8, 32])
def test_block_size_changes_nothing(block):
  choice_XA = choices("random", 45)
  x_XD, w_EDF = normal(1, 45, D), normal(2, E, D, F)

  @jax.jit
  def multiply(x_XD, w_EDF, choice_XA):
    layout = dispatch.arrange(choice_XA, E, block)
    y_IF = experts.grouped_matmul(dispatch.to_experts(x_XD, layout), w_EDF,
                                  layout.size_E, "blocks", block)
    return y_IF[layout.row_XA]

  np.testing.assert_allclose(
      multiply(x_XD, w_EDF, choice_XA),
      np.einsum("XD,XADF->XAF", x_XD, w_EDF[choice_XA]), rtol=1e-4, atol=1e-5)


def test_the_layout_fits_the_worst_spread():
  # Every expert one row over a whole block: the most padding there can be.
  choice_XA = np.repeat(np.arange(E), 8 + 1)[:, None]
  layout = dispatch.arrange(choice_XA, E, 8)
  assert layout.size_E.sum() <= layout.pair_I.shape[0]
  assert np.asarray(layout.row_XA).max() < layout.pair_I.shape[0]


def layer(latent=8, **kwargs):
  return experts.LatentExperts(experts=E, experts_per_token=A, hidden=F,
                               latent=latent, **kwargs)


X_BTD = normal(7, 2, 13, D)
VALID_BT = np.ones((2, 13), bool)


def variables_of(module):
  """Weights that are not tiny and thresholds that matter."""
  shapes = jax.eval_shape(module.init, jax.random.key(0), X_BTD, VALID_BT)
  leaves, structure = jax.tree.flatten(shapes["params"])
  params = structure.unflatten(
      [(a.ndim == 1) + normal(10 + seed, *a.shape) / 5
       for seed, a in enumerate(leaves)])
  threshold_E = np.linspace(-.1, .1, E, dtype=np.float32)
  return {"params": params, "router": {"threshold_E": threshold_E}}


@functools.partial(jax.jit, static_argnums=0)
def apply(module, variables, x_BTD, valid_BT):
  y_BTD, written = module.apply(variables, x_BTD, valid_BT,
                                mutable=["statistics"])
  return y_BTD, written["statistics"]


@functools.partial(jax.jit, static_argnums=0)
def gradient(module, variables, x_BTD, valid_BT, d_BTD):
  """Of sum(y * d), with respect to variables and tokens."""
  return jax.grad(lambda v, x: jnp.sum(
      module.apply(v, x, valid_BT) * d_BTD), (0, 1))(variables, x_BTD)


@pytest.mark.parametrize("latent", [0, 8])
def test_layer_equals_the_equations_token_by_token(latent):
  module = layer(latent, scale=1.7)
  variables = variables_of(module)
  y_BTD, _ = apply(module, variables, X_BTD, VALID_BT)
  p = jax.tree.map(np.float64, variables["params"])

  def unit(x, gate, up, down):
    g, u = x @ gate, x @ up
    return (4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
            ) @ down

  for x, y in zip(np.float64(X_BTD).reshape(-1, D),
                  np.asarray(y_BTD).reshape(-1, D)):
    s = 1 / (1 + np.exp(-x @ p["w_router_DE"]))
    chosen = np.argsort(-(s + np.linspace(-.1, .1, E)))[:A]
    z = x @ p["w_compress_DR"] if latent else x
    u = sum(1.7 * s[e] / s[chosen].sum() * unit(
        z, p["w_gate_ERF"][e], p["w_up_ERF"][e], p["w_down_EFR"][e])
        for e in chosen)
    if latent:
      u = u / np.sqrt(np.mean(u * u) + 1e-5) * p["latent_norm"]["scale_D"]
      u = u @ p["w_expand_RD"]
    shared = unit(x, *(p["shared"][n]
                       for n in ("w_gate_DF", "w_up_DF", "w_down_FD")))
    np.testing.assert_allclose(y, shared + u, rtol=1e-3, atol=1e-3)


def test_padding_is_zero_counts_nothing_and_changes_nothing():
  valid_BT = VALID_BT.copy()
  valid_BT[1, 5:] = False
  module = layer()
  variables = variables_of(module)
  y_BTD, statistics = jax.tree.map(np.asarray, apply(module, variables, X_BTD,
                                                     valid_BT))
  assert (y_BTD[1, 5:] == 0).all() and (y_BTD[1, 4] != 0).all()
  assert statistics["load_E"].sum() == A * 18
  assert (statistics["histogram_EZ"].sum(1) == 18).all()
  changed = X_BTD.copy()
  changed[1, 5:] = 7.
  jax.tree.map(np.testing.assert_array_equal,
               apply(module, variables, changed, valid_BT),
               (y_BTD, statistics))
  _, d_BTD = gradient(module, variables, X_BTD, valid_BT, X_BTD)
  d_BTD = np.asarray(d_BTD)
  assert not d_BTD[1, 5:].any() and d_BTD[1, :5].all()


def test_tokens_do_not_see_each_other():
  module = layer()
  variables = variables_of(module)
  changed = X_BTD.copy()
  changed[0, 3] *= -1
  before, after = (np.asarray(apply(module, variables, x, VALID_BT)[0])
                   for x in (X_BTD, changed))
  differs = before != after
  assert differs[0, 3].all() and differs.sum() == D
  d_BTD = np.zeros_like(X_BTD)
  d_BTD[0, 3] = X_BTD[0, 3]
  _, d_BTD = gradient(module, variables, X_BTD, VALID_BT, d_BTD)
  assert np.count_nonzero(d_BTD) == np.count_nonzero(d_BTD[0, 3]) == D
  # Nor does a row see the rest of the batch.
  alone, _ = apply(module, variables, X_BTD[1:], VALID_BT[1:])
  np.testing.assert_allclose(alone[0], before[1], rtol=1e-5, atol=1e-4)


def test_renaming_the_experts_changes_nothing():
  module = layer()
  variables = variables_of(module)
  order = np.array([3, 0, 5, 1, 4, 2])
  p = variables["params"]
  renamed = {
      "params": p | {"w_router_DE": p["w_router_DE"][:, order]} | {
          name: p[name][order]
          for name in ("w_gate_ERF", "w_up_ERF", "w_down_EFR")},
      "router": {"threshold_E": variables["router"]["threshold_E"][order]}}
  (y_BTD, before), (again, after) = (
      apply(module, v, X_BTD, VALID_BT) for v in (variables, renamed))
  np.testing.assert_allclose(again, y_BTD, rtol=1e-4, atol=1e-3)
  np.testing.assert_array_equal(after["load_E"],
                                np.asarray(before["load_E"])[order])
  moved = np.cumsum(after["histogram_EZ"], 1) - np.cumsum(
      before["histogram_EZ"], 1)[order]
  assert np.abs(moved).max() <= 1  # a margin on the edge of two bins


def test_statistics_are_frozen_unless_asked_for_and_start_at_zero():
  module = layer()
  variables = jax.jit(module.init)(jax.random.key(7), X_BTD, VALID_BT)
  assert set(variables) == {"params", "router"}
  assert not np.any(variables["router"]["threshold_E"])
  y_BTD = jax.eval_shape(module.apply, variables, X_BTD, VALID_BT)
  assert y_BTD.shape == X_BTD.shape  # nothing but the output comes back
  _, statistics = apply(module, variables, X_BTD, VALID_BT)
  new = balance.update(variables["router"], statistics, A)
  _, second = apply(module, variables | {"router": new}, X_BTD, VALID_BT)
  assert np.ptp(second["load_E"]) < np.ptp(statistics["load_E"])


class Stack(nn.Module):
  """Two layers of experts under scan and remat, as a model stacks them."""

  @nn.compact
  def __call__(self, x_BTD):
    def body(module, x_BTD, _):
      return x_BTD + module(x_BTD, VALID_BT), None

    scan = nn.scan(nn.remat(body), length=2, variable_axes={
        "params": 0, "router": 0, "statistics": 0}, split_rngs={
            "params": True})
    return scan(layer(name="experts"), x_BTD, None)[0]


def test_recomputed_layers_count_once():
  module = Stack()
  shapes = jax.eval_shape(module.init, jax.random.key(0), X_BTD)
  variables = jax.tree.map(lambda a: normal(9, *a.shape) / 5, shapes)

  @jax.jit
  def backward(params):
    def loss(params):
      y_BTD, written = module.apply(variables | {"params": params}, X_BTD,
                                    mutable=["statistics"])
      return jnp.sum(y_BTD ** 2), written["statistics"]
    return jax.grad(loss, has_aux=True)(params)

  d, statistics = backward(variables["params"])
  assert all(np.any(leaf) for leaf in jax.tree.leaves(d))
  load_LE = np.asarray(statistics["experts"]["load_E"])
  assert load_LE.shape == (2, E) and (load_LE.sum(1) == A * 26).all()
  new = balance.update(variables["router"], statistics, A)
  assert new["experts"]["threshold_E"].shape == (2, E)


def test_the_router_learns_and_its_thresholds_do_not():
  module = layer()
  d, _ = gradient(module, variables_of(module), X_BTD, VALID_BT, X_BTD)
  assert not np.any(d["router"]["threshold_E"])
  assert all(np.any(leaf) for leaf in jax.tree.leaves(d["params"]))


def test_bfloat16_in_bfloat16_out():
  module = layer()
  variables = variables_of(module)
  # The same rounded input, so that the same experts are chosen.
  x_BTD = X_BTD.astype(jnp.bfloat16)
  y_BTD, _ = apply(module, variables, x_BTD, VALID_BT)
  exact, _ = apply(module, variables, x_BTD.astype(np.float32), VALID_BT)
  assert y_BTD.dtype == jnp.bfloat16
  error = np.asarray(y_BTD).astype(np.float32) - exact
  assert np.sqrt(np.mean(error ** 2) / np.mean(exact ** 2)) < .02


def test_refusals_name_the_field():
  with pytest.raises(ValueError, match="implementation='fast'"):
    experts.resolve("fast")
  module = experts.LatentExperts(experts=E, experts_per_token=E, hidden=F)
  with pytest.raises(ValueError, match="experts_per_token=6"):
    jax.eval_shape(module.init, jax.random.key(0), X_BTD, VALID_BT)
  assert experts.resolve("") in experts.IMPLEMENTATIONS


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(NotImplementedError, match="tokamax is not installed"):
    experts.resolve("tokamax")
