"""The Triton kernels: on a GPU as they are, on a CPU in the interpreter."""
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.default_backend() == "cpu":  # before the first import of triton
  os.environ["TRITON_INTERPRET"] = "1"

from pallas_kernels.kda import reference, triton, triton_config  # noqa: E402

ARRAYS = ("q", "k", "v", "decay", "beta", "a_log", "dt_bias", "initial_state")


def test_launches_apart_inside_shard_map_only():
  assert not triton._local()
  mesh = jax.make_mesh((1,), ("heads",), devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,))
  inside = []
  jax.eval_shape(jax.shard_map(
      lambda x: (inside.append(triton._local()), x)[1], mesh=mesh,
      in_specs=jax.P("heads"), out_specs=jax.P("heads")), jnp.ones(4))
  assert inside == [True]


@pytest.fixture
def interpreted(monkeypatch):
  """Replaces the launch by Triton's interpreter."""
  pytest.importorskip("triton")
  monkeypatch.syspath_prepend(os.path.dirname(__file__))
  import triton_interpreter
  monkeypatch.setattr(triton, "launch", triton_interpreter.launch)


def draw(batch, time, heads, groups, key, value, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = dict(
      q=(batch, time, heads, key), k=(batch, time, heads, key),
      v=(batch, time, groups, value), decay=(batch, time, groups, key),
      beta=(batch, time, groups), a_log=(groups,), dt_bias=(groups, key),
      initial_state=(batch, groups, key, value),
      do=(batch, time, groups, value), ds=(batch, groups, key, value))
  x = {n: jnp.asarray(rng.normal(size=s), jnp.float32)
       for n, s in shapes.items()}
  for name in ("q", "k", "v", "decay", "beta", "do"):
    x[name] = x[name].astype(dtype)
  return x


def everything(function, x, **options):
  """Outputs and the gradients of all arrays; documents' padding left out."""
  options = dict(floor=-5.0, normalize_qk=True, sigmoid_beta=True,
                 scale=x["q"].shape[-1]**-0.5, **options)
  real = jnp.ones(x["do"].shape[:2]) if options["segment_ids"] is None else (
      options["segment_ids"] != 0)
  real = real[..., None, None]

  def outputs(arrays):
    tokens = [arrays[n] for n in ARRAYS[:5]]
    o, s = function(*tokens, **{n: arrays[n] for n in ARRAYS[5:]}, **options)
    return o * real.astype(o.dtype), s

  (o, s), pull = jax.vjp(outputs, {n: x[n] for n in ARRAYS})
  return dict(o=o, s=s, **pull((x["do"].astype(o.dtype), x["ds"]))[0])


def assert_close(got, want, limit, x):
  """Relative to the norm of each array, or of the terms that it sums up."""
  for name, value in want.items():
    a, b = (np.asarray(y, np.float64) for y in (got[name], value))
    size = np.linalg.norm(b)
    if name == "a_log":
      # One number a head, of a hundred thousand terms that nearly cancel.
      terms = np.asarray(want["decay"], np.float64) * (
          np.asarray(x["decay"]) + np.asarray(x["dt_bias"]))
      size = max(size, np.linalg.norm(terms))
    error = np.linalg.norm(a - b) / size
    assert error < limit, (name, error)


def segments(batch, time):
  """Documents that start anywhere; padding inside and at the end."""
  ids = np.repeat(np.arange(time)[None] * 7 // time + 1, batch, axis=0)
  ids[:, 10:13] = 0
  ids[:, -5:] = 0
  return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("packed", [False, True])
def test_interpreted_kernels_equal_the_recurrence(interpreted, packed):
  x = draw(1, 70, 1, 2 if packed else 1, 24, 40)
  ids = segments(1, 70) if packed else None
  want = everything(reference.kda, x, segment_ids=ids)
  got = everything(triton.kda, x, segment_ids=ids)
  assert_close(got, want, 1e-4, x)


def test_interpreted_documents_are_walls(interpreted):
  """Exactly: sums over a chunk must not cross a border and come back."""
  x = draw(1, 70, 1, 1, 16, 16)
  ids = jnp.asarray([[1] * 21 + [2] * 30 + [0] * 19])

  def second(arrays):
    tokens = [arrays[n] for n in ARRAYS[:5]]
    o, s = triton.kda(
        *tokens, **{n: arrays[n] for n in ARRAYS[5:]}, floor=-5.0,
        normalize_qk=True, sigmoid_beta=True, scale=0.25, segment_ids=ids)
    return jnp.sum(o[:, 21:51]**2) + jnp.sum(s**2)

  grads = jax.grad(second)({n: x[n] for n in ARRAYS})
  for name in ARRAYS[:5]:
    assert np.any(grads[name][:, 21:51]), name
    assert not np.any(grads[name][:, :21]), name
    assert not np.any(grads[name][:, 51:]), name
  assert not np.any(grads["initial_state"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-4),
                                          ("bfloat16", 2e-2)])
@pytest.mark.parametrize("sizes", [(2, 1000, 2, 2, 128, 128),
                                   (1, 333, 1, 4, 64, 128),
                                   (1, 200, 1, 1, 256, 64),
                                   (2, 67, 3, 3, 24, 40)])
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_kernels_equal_the_recurrence(sizes, dtype, limit, packed):
  x = draw(*sizes, jnp.dtype(dtype))
  reason = triton.unsupported(x["q"], x["v"], floor=-5.0)
  if reason:
    pytest.skip(reason)
  ids = segments(*sizes[:2]) if packed else None
  wide = {n: y.astype(jnp.float32) for n, y in x.items()}
  want = jax.jit(functools.partial(everything, reference.kda,
                                   segment_ids=ids))(wide)
  got = jax.jit(functools.partial(everything, triton.kda,
                                  segment_ids=ids))(x)
  assert_close(got, want, limit, wide)


def test_says_why_it_cannot_run():
  x = draw(1, 1, 1, 1, 300, 8)
  assert "unbounded" in triton.unsupported_shape(x["q"], x["v"], None)
  assert "key width 300" in triton.unsupported_shape(x["q"], x["v"], -5.0)
  half = x["v"].astype(jnp.float16)
  assert "float16" in triton.unsupported_shape(half, half, -5.0)


def test_config_names_the_value_it_refuses():
  with pytest.raises(ValueError, match="pass_warps=3"):
    triton_config.Config(pass_warps=3)


@pytest.mark.parametrize("floor", [-5.0, -5.54])
def test_exponents_of_pairs_fit_float32(floor):
  """At the lowest floor no exponent of a pair that matters leaves float32."""
  decay = np.full(triton_config.CHUNK, floor / np.log(2))
  read, write, up, far = triton_config.sums_of_decay().astype(float) @ decay
  i, j = np.tril_indices(triton_config.CHUNK)
  near = -up
  key = np.where(i < 32, near[j], far[j])
  assert np.max(np.abs(up)) < 126 and np.max(key) < 126
  np.testing.assert_allclose(up[i] + key, read[i] - read[j], atol=1e-9)
  np.testing.assert_allclose(read + write, read[-1])


def test_ada_gets_fewer_loads_in_flight():
  hopper = triton_config.heuristic(128, 128, "bfloat16", (9, 0))
  ada = triton_config.heuristic(128, 128, "bfloat16", (8, 9))
  assert (hopper.pass_stages, ada.pass_stages) == (3, 2)


def test_tuned_files_hold_valid_configs():
  for path in triton_config.TUNED.glob("*.json"):
    for row in triton_config.read(path.stem.replace("_", " ")).values():
      triton_config.Config(**row["config"])
