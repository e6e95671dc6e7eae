"""Every backend of kda against golden data, oracles and its own algebra."""
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import api, reference, triangular, xla

GOLDEN = sorted((pathlib.Path(__file__).parents[2] / "golden").glob("kda_*"))
# Kernels that need a GPU run under `-m gpu`.
BACKENDS = [name if name == "xla" else pytest.param(name, marks=pytest.mark.gpu)
            for name in api.BACKENDS]
IMPLEMENTATIONS = ["reference", *BACKENDS]
NAMES = ("q", "k", "v", "decay", "beta", "a_log", "dt_bias", "initial_state")
B, T, H, K, V = 2, 70, 2, 8, 12  # T is no whole number of chunks or tiles


def rmse(actual, wanted):
  """Relative root-mean-square error, in float64."""
  actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
  return np.sqrt(np.mean((actual - wanted)**2) / np.mean(wanted**2))


def inputs(seed=0, dtype=jnp.float32, tokens=T, groups=H):
  keys = iter(jax.random.split(jax.random.key(seed), 8))

  def normal(*shape):
    return jax.random.normal(next(keys), shape, dtype)

  return dict(
      q=normal(B, tokens, H, K), k=normal(B, tokens, H, K),
      v=normal(B, tokens, groups, V), decay=normal(B, tokens, groups, K),
      beta=normal(B, tokens, groups),
      a_log=0.3 * normal(groups).astype(jnp.float32),
      dt_bias=normal(groups, K).astype(jnp.float32),
      initial_state=normal(B, groups, K, V).astype(jnp.float32))


def run(arrays, implementation, floor=-5.0, **options):
  return kda.kda(
      arrays["q"], arrays["k"], arrays["v"], arrays["decay"], arrays["beta"],
      a_log=arrays["a_log"], dt_bias=arrays["dt_bias"], floor=floor,
      normalize_qk=True, sigmoid_beta=True,
      initial_state=arrays["initial_state"], implementation=implementation,
      **options)


def value_and_grads(arrays, do, ds, implementation, **options):
  """Outputs and the gradient of every array for the loss o.do + s.ds."""
  def loss(arrays):
    o, s = run(arrays, implementation, **options)
    return jnp.sum(o.astype(jnp.float32) * do) + jnp.sum(s * ds), (o, s)

  (_, (o, s)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
  return dict(o=o, final_state=s, **{f"d{k}": x for k, x in grads.items()})


def cotangents(arrays, seed=9):
  do = jax.random.normal(jax.random.key(seed), arrays["v"].shape)
  ds = jax.random.normal(jax.random.key(seed + 1),
                         arrays["initial_state"].shape)
  return do, ds


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-4),
                                          ("bfloat16", 2e-2)])
def test_golden(path, implementation, dtype, limit):
  floor = None if "softplus" in path.stem else -5.0
  skip_unsupported(implementation, floor, dtype)
  data = {k: jnp.asarray(x) for k, x in np.load(path).items()}
  heads, key = data["q"].shape[2:]
  arrays = dict(
      q=data["q"], k=data["k"], v=data["v"], decay=data["z"],
      beta=data["beta_logit"])
  arrays = {k: x.astype(dtype) for k, x in arrays.items()}
  arrays |= dict(a_log=data["A_log"],
                 dt_bias=data["dt_bias"].reshape(heads, key))
  arrays["initial_state"] = data.get("initial_state",
                                     jnp.zeros_like(data["final_state"]))
  out = value_and_grads(
      arrays, data["do"], data["dfinal_state"], implementation,
      floor=floor)
  wanted = dict(o=data["o"], final_state=data["final_state"])
  for name, theirs in zip(NAMES, ("q", "k", "v", "z", "beta_logit", "A_log",
                                  "dt_bias", "initial_state")):
    if f"grad_{theirs}" in data:
      wanted[f"d{name}"] = data[f"grad_{theirs}"]
  for name, x in wanted.items():
    assert rmse(out[name].reshape(x.shape), x) <= limit, name
  if implementation == "mosaic":  # has no gradient, so nothing above ran it
    o, s = run(arrays, implementation, floor=floor)
    assert rmse(o, data["o"]) <= limit
    assert rmse(s, data["final_state"]) <= limit


