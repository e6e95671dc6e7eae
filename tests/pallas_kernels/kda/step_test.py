"""The decoding step equals the recurrence, token by token."""
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.default_backend() == "cpu":  # before the first import of triton
  os.environ["TRITON_INTERPRET"] = "1"

from pallas_kernels.kda import reference, step, triton  # noqa: E402

CASES = {
    "bounded gate": dict(floor=-5.0, normalize_qk=True, sigmoid_beta=True),
    "unbounded gate": dict(floor=None, normalize_qk=True, sigmoid_beta=True),
    "given decay": dict(floor=-5.0, normalize_qk=False, sigmoid_beta=False),
}


def draw(batch, heads, groups, key, value, tokens=1, dtype=jnp.float32):
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  x = dict(q=normal(batch, tokens, heads, key),
           k=normal(batch, tokens, heads, key),
           v=normal(batch, tokens, groups, value),
           decay=normal(batch, tokens, groups, key),
           beta=normal(batch, tokens, groups))
  return (x, normal(batch, groups, key, value).astype(jnp.float32),
          normal(groups).astype(jnp.float32),
          normal(groups, key).astype(jnp.float32))


def options_of(case, x, a_log, dt_bias):
  """Options of a case; makes its inputs what it takes."""
  options = dict(CASES[case], scale=x["q"].shape[-1]**-0.5)
  if case == "given decay":
    x["decay"] = -jax.nn.sigmoid(x["decay"])
    x["beta"] = jax.nn.sigmoid(x["beta"])
    x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    return dict(options, a_log=None, dt_bias=None)
  return dict(options, a_log=a_log, dt_bias=dt_bias)


def close(actual, wanted, limit=1e-5):
  error = np.linalg.norm(np.asarray(actual, np.float64) - wanted)
  return error / np.linalg.norm(np.asarray(wanted, np.float64)) < limit


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_the_whole_sequence(case):
  x, s, a_log, dt_bias = draw(2, 1, 2, 16, 32, tokens=5)
  options = options_of(case, x, a_log, dt_bias)
  o, end = reference.kda(*x.values(), initial_state=s, segment_ids=None,
                         **options)
  for t in range(5):
    o_t, s = step.step(*(y[:, t] for y in x.values()), s,
                       implementation="reference", **options)
    assert close(o_t, o[:, t])
  assert close(s, end)


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_the_reference(case, monkeypatch):
  pytest.importorskip("triton")
  monkeypatch.syspath_prepend(os.path.dirname(__file__))
  import triton_interpreter
  monkeypatch.setattr(triton, "launch", triton_interpreter.launch)
  x, s, a_log, dt_bias = draw(3, 1, 2, 16, 32)
  options = options_of(case, x, a_log, dt_bias)
  real = jnp.asarray([True, False, True])
  tokens = [y[:, 0] for y in x.values()]
  wanted = step.step(*tokens, s, real_B=real, implementation="reference",
                     **options)
  o, end = step.launch(
      tokens, s, options["a_log"], options["dt_bias"], real,
      options["normalize_qk"], options["sigmoid_beta"],
      floor=options["floor"], scale=options["scale"], columns=16)
  assert close(o[::2], wanted[0][::2]) and close(end, wanted[1])
  np.testing.assert_array_equal(end[1], s[1])  # padding leaves it alone


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(4, 2, 2, 128, 128), (3, 1, 4, 64, 256)])
def test_gpu_kernel_equals_the_reference(case, sizes):
  reason = step.unsupported(jnp.zeros((1, 1, sizes[3])),
                            jnp.zeros((1, 1, sizes[4])))
  if reason:
    pytest.skip(reason)
  x, s, a_log, dt_bias = draw(*sizes)
  options = options_of(case, x, a_log, dt_bias)
  tokens = [y[:, 0] for y in x.values()]
  wanted = step.step(*tokens, s, implementation="reference", **options)
  run = jax.jit(lambda tokens, s: step.step(
      *tokens, s, implementation="triton", **options), donate_argnums=1)
  o, end = run(tokens, s + 0)
  assert close(o, wanted[0]) and close(end, wanted[1])


def test_says_why_the_kernel_cannot_run():
  reason = step.unsupported(jnp.zeros((1, 1, 24)), jnp.zeros((1, 1, 16)))
  assert "key width 24" in reason
  x, s, _, _ = draw(1, 1, 1, 24, 16)
  tokens = [y[:, 0] for y in x.values()]
  with pytest.raises(NotImplementedError, match="key width 24"):
    step.step(*tokens, s, implementation="triton")
  with pytest.raises(ValueError, match="is none of"):
    step.step(*tokens, s, implementation="cuda")
