"""Experts: all forms agree, tokens do not meet, nothing is dropped."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import balance, experts

E, D, F, A = 6, 16, 12, 2
GROUPED = [name for name in experts.IMPLEMENTATIONS if name != "dense"]
IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.skipif(
        name == "tokamax" and not importlib.util.find_spec("tokamax"),
        reason="tokamax is not installed")) for name in GROUPED]


def weights(rng):
  gate, up, down = jax.random.split(rng, 3)
  return (jax.random.normal(gate, (E, D, F)) / 4,
          jax.random.normal(up, (E, D, F)) / 4,
          jax.random.normal(down, (E, F, D)) / 4)


def choices(kind, tokens, rng):
  """Experts of each token, different within a token."""
  if kind == "random":
    return jax.vmap(lambda r: jax.random.permutation(r, E)[:A])(
        jax.random.split(rng, tokens)).astype(jnp.int32)
  if kind == "all to one":
    return jnp.tile(jnp.array([[4, 1]], jnp.int32), (tokens, 1))
  assert kind == "some empty"
  return jnp.tile(jnp.array([[5, 0], [0, 3]], jnp.int32), (tokens, 1))[:tokens]


@functools.partial(jax.jit, static_argnums=0)
def run(implementation, choice_XA, d_XD, *inputs):
  y_XD, vjp = jax.vjp(
      lambda x_XD, weight_XA, *w: experts.mix(
          x_XD, *w, choice_XA, weight_XA, "situ", implementation), *inputs)
  return y_XD, *vjp(d_XD)


def value_and_gradients(implementation, dtype, kind, tokens):
  """Output and every gradient of `mix`, for fixed random inputs.

  Inputs are rounded to bfloat16, so that both dtypes see the same numbers.
  """
  keys = jax.random.split(jax.random.key(1), 5)
  choice_XA = choices(kind, tokens, keys[0])
  x_XD, d_XD = jax.random.normal(keys[1], (2, tokens, D))
  weight_XA = jax.random.uniform(keys[2], choice_XA.shape)
  x_XD, *w = (a.astype(jnp.bfloat16).astype(dtype)
              for a in (x_XD, *weights(keys[3])))
  return run(implementation, choice_XA, d_XD, x_XD, weight_XA, *w)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind, tokens", [
    ("random", 77), ("all to one", 77), ("some empty", 77), ("random", 1)])
def test_equals_every_token_through_every_expert(implementation, kind, tokens):
  expected = value_and_gradients("dense", jnp.float32, kind, tokens)
  for got, want in zip(
      value_and_gradients(implementation, jnp.float32, kind, tokens),
      expected, strict=True):
    assert got.dtype == want.dtype and np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition_in_bfloat16(implementation):
  expected = value_and_gradients("dense", jnp.float32, "random", 77)
  for got, want in zip(
      value_and_gradients(implementation, jnp.bfloat16, "random", 77),
      expected, strict=True):
    error = np.asarray(got.astype(jnp.float32) - want)
    assert np.sqrt(np.mean(error ** 2) / np.mean(want ** 2)) < .02


@pytest.mark.parametrize("block", [8, 32])
def test_block_size_changes_nothing(block):
  choice_XA = choices("random", 45, jax.random.key(2))
  layout = experts.arrange(choice_XA, E, block)
  assert layout.pair_I.shape[0] % block == 0
  assert (layout.size_E % block == 0).all()
  # Every pair has one row, in the rows of its expert.
  rows = np.asarray(layout.row_XA).reshape(-1)
  np.testing.assert_array_equal(layout.pair_I[rows], np.arange(90))
  assert (layout.pair_I != 90).sum() == 90
  expert = np.searchsorted(np.cumsum(layout.size_E), rows, side="right")
  np.testing.assert_array_equal(expert, np.asarray(choice_XA).reshape(-1))
  x_XD = jax.random.normal(jax.random.key(3), (45, D))
  w_EDF = weights(jax.random.key(4))[0]
  y_IF = experts.grouped_matmul(experts.dispatch(x_XD, layout), w_EDF,
                                layout.size_E, "blocks", block)
  np.testing.assert_allclose(
      y_IF[layout.row_XA], jnp.einsum("XD,XADF->XAF", x_XD, w_EDF[choice_XA]),
      rtol=1e-4, atol=1e-5)


def test_the_layout_fits_the_worst_spread():
  # Every expert one row over a whole block: the most padding there can be.
  for block in (8, 16):
    counts = np.array([block + 1] * E)
    choice_XA = jnp.asarray(np.repeat(np.arange(E), counts))[:, None]
    layout = experts.arrange(choice_XA, E, block)
    assert layout.size_E.sum() <= layout.pair_I.shape[0]
    assert (layout.row_XA < layout.pair_I.shape[0]).all()


def layer(latent=8, **kwargs):
  return experts.LatentExperts(experts=E, experts_per_token=A, hidden=F,
                               latent=latent, **kwargs)


def init(module, x_BTD, valid_BT):
  """Variables with thresholds that matter and weights that are not tiny."""
  variables = jax.jit(module.init)(jax.random.key(5), x_BTD, valid_BT)
  params = jax.tree.map(lambda w: 10 * w if w.ndim > 1 else w,
                        variables["params"])
  threshold_E = jnp.linspace(-.1, .1, E)
  return {"params": params, "router": {"threshold_E": threshold_E}}


def some_tokens(batch=2, tokens=13):
  x_BTD = jax.random.normal(jax.random.key(6), (batch, tokens, D))
  return x_BTD, jnp.ones((batch, tokens), bool)


@pytest.mark.parametrize("latent", [0, 8])
def test_layer_equals_the_equations_token_by_token(latent):
  x_BTD, valid_BT = some_tokens()
  module = layer(latent, scale=1.7)
  variables = init(module, x_BTD, valid_BT)
  y_BTD = jax.jit(module.apply)(variables, x_BTD, valid_BT)
  p = jax.tree.map(np.float64, variables["params"])

  def unit(x, gate, up, down):
    g, u = x @ gate, x @ up
    return (4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
            ) @ down

  for x, y in zip(np.float64(x_BTD).reshape(-1, D), y_BTD.reshape(-1, D)):
    s = 1 / (1 + np.exp(-x @ p["w_router_DE"]))
    chosen = np.argsort(-(s + np.linspace(-.1, .1, E)))[:A]
    z = x @ p["w_compress_DR"] if latent else x
    u = sum(1.7 * s[e] / s[chosen].sum() * unit(
        z, p["w_gate_ERF"][e], p["w_up_ERF"][e], p["w_down_EFR"][e])
        for e in chosen)
    if latent:
      u = u / np.sqrt(np.mean(u * u) + 1e-5) @ p["w_expand_RD"]
    shared = unit(x, *(p["shared"][n]
                       for n in ("w_gate_DF", "w_up_DF", "w_down_FD")))
    np.testing.assert_allclose(y, shared + u, rtol=1e-3, atol=1e-4)


def test_padding_is_zero_counts_nothing_and_changes_nothing():
  x_BTD, valid_BT = some_tokens()
  valid_BT = valid_BT.at[1, 5:].set(False)
  module = layer()
  variables = init(module, x_BTD, valid_BT)

  @jax.jit
  def run(x_BTD):
    y_BTD, written = module.apply(variables, x_BTD, valid_BT,
                                  mutable=["statistics"])
    return y_BTD, written["statistics"]

  y_BTD, statistics = run(x_BTD)
  assert (y_BTD[1, 5:] == 0).all() and (y_BTD[1, 4] != 0).all()
  assert statistics["load_E"].sum() == A * 18
  assert (statistics["histogram_EZ"].sum(1) == 18).all()
  other, same = run(x_BTD.at[1, 5:].set(7.))
  np.testing.assert_array_equal(other, y_BTD)
  jax.tree.map(np.testing.assert_array_equal, same, statistics)
  d_BTD = jax.jit(jax.grad(lambda x: jnp.sum(run(x)[0])))(x_BTD)
  assert not d_BTD[1, 5:].any() and d_BTD[1, :5].any()


def test_tokens_do_not_see_each_other():
  x_BTD, valid_BT = some_tokens()
  module = layer()
  variables = init(module, x_BTD, valid_BT)
  apply = jax.jit(lambda x: module.apply(variables, x, valid_BT))
  changed = apply(x_BTD.at[0, 3].set(-x_BTD[0, 3])) != apply(x_BTD)
  assert changed[0, 3].all()
  assert not changed.at[0, 3].set(False).any()
  d_BTD = jax.jit(jax.grad(lambda x: jnp.sum(apply(x)[0, 3] ** 2)))(x_BTD)
  assert d_BTD[0, 3].any() and not d_BTD.at[0, 3].set(0.).any()
  # Nor the rest of the batch: a row alone comes out as in company.
  alone = jax.jit(module.apply)(variables, x_BTD[1:], valid_BT[1:])
  np.testing.assert_allclose(alone[0], apply(x_BTD)[1], rtol=1e-5, atol=1e-6)


def test_renaming_the_experts_changes_nothing():
  x_BTD, valid_BT = some_tokens()
  module = layer()
  variables = init(module, x_BTD, valid_BT)
  order = jnp.array([3, 0, 5, 1, 4, 2])
  p = variables["params"]
  renamed = {
      "params": p | {"w_router_DE": p["w_router_DE"][:, order]} | {
          name: p[name][order]
          for name in ("w_gate_ERF", "w_up_ERF", "w_down_EFR")},
      "router": {"threshold_E": variables["router"]["threshold_E"][order]}}
  apply = jax.jit(functools.partial(module.apply, mutable=["statistics"]))
  (y_BTD, before), (again, after) = (
      apply(v, x_BTD, valid_BT) for v in (variables, renamed))
  np.testing.assert_allclose(again, y_BTD, rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[order]),
               after["statistics"], before["statistics"])


def test_statistics_are_frozen_unless_asked_for_and_start_at_zero():
  x_BTD, valid_BT = some_tokens()
  module = layer()
  variables = module.init(jax.random.key(7), x_BTD, valid_BT)
  assert set(variables) == {"params", "router"}
  assert not variables["router"]["threshold_E"].any()
  y_BTD = jax.jit(module.apply)(variables, x_BTD, valid_BT)
  assert y_BTD.shape == x_BTD.shape  # nothing but the output comes back
  count = jax.jit(functools.partial(module.apply, mutable=["statistics"]))
  _, written = count(variables, x_BTD, valid_BT)
  assert set(written) == {"statistics"}
  new = balance.update(variables["router"], written["statistics"], A)
  _, second = count(variables | {"router": new}, x_BTD, valid_BT)
  spread = [np.ptp(w["statistics"]["load_E"]) for w in (written, second)]
  assert spread[1] <= spread[0] and new["threshold_E"].any()


def test_the_router_learns_and_its_thresholds_do_not():
  x_BTD, valid_BT = some_tokens()
  module = layer()
  variables = init(module, x_BTD, valid_BT)
  d = jax.jit(jax.grad(
      lambda v: jnp.sum(module.apply(v, x_BTD, valid_BT) ** 2)))(variables)
  assert not d["router"]["threshold_E"].any()
  assert all(jax.tree.leaves(jax.tree.map(lambda g: g.any(), d["params"])))


def test_bfloat16_in_bfloat16_out():
  x_BTD, valid_BT = some_tokens()
  module = layer()
  variables = init(module, x_BTD, valid_BT)
  y_BTD = module.apply(variables, x_BTD.astype(jnp.bfloat16), valid_BT)
  assert y_BTD.dtype == jnp.bfloat16
  # The same rounded input, so that the same experts are chosen.
  exact = module.apply(
      variables, x_BTD.astype(jnp.bfloat16).astype(jnp.float32), valid_BT)
  error = np.asarray(y_BTD.astype(jnp.float32) - exact)
  assert np.sqrt(np.mean(error ** 2) / np.mean(exact ** 2)) < .02


def test_refusals_name_the_field():
  x_BTD, valid_BT = some_tokens()
  with pytest.raises(ValueError, match="implementation='fast'"):
    experts.resolve("fast")
  with pytest.raises(ValueError, match="experts_per_token=6"):
    experts.LatentExperts(experts=E, experts_per_token=E, hidden=F).init(
        jax.random.key(0), x_BTD, valid_BT)
  assert experts.resolve("") in experts.IMPLEMENTATIONS


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(NotImplementedError, match="tokamax is not installed"):
    experts.resolve("tokamax")