def dtype_of(implementation):
  """Of the inputs where one dtype is enough: Mosaic takes bfloat16 only."""
  return jnp.bfloat16 if implementation == "mosaic" else jnp.float32


def limit_of(implementation):
  return 2e-2 if implementation == "mosaic" else 1e-4


def skip_unsupported(implementation, floor=-5.0, dtype="float32"):
  if implementation == "reference":
    return
  q, v = jnp.zeros((B, T, H, K), dtype), jnp.zeros((B, T, H, V), dtype)
  reason = api.BACKENDS[implementation].unsupported(q, v, floor=floor)
  if reason is not None:
    pytest.skip(reason)


def test_golden_comparison_can_fail():
  data = np.load(GOLDEN[0])
  assert rmse(np.roll(data["o"], 1, axis=1), data["o"]) > 0.1


@pytest.mark.parametrize("oracle", ["xla", "xla_chunked"])
def test_equals_tokamax(oracle):
  tokamax_kda = pytest.importorskip("tokamax._src.ops.kda.api")
  arrays = inputs()
  segment_ids = jnp.asarray([[1] * 30 + [2] * 33 + [0] * 7, [1] * T])

  def theirs(arrays):
    def swap(x):
      return jnp.moveaxis(x, 2, 0)
    o, _ = tokamax_kda.kimi_delta_attention(
        swap(arrays["q"]), swap(arrays["k"]), swap(arrays["v"]),
        swap(arrays["decay"]), swap(jax.nn.sigmoid(arrays["beta"])),
        a_log=arrays["a_log"], delta_time_bias=arrays["dt_bias"].reshape(-1),
        use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=-5.0,
        segment_ids=segment_ids, max_num_segments=2, implementation=oracle)
    return jnp.moveaxis(o, 0, 2)

  real = (segment_ids > 0)[..., None, None]
  do = jnp.where(real, cotangents(arrays)[0], 0)
  arrays["initial_state"] = jnp.zeros_like(arrays["initial_state"])

  def loss(function):
    def f(arrays):
      o = jnp.where(real, function(arrays), 0)
      return jnp.sum(o * do), o
    with jax.numpy_rank_promotion("allow"):
      (_, o), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(arrays)
    return o, grads

  o, grads = loss(lambda x: run(x, "xla", segment_ids=segment_ids)[0])
  wanted, wanted_grads = loss(theirs)
  assert rmse(o, wanted) <= 1e-4
  for name in NAMES[:-1]:
    assert rmse(grads[name], wanted_grads[name]) <= 1e-4, name


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("floor", [-5.0, None])
def test_equals_reference_with_documents(implementation, floor):
  dtype = dtype_of(implementation)
  skip_unsupported(implementation, floor, dtype)
  arrays = inputs(dtype=dtype, groups=2 * H)  # twice the key heads
  rows = [[3] * 5 + [1] * 1 + [3] * 41 + [2] * 20 + [0] * 3, [7] * T]
  options = dict(segment_ids=jnp.asarray(rows), floor=floor)
  do, ds = cotangents(arrays)
  do = jnp.where(options["segment_ids"][..., None, None] > 0, do, 0)
  out = value_and_grads(arrays, do, ds, implementation, **options)
  wanted = value_and_grads(arrays, do, ds, "reference", **options)
  real = options["segment_ids"][..., None, None] > 0
  if implementation == "mosaic":  # see test_golden
    out["o"], out["final_state"] = run(arrays, implementation, **options)
  out["o"], wanted["o"] = (jnp.where(real, x["o"], 0) for x in (out, wanted))
  for name, x in wanted.items():
    assert rmse(out[name], x) <= limit_of(implementation), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_given_log_decay(implementation):
  dtype = dtype_of(implementation)
  skip_unsupported(implementation, dtype=dtype)
  arrays = inputs(dtype=dtype)
  g = kda.log_decay(arrays["decay"], arrays["a_log"], arrays["dt_bias"], -5.0)
  o, s = kda.kda(
      arrays["q"], arrays["k"], arrays["v"], g, jax.nn.sigmoid(arrays["beta"]),
      floor=-5.0, normalize_qk=True, initial_state=arrays["initial_state"],
      implementation=implementation)
  wanted_o, wanted_s = run(arrays, "reference")
  limit = limit_of(implementation)
  assert rmse(o, wanted_o) <= limit and rmse(s, wanted_s) <= limit


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_chunks_at_the_floor_stay_finite(implementation, dtype):
  skip_unsupported(implementation, dtype=dtype)
  arrays = inputs(tokens=128)
  arrays = {k: x.astype(dtype) if k in NAMES[:5] else x
            for k, x in arrays.items()}
  arrays["decay"] = jnp.full_like(arrays["decay"], 100.0)  # sigmoid = 1
  do, ds = cotangents(arrays)
  out = value_and_grads(arrays, do, ds, implementation)
  chex.assert_tree_all_finite(out)
  wanted = value_and_grads(arrays, do, ds, "reference")
  for name in ("o", "final_state", "dv", "dbeta"):
    limit = 1e-4 if dtype == "float32" else 2e-2
    assert rmse(out[name], wanted[name]) <= limit, name


