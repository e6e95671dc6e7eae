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
  same_BTI = jnp.stack([documents[:, i:i + tokens] == documents_BT
                        for i in range(taps)], axis=2)
  y_BTHK = _mix(inputs, w_IHK, same_BTI)
  if tail_BIHK is None:
    return y_BTHK, None
  return y_BTHK, _tail(inputs, documents, documents_BT, past)


@jax.custom_vjp
def _mix(inputs, w_IHK, same_BTI):
  """Sums the taps in float32; rounded once, to the dtype of the inputs."""
  y_BTHK = sum(_shift(inputs, same_BTI, i) * w_IHK[i][None, None]
               for i in range(w_IHK.shape[0]))
  return y_BTHK.astype(inputs.dtype)


def _mix_fwd(inputs, w_IHK, same_BTI):
  return _mix(inputs, w_IHK, same_BTI), (inputs, w_IHK, same_BTI)


def _mix_bwd(residuals, dy_BTHK):
  inputs, w_IHK, same_BTI = residuals
  taps, tokens = w_IHK.shape[0], dy_BTHK.shape[1]
  # Every tap reads it: without the barrier XLA computes what made it each time.
  dy_BTHK = jax.lax.optimization_barrier(dy_BTHK.astype(jnp.float32))
  # Sums over tokens by a matmul with ones: as a reduction they take a CPU
  # several times as long.
  ones_X = jnp.ones(same_BTI.shape[0] * tokens, jnp.float32)
  dinputs, dw_IHK = 0, []
  for i in range(taps):
    of_BT = same_BTI[:, :, i, None, None]
    dtap_BTHK = jnp.where(of_BT, dy_BTHK * w_IHK[i][None, None], 0)
    after = taps - 1 - i
    dinputs += jnp.pad(dtap_BTHK, ((0, 0), (i, after), (0, 0), (0, 0)))
    product = (dy_BTHK * _shift(inputs, same_BTI, i)).reshape(len(ones_X), -1)
    dw_IHK.append((ones_X @ product).reshape(w_IHK.shape[1:]))
  return dinputs.astype(inputs.dtype), jnp.stack(dw_IHK), None


_mix.defvjp(_mix_fwd, _mix_bwd)


def _shift(inputs, same_BTI, i):
  """What tap i meets, float32; zero where it is of another document."""
  tokens = same_BTI.shape[1]
  tap_BTHK = inputs[:, i:i + tokens].astype(jnp.float32)
  return jnp.where(same_BTI[:, :, i, None, None], tap_BTHK, 0)


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
