"""The Mosaic GPU kernels: interpreted on a CPU, and lowered for Hopper."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic, reference

TOKENS = ("q", "k", "v", "decay", "beta")

# Keys far ahead of a query overflow; no query reads them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]


def draw(batch, time, heads, groups, key, value):
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  x = dict(q=normal(batch, time, heads, key), k=normal(batch, time, heads, key),
           v=normal(batch, time, groups, value),
           decay=normal(batch, time, groups, key),
           beta=normal(batch, time, groups))
  x = {name: y.astype(jnp.bfloat16) for name, y in x.items()}
  gate = dict(a_log=0.3 * normal(groups), dt_bias=normal(groups, key),
              initial_state=normal(batch, groups, key, value))
  return x, gate


def options(x, **extra):
  return {**dict(floor=-5.0, normalize_qk=True, sigmoid_beta=True,
                 scale=x["q"].shape[-1]**-0.5, segment_ids=None), **extra}


def both(x, gate, static, interpret=True):
  """Outputs of the kernels and of the recurrence in float32."""
  tokens = [x[name] for name in TOKENS]
  if interpret:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
  got = mosaic.kda(*tokens, **gate, **static, interpret=interpret or None)
  want = reference.kda(*(y.astype(jnp.float32) for y in tokens), **gate,
                       **static)
  return got, want


def assert_close(got, want, limit=8e-3):
  for a, b in zip(got, want):
    a, b = (np.asarray(y, np.float64) for y in (a, b))
    assert np.linalg.norm(a - b) / np.linalg.norm(b) < limit


def test_interpreted_chunk_equals_the_recurrence():
  x, gate = draw(1, 64, 1, 1, 128, 128)
  got, want = both(x, gate, options(x))
  assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
  assert_close(got, want)


@pytest.mark.parametrize("interpret", [
    pytest.param(True, marks=pytest.mark.slow),
    pytest.param(False, marks=pytest.mark.gpu)])
def test_documents_padding_and_heads_equal_the_recurrence(interpret):
  x, gate = draw(2, 100, 1, 2, 64, 128)
  ids = np.repeat(np.arange(100)[None] * 5 // 100 + 1, 2, axis=0)
  ids[:, 10:13] = 0
  ids[1, -40:] = 0
  ids = jnp.asarray(ids, jnp.int32)
  static = options(x, segment_ids=ids)
  with jax.default_matmul_precision("highest"):
    (o, s), (o_want, s_want) = both(x, gate, static, interpret)
  real = np.asarray(ids != 0)[..., None, None]
  assert_close((np.where(real, o, 0), s), (np.where(real, o_want, 0), s_want))


@pytest.mark.slow
@pytest.mark.parametrize("z", [100.0, -9.0])
def test_extreme_decay_equals_the_recurrence(z):
  x, gate = draw(1, 128, 1, 1, 128, 64)
  x["decay"] = jnp.full_like(x["decay"], z)
  assert_close(*both(x, gate, options(x)))


@pytest.mark.slow
def test_plain_log_decay_equals_the_recurrence():
  x, gate = draw(1, 128, 1, 1, 128, 128)
  gate["a_log"] = gate["dt_bias"] = None
  for name in ("q", "k"):
    x[name] /= jnp.linalg.norm(x[name].astype(jnp.float32), axis=-1,
                               keepdims=True).astype(jnp.bfloat16)
  x["decay"] = -5 * jax.nn.sigmoid(x["decay"])
  x["beta"] = jax.nn.sigmoid(x["beta"])
  assert_close(*both(x, gate, options(x, normalize_qk=False,
                                      sigmoid_beta=False)))


@pytest.mark.slow
def test_equal_keys_that_never_decay_equal_the_recurrence():
  """The inverse then has entries of a power series' worst cancellation."""
  x, gate = draw(1, 128, 1, 1, 128, 128)
  x["k"] = jnp.broadcast_to(x["k"][:, :1], x["k"].shape)
  x["decay"] = jnp.full_like(x["decay"], -30.0)
  x["beta"] = jnp.full_like(x["beta"], 10.0)
  assert_close(*both(x, gate, options(x)), limit=2e-2)


@pytest.mark.parametrize("marks", [False, True])
def test_kernels_lower_for_hopper(marks):
  size = dict(B=1, T=256, H=1, G=2, N=4)
  static = mosaic.Static(-5.0, 0.1, True, True, True, marks, None)
  wide = jnp.float32

  def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

  intra, walk = mosaic.kernels(static, size)
  tokens = [shape(1, 256, heads, 128) for heads in (1, 1, 2, 2)]
  rows = [shape(2, 2, 128, dtype=wide), shape(1, 2, 256, dtype=wide),
          shape(1, 4, 5, 64, dtype=wide)]
  traced = jax.jit(intra).trace(*tokens, *rows)
  made = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype),
                      traced.out_info)
  for call in (traced, jax.jit(walk).trace(
      *made, shape(1, 2, 128, 128, dtype=wide))):
    assert "mosaic_gpu" in call.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("floor, key, value, dtype, reason", [
    (None, 128, 128, "bfloat16", "unbounded"),
    (-5.2, 128, 128, "bfloat16", "floor=-5.2"),
    (-5.0, 256, 128, "bfloat16", "key width 256"),
    (-5.0, 128, 256, "bfloat16", "value width 256"),
    (-5.0, 128, 128, "float32", "float32")])
def test_reason_names_what_is_unsupported(floor, key, value, dtype, reason):
  q, v = (jnp.zeros((1, 64, 1, width), dtype) for width in (key, value))
  assert reason in mosaic.unsupported_shape(q, v, floor)


def test_shape_of_the_benchmark_is_supported():
  q = jnp.zeros((1, 64, 1, 128), jnp.bfloat16)
  assert mosaic.unsupported_shape(q, q, -5.0) is None


def test_gradient_is_the_plain_backends():
  from pallas_kernels.kda import xla
  x, gate = draw(1, 64, 1, 1, 128, 128)
  interpret = plgpu.InterpretGPUParams()

  def total(kda, x, **extra):
    o, s = kda(*(x[name] for name in TOKENS), **gate, **options(x), **extra)
    return jnp.sum(o.astype(jnp.float32)) + jnp.sum(s)

  got = jax.grad(lambda x: total(mosaic.kda, x, interpret=interpret))(x)
  want = jax.grad(lambda x: total(xla.kda, x))(x)
  for name in TOKENS:
    np.testing.assert_array_equal(np.asarray(got[name], np.float32),
                                  np.asarray(want[name], np.float32))