def test_identical_keys_stay_accurate():
  """The triangular system is worst conditioned where all keys agree."""
  arrays = inputs(tokens=128)
  arrays["k"] = jnp.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
  arrays["decay"] = jnp.full_like(arrays["decay"], -20.0)  # no decay
  arrays["beta"] = jnp.full_like(arrays["beta"], 6.0)
  do, ds = cotangents(arrays)
  out = value_and_grads(arrays, do, ds, "xla")
  wanted = value_and_grads(arrays, do, ds, "reference")
  for name in ("o", "final_state", "dq", "dv", "dinitial_state"):
    assert rmse(out[name], wanted[name]) <= 5e-4, name


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 129])
def test_any_length(tokens):
  arrays = inputs(tokens=tokens)
  o, s = run(arrays, "xla")
  wanted_o, wanted_s = run(arrays, "reference")
  assert rmse(o, wanted_o) <= 1e-4 and rmse(s, wanted_s) <= 1e-4


def test_state_carries_over():
  arrays = inputs()
  step = jax.jit(lambda x: run(x, "xla"))
  whole, end = step(arrays)
  for cut in (1, 33, 64):
    parts, state = [], arrays["initial_state"]
    for piece in (slice(0, cut), slice(cut, T)):
      part = {k: x[:, piece] if k in NAMES[:5] else x
              for k, x in arrays.items()}
      o, state = step(part | dict(initial_state=state))
      parts.append(o)
    assert rmse(jnp.concatenate(parts, axis=1), whole) <= 1e-5
    assert rmse(state, end) <= 1e-5


