"""The short convolution: causal, inside documents, and with its tail."""
import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax.layers import short_conv

W = jax.random.normal(jax.random.key(1), (4, 2, 3))
X = jax.random.normal(jax.random.key(0), (2, 9, 2, 3))
DOCUMENTS = jnp.asarray([[1, 1, 1, 2, 2, 3, 3, 3, 3],
                         [1, 1, 1, 1, 1, 2, 2, 0, 0]])
YES = jnp.ones(2, bool)
TAIL = jnp.zeros((2, 3, 2, 3))


def slow(x_THK, documents_T):
  y = np.zeros_like(x_THK)
  for t in range(len(x_THK)):
    for i in range(4):
      source = t - 3 + i
      if source >= 0 and documents_T[source] == documents_T[t]:
        y[t] += W[i] * x_THK[source]
  return y


def test_equals_a_loop_over_tokens():
  y, tail = short_conv.short_conv(X, W, DOCUMENTS, None, None)
  assert tail is None
  for row in range(2):
    np.testing.assert_allclose(y[row], slow(np.asarray(X[row]), DOCUMENTS[row]),
                               rtol=1e-5, atol=1e-5)


def test_any_split_gives_the_same():
  whole, _ = short_conv.short_conv(X, W, DOCUMENTS, None, None)
  for cut in range(1, 9):
    head, tail = short_conv.short_conv(X[:, :cut], W, DOCUMENTS[:, :cut], YES,
                                       TAIL)
    # The last real document before the cut, and whether it goes on after it.
    before = jnp.max(DOCUMENTS[:, :cut], axis=1)
    after = DOCUMENTS[:, cut]
    rest, _ = short_conv.short_conv(X[:, cut:], W, DOCUMENTS[:, cut:],
                                    (before == after) | (after == 0), tail)
    real = (DOCUMENTS > 0)[..., None, None]
    np.testing.assert_allclose(
        jnp.where(real, jnp.concatenate([head, rest], axis=1), 0),
        jnp.where(real, whole, 0), rtol=1e-5, atol=1e-5)


def test_tail_holds_the_last_real_inputs_of_the_document():
  _, tail = short_conv.short_conv(X, W, DOCUMENTS, YES, TAIL)
  np.testing.assert_array_equal(tail[0], X[0, 6:9])
  np.testing.assert_array_equal(tail[1, 0], 0)  # of another document
  np.testing.assert_array_equal(tail[1, 1:], X[1, 5:7])


def test_padding_row_returns_its_tail():
  tail = jax.random.normal(jax.random.key(2), TAIL.shape)
  _, after = short_conv.short_conv(X, W, jnp.zeros((2, 9), jnp.int32), YES,
                                   tail)
  np.testing.assert_array_equal(after, tail)
