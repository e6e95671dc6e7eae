"""Blockwise attention against its definition, and what masks promise."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import attention

# Documents of two rows of 41 tokens: one shape, compiled once.
DOCUMENTS = {
    "one_document": [[1] * 41, [1] * 41],
    "packed": [[1] * 3 + [2] * 30 + [5] * 8, [3] * 16 + [4] * 25],
    "padding": [[1] * 20 + [0] * 21, [0] * 41],
    "short_documents": [[1] * 2 + [2] * 5 + [3] * 30 + [0] * 4,
                        list(range(1, 42))],
}
# name: (heads, K, V, U, documents, block)
SHAPES = {
    **{name: (3, 24, 8, 8, documents, 8)
       for name, documents in DOCUMENTS.items()},
    "one_token": (2, 8, 12, 0, [[1], [0]], 8),
}


def make(heads, K, V, U, documents, dtype=jnp.float32, seed=0):
  """Random queries, keys, values, shared keys, and the documents."""
  documents_BT = jnp.asarray(documents, jnp.int32)
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=documents_BT.shape + shape), dtype)
  shared = normal(U) if U else None
  return (normal(heads, K), normal(heads, K - U), normal(heads, V),
          shared), documents_BT


def attend(arrays, documents_BT, **kwargs):
  q_BTHK, k_BSHK, v_BSHV, k_shared_BSU = arrays
  return attention.causal_attention(
      q_BTHK, k_BSHK, v_BSHV, documents_BT, k_shared_BSU=k_shared_BSU, **kwargs)


@functools.partial(jax.jit, static_argnames=("block", "implementation"))
def with_gradients(arrays, documents_BT, do_BTHV=None, **kwargs):
  """The output, and what the cotangent (random unless given) becomes."""
  o_BTHV, pull = jax.vjp(lambda a: attend(a, documents_BT, **kwargs), arrays)
  if do_BTHV is None:
    do_BTHV = jax.random.normal(jax.random.key(7), o_BTHV.shape, o_BTHV.dtype)
  return [o_BTHV, *jax.tree.leaves(pull(do_BTHV))]


def assert_close(got, want, tolerance):
  """Relative RMSE; an exact zero must be met exactly."""
  for one, other in zip(got, want, strict=True):
    one, other = (np.asarray(a, np.float32) for a in (one, other))
    error = np.sqrt(np.sum((one - other) ** 2))
    assert error <= tolerance * np.sqrt(np.sum(other ** 2))


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name):
  *shape, block = SHAPES[name]
  arrays, documents_BT = make(*shape)
  assert_close(
      with_gradients(arrays, documents_BT, block=block),
      with_gradients(arrays, documents_BT, implementation="reference"), 1e-5)


def test_comparison_can_fail():
  with pytest.raises(AssertionError):
    assert_close([1.001 * jnp.ones(3)], [jnp.ones(3)], 1e-5)


def test_bfloat16_equals_the_reference():
  # The inputs are the same numbers; what differs is the rounding of the
  # results to bfloat16, by up to 2^-9, and of the output that the backward
  # pass reads.
  arrays, documents_BT = make(*SHAPES["packed"][:-1], dtype=jnp.bfloat16)
  got = with_gradients(arrays, documents_BT, block=8)
  assert all(a.dtype == jnp.bfloat16 for a in got)
  arrays = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
  do_BTHV = jax.random.normal(jax.random.key(7), got[0].shape, jnp.bfloat16)
  want = with_gradients(arrays, documents_BT, do_BTHV.astype(jnp.float32),
                        implementation="reference")
  assert_close(got, want, 1e-2)


def test_block_size_changes_nothing():
  arrays, documents_BT = make(*SHAPES["packed"][:-1])
  whole = with_gradients(arrays, documents_BT, block=41)
  got = with_gradients(arrays, documents_BT, block=5)
  assert_close(got, whole, 1e-5)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_documents_are_walls_and_the_future_does_not_leak(implementation):
  *shape, documents, block = SHAPES["packed"]
  arrays, documents_BT = make(*shape, documents)
  zeros_BTHV = jnp.zeros(arrays[2].shape)
  for query in (2, 3, 20, 40):
    _, dq_BTHK, *dkeys = with_gradients(
        arrays, documents_BT, zeros_BTHV.at[0, query].set(1.), block=block,
        implementation=implementation)
    seen_S = np.asarray(documents[0]) == documents[0][query]
    seen_S &= np.arange(41) <= query
    assert not np.delete(dq_BTHK, query, axis=1).any()
    for dkey in dkeys:
      size_BS = np.abs(dkey).reshape(2, 41, -1).sum(-1)
      assert not size_BS[1].any() and not size_BS[0, ~seen_S].any()
    dv_BSHV = dkeys[1]
    assert np.abs(dv_BSHV).sum((2, 3))[0, seen_S].all()


def test_padding_gives_zeros_and_takes_no_gradient():
  *shape, documents, block = SHAPES["padding"]
  arrays, documents_BT = make(*shape, documents)
  arrays = jax.tree.map(
      lambda a: jnp.where(
          (documents_BT > 0).reshape(2, 41, *[1] * (a.ndim - 2)), a, 1e6),
      arrays)
  for a in with_gradients(arrays, documents_BT, block=block):
    assert not np.asarray(a)[np.asarray(documents_BT) == 0].any()
    assert np.isfinite(a).all() and np.asarray(a).any()


def test_rows_do_not_depend_on_their_batch():
  arrays, documents_BT = make(*SHAPES["packed"][:-1])
  others = jax.tree.map(lambda a: a.at[1].mul(-2.), arrays)
  for one, other in zip(
      with_gradients(arrays, documents_BT, block=8),
      with_gradients(others, documents_BT.at[1, 9:].set(0), block=8)):
    # To rounding: the other row decides which blocks are masked.
    np.testing.assert_allclose(one[0], other[0], atol=1e-5)


def test_queries_may_start_anywhere_among_the_keys():
  """Each row's last queries, at its own place, see what they saw before."""
  arrays, documents_BT = make(*SHAPES["packed"][:-1])
  whole_BTHV = with_gradients(arrays, documents_BT, block=8)[0]
  start_B = np.array([32, 17])
  index_BT = jnp.asarray(start_B[:, None] + np.arange(9), jnp.int32)

  def take(a):
    return jax.vmap(lambda a, index: a[index])(a, index_BT)
  o_BTHV = attention.causal_attention(
      take(arrays[0]), *arrays[1:3], take(documents_BT), documents_BT,
      k_shared_BSU=arrays[3], index_BT=index_BT, block=4)
  np.testing.assert_allclose(o_BTHV, take(whole_BTHV), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_huge_logits_stay_finite(dtype):
  arrays, documents_BT = make(*SHAPES["packed"][:-1], dtype=dtype)
  arrays = jax.tree.map(lambda a: a * 1e4, arrays)
  for a in with_gradients(arrays, documents_BT, block=8):
    assert np.isfinite(np.asarray(a, np.float32)).all()


def test_memory_is_linear_in_context():
  """Far below what the logits of one head would take."""
  tokens, heads = 32_768, 4

  def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((1, tokens, *shape), dtype)
  def loss(q_BTHK, k_BSHK, v_BSHV, k_shared_BSU, documents_BT):
    return attention.causal_attention(
        q_BTHK, k_BSHK, v_BSHV, documents_BT, k_shared_BSU=k_shared_BSU).sum()
  memory = jax.jit(jax.grad(loss, argnums=range(4))).lower(
      of(heads, 48), of(heads, 32), of(heads, 32), of(16),
      of(dtype=jnp.int32)).compile().memory_analysis()
  inputs = 4 * tokens * (heads * (48 + 32 + 32) + 16)
  assert memory.temp_size_in_bytes < 8 * inputs < 4 * tokens * tokens / 8


def test_says_what_is_wrong():
  arrays, documents_BT = make(*SHAPES["one_document"][:-1])
  with pytest.raises(ValueError, match="implementation='fast' is not one of"):
    attend(arrays, documents_BT, implementation="fast")
  with pytest.raises(ValueError, match="k_BSHK has shape"):
    attention.causal_attention(
        *arrays[:3], documents_BT, k_shared_BSU=arrays[1][:, :, 0])