def test_groups_of_chunks_change_nothing(monkeypatch):
  arrays = inputs(tokens=200)
  do, ds = cotangents(arrays)
  whole = value_and_grads(arrays, do, ds, "xla")
  monkeypatch.setattr(xla, "group_rows", lambda: 1)
  parts = value_and_grads(arrays, do, ds, "xla")
  for name in whole:
    assert rmse(parts[name], whole[name]) <= 1e-4, name


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunk_size_changes_nothing(monkeypatch, chunk):
  arrays = inputs(tokens=130)
  do, ds = cotangents(arrays)
  whole = value_and_grads(arrays, do, ds, "xla")
  monkeypatch.setattr(xla, "chunk_tokens", lambda key: chunk)
  other = value_and_grads(arrays, do, ds, "xla")
  for name in whole:
    assert rmse(other[name], whole[name]) <= 1e-4, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_documents_have_no_gradient(implementation):
  dtype = dtype_of(implementation)
  skip_unsupported(implementation, dtype=dtype)
  arrays = inputs(dtype=dtype)
  segment_ids = jnp.asarray([[1] * 21 + [2] * 30 + [0] * 19] * B)

  def second(arrays):
    o, s = run(arrays, implementation, segment_ids=segment_ids)
    return jnp.sum(o[:, 21:51]**2) + jnp.sum(s**2)

  grads = jax.jit(jax.grad(second))(arrays)
  for name in NAMES[:5]:
    assert not np.any(np.asarray(grads[name][:, :21])), name
    assert not np.any(np.asarray(grads[name][:, 51:])), name
    assert np.any(np.asarray(grads[name][:, 21:51])), name
  assert not np.any(np.asarray(grads["initial_state"]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_equals_a_loop(implementation):
  skip_unsupported(implementation, dtype="bfloat16")
  many = [inputs(seed, jnp.bfloat16, tokens=3) for seed in (0, 1)]

  def outputs(arrays):  # not differentiated: Mosaic's own
    return run(arrays, implementation)

  def gradients(arrays):
    def loss(arrays):
      o, s = run(arrays, implementation)
      return jnp.sum(o.astype(jnp.float32)**2) + jnp.sum(s**2)
    return jax.grad(loss)(arrays)

  @jax.jit
  def both(arrays):
    return outputs(arrays), gradients(arrays)

  mapped = jax.vmap(both)(jax.tree.map(lambda *x: jnp.stack(x), *many))
  for i, arrays in enumerate(many):
    for got, want in zip(jax.tree.leaves(mapped),
                         jax.tree.leaves(both(arrays))):
      assert rmse(got[i], want) < 1e-2


def test_future_does_not_leak():
  arrays = inputs()
  grads = jax.jit(jax.grad(
      lambda x: jnp.sum(run(x, "xla")[0][:, 40])))(arrays)
  for name in NAMES[:5]:
    assert not np.any(np.asarray(grads[name][:, 41:])), name


def test_rows_do_not_see_each_other():
  arrays = inputs()
  o, s = run(arrays, "xla")
  alone = {k: x[1:] if k in (*NAMES[:5], "initial_state") else x
           for k, x in arrays.items()}
  o_alone, s_alone = run(alone, "xla")
  chex.assert_trees_all_close((o[1:], s[1:]), (o_alone, s_alone), atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_row_returns_its_state(implementation):
  dtype = dtype_of(implementation)
  skip_unsupported(implementation, dtype=dtype)
  arrays = inputs(dtype=dtype)
  _, s = run(arrays, implementation, segment_ids=jnp.zeros((B, T), jnp.int32))
  chex.assert_trees_all_equal(s, arrays["initial_state"])


def test_memory_is_linear_in_time():
  width = 32

  def peak(tokens):
    def shape(*axes):
      return jax.ShapeDtypeStruct(axes, jnp.float32)
    arrays = dict(
        {name: shape(B, tokens, H, width) for name in NAMES[:4]},
        beta=shape(B, tokens, H), a_log=shape(H), dt_bias=shape(H, width),
        initial_state=shape(B, H, width, width))
    grad = jax.jit(jax.grad(lambda x: jnp.sum(run(x, "xla")[0])))
    return grad.lower(arrays).compile().memory_analysis().temp_size_in_bytes

  tokens = 1 << 14
  assert peak(2 * tokens) < 2.2 * peak(tokens)
  # A state a token would be a T x K x V array.
  assert peak(tokens) < B * tokens * H * width * width * 4 / 2


def test_inverse_is_an_inverse():
  mix = jnp.tril(jax.random.normal(jax.random.key(0), (3, 64, 64)), -1) / 8
  inverse = triangular.unit_lower_inverse(mix)
  eye = np.broadcast_to(np.eye(64, dtype=np.float32), mix.shape)
  np.testing.assert_allclose(np.matmul(inverse, eye + np.asarray(mix)), eye,
                             atol=1e-5)


@pytest.mark.parametrize("change, message", [
    (dict(k=jnp.zeros((B, T, H, K + 1))), "k has shape"),
    (dict(v=jnp.zeros((B, T, 3, V))), "3 heads"),
    (dict(beta=jnp.zeros((B, T, H), jnp.int32)), "beta is int32"),
    (dict(dt_bias=None), "a_log and dt_bias"),
    (dict(initial_state=jnp.zeros((B, H, V, K))), "initial_state has shape"),
])
def test_says_what_does_not_fit(change, message):
  with pytest.raises(ValueError, match=message):
    run(inputs() | change, "xla")


def test_says_why_a_floor_does_not_fit():
  with pytest.raises(ValueError, match="must fit float32"):
    run(inputs(), "xla", floor=-6.0)


def test_says_why_nothing_runs(monkeypatch):
  with pytest.raises(ValueError, match="is none of"):
    run(inputs(), "cuda")
  monkeypatch.setattr(xla, "unsupported", lambda *_, **__: "not today")
  with pytest.raises(NotImplementedError, match="not today"):
    run(inputs(), "xla")
  assert reference.unsupported() is None
