"""What every backend does to the raw inputs: gate, unit norm, documents."""
import jax
import jax.numpy as jnp

# Added to the squared norm, as flash-linear-attention does.
UNIT_EPSILON = 1e-6


def log_decay(z, a_log_G, dt_bias_GK, floor, heads_axis=-2):
  """Maps gate inputs to log decay, per channel.

    floor given:  floor * sigmoid(exp(a) * (z + b)), inside (floor, 0)
    floor None:   -exp(a) * softplus(z + b), at most 0

  Args:
    z: gate inputs, channels last, value heads on `heads_axis`.
    a_log_G: log of the gate's slope, one a value head.
    dt_bias_GK: added to the gate inputs before the slope.
    floor: lower bound of the log decay in nats a token, or None.
    heads_axis: negative.

  Returns:
    g: log decay, shape and dtype of `z`.
  """
  groups, key = dt_bias_GK.shape
  shape = [1] * z.ndim
  shape[heads_axis] = groups
  slope = jnp.exp(a_log_G.astype(z.dtype)).reshape(shape)
  shape[-1] = key
  u = z + dt_bias_GK.astype(z.dtype).reshape(shape)
  if floor is None:
    return -slope * jax.nn.softplus(u)
  return floor * jax.nn.sigmoid(slope * u)


def unit(x_K):
  """Divides by the L2 norm over the last axis."""
  square = jnp.sum(x_K * x_K, axis=-1, keepdims=True)
  return x_K * jax.lax.rsqrt(square + UNIT_EPSILON)


def documents(segment_ids_BT):
  """Numbers a row's documents 0, 1, ...; padding joins what precedes it.

  A document is a run of equal non-zero segment ids, so an id that comes back
  later starts another document. Padding before the first document joins it.
  """
  time_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
  real_BT = segment_ids_BT != 0
  last_BT = jax.lax.cummax(jnp.where(real_BT, time_T[None], -1), axis=1)
  first_B1 = jnp.argmax(real_BT, axis=1, keepdims=True).astype(jnp.int32)
  source_BT = jnp.where(last_BT < 0, first_B1, last_BT)
  filled_BT = jnp.take_along_axis(segment_ids_BT, source_BT, axis=1)
  starts_BT = filled_BT[:, 1:] != filled_BT[:, :-1]
  return jnp.pad(jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32),
                 ((0, 0), (1, 0)))


def prepare(q, k, v, decay, beta, real, a_log_G, dt_bias_GK, *, floor,
            normalize_qk, sigmoid_beta, scale, heads_axis=-2):
  """Turns raw inputs into the recurrence's own, in float32 (float64 stays).

  Args:
    q: queries; channels last, heads on `heads_axis`, as k, v and decay.
    k: keys.
    v: values; a multiple of q's heads.
    decay: log decay, or gate inputs when `a_log_G` is given.
    beta: write strength, or its logits when `sigmoid_beta`; like `decay`
      without the channels.
    real: False on padding, which then neither decays nor writes; shape of
      `beta` with one head. None when all tokens are real.
    a_log_G: see `log_decay`; None if `decay` is the log decay.
    dt_bias_GK: see `log_decay`.
    floor: see `log_decay`.
    normalize_qk: divide q and k by their L2 norms.
    sigmoid_beta: `beta` are logits.
    scale: multiplies the queries.
    heads_axis: negative.

  Returns:
    q, k, v, g, beta with q's and k's heads repeated to value heads.
  """
  dtype = jnp.promote_types(jnp.float32, q.dtype)
  q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, decay, beta))
  if a_log_G is not None:
    g = log_decay(g, a_log_G, dt_bias_GK, floor, heads_axis)
  if sigmoid_beta:
    beta = jax.nn.sigmoid(beta)
  if normalize_qk:
    q, k = unit(q), unit(k)
  q = q * scale
  if real is not None:
    beta = jnp.where(real, beta, 0)
    g = jnp.where(real[..., None], g, 0)
  groups = v.shape[heads_axis] // q.shape[heads_axis]
  if groups > 1:
    q, k = (jnp.repeat(x, groups, axis=heads_axis) for x in (q, k))
  return q, k, v, g, beta
