"""Causal depthwise convolution over a few tokens, inside documents."""
import jax
import jax.numpy as jnp


def short_conv(x_BTHK, w_IHK, documents_BT, continues_B, tail_BIHK):
  """Mixes each channel with its previous inputs of the same document.

    y_t = sum_i w_i x_{t - (taps - 1) + i}

  Args:
    x_BTHK: inputs.
    w_IHK: one weight a tap and channel; the last tap meets the token itself.
    documents_BT: document ordinals; 0 is trailing padding.
    continues_B: whether a row's first document goes on from `tail_BIHK`.
    tail_BIHK: the last taps - 1 inputs before the row, zeros where its
      document is younger than that; None when nothing precedes or follows.

  Returns:
    y_BTHK: outputs, in the dtype of x.
    tail_BIHK: for the next call; None for None. Padding is not in it.
  """
  taps, tokens = w_IHK.shape[0], x_BTHK.shape[1]
  past = taps - 1
  if tail_BIHK is None:
    before = jnp.zeros((x_BTHK.shape[0], past, *x_BTHK.shape[2:]),
                       x_BTHK.dtype)
  else:
    before = jnp.where(continues_B[:, None, None, None], tail_BIHK, 0)
  inputs = jnp.concatenate([before, x_BTHK], axis=1)
  # The tail is zero outside the first document, so it may pass for it.
  documents = jnp.pad(documents_BT, ((0, 0), (past, 0)), mode="edge")
  y_BTHK = jnp.zeros((), x_BTHK.dtype)
  for i in range(taps):
    same_BT = documents[:, i:i + tokens] == documents_BT
    tap = inputs[:, i:i + tokens] * w_IHK[i].astype(x_BTHK.dtype)[None, None]
    y_BTHK += jnp.where(same_BT[:, :, None, None], tap, 0)
  if tail_BIHK is None:
    return y_BTHK, None
  return y_BTHK, _tail(inputs, documents, documents_BT, past)


def _tail(inputs, documents, documents_BT, past):
  """The last inputs before the padding, zeros where of another document."""
  real_B = jnp.sum(documents_BT > 0, axis=1, dtype=jnp.int32)
  index_BI = real_B[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
  tail_BIHK = jnp.take_along_axis(inputs, index_BI[..., None, None], axis=1)
  of_BI = jnp.take_along_axis(documents, index_BI, axis=1)
  same_BI = of_BI == of_BI[:, -1:]
  return jnp.where(same_BI[..., None, None], tail_BIHK, 0)


def init(rng, shape, dtype=jnp.float32):
  """Uniform within +-1/sqrt(taps), as torch initialises a depthwise conv."""
  bound = shape[0]**-0.5
  return jax.random.uniform(rng, shape, dtype, -bound, bound)
