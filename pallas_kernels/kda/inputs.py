"""What every backend does to the raw inputs: gate, unit norm, documents."""
import jax
import jax.numpy as jnp

# Added to the squared norm, as flash-linear-attention does.
UNIT_EPSILON = 1e-6


def log_decay(z_GK, a_log_G, dt_bias_GK, floor):
  """Maps gate inputs to log decay, per channel.

    floor given:  floor * sigmoid(exp(a) * (z + b)), inside (floor, 0)
    floor None:   -exp(a) * softplus(z + b), at most 0

  Args:
    z_GK: gate inputs; axes before G are free.
    a_log_G: log of the gate's slope, one a value head.
    dt_bias_GK: added to the gate inputs before the slope.
    floor: lower bound of the log decay in nats a token, or None.

  Returns:
    g_GK: log decay, in the dtype of `z_GK`.
  """
  shape = (1,) * (z_GK.ndim - 2)
  slope_G1 = jnp.exp(a_log_G.astype(z_GK.dtype)).reshape(*shape, -1, 1)
  u_GK = z_GK + dt_bias_GK.astype(z_GK.dtype).reshape(*shape, *dt_bias_GK.shape)
  if floor is None:
    return -slope_G1 * jax.nn.softplus(u_GK)
  return floor * jax.nn.sigmoid(slope_G1 * u_GK)


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


def prepare(q_K, k_K, v_GV, decay_GK, beta_G, real, a_log_G, dt_bias_GK, *,
            floor, normalize_qk, sigmoid_beta, scale):
  """Turns raw inputs into the recurrence's own, in float32 (float64 stays).

  Args:
    q_K: queries, [..., H, K]; axes before H are free (as in all that follow).
    k_K: keys, [..., H, K].
    v_GV: values, [..., G, V] with G a multiple of H.
    decay_GK: log decay, or gate inputs when `a_log_G` is given.
    beta_G: write strength, or its logits when `sigmoid_beta`.
    real: [...] False on padding, which then neither decays nor writes; None
      when all tokens are real.
    a_log_G: see `log_decay`; None if `decay_GK` is the log decay.
    dt_bias_GK: see `log_decay`.
    floor: see `log_decay`.
    normalize_qk: divide q and k by their L2 norms.
    sigmoid_beta: `beta_G` are logits.
    scale: multiplies the queries.

  Returns:
    q_GK, k_GK, v_GV, g_GK, beta_G with heads repeated to value heads.
  """
  dtype = jnp.promote_types(jnp.float32, q_K.dtype)
  q_K, k_K, v_GV, g_GK, beta_G = (
      x.astype(dtype) for x in (q_K, k_K, v_GV, decay_GK, beta_G))
  if a_log_G is not None:
    g_GK = log_decay(g_GK, a_log_G, dt_bias_GK, floor)
  if sigmoid_beta:
    beta_G = jax.nn.sigmoid(beta_G)
  if normalize_qk:
    q_K, k_K = unit(q_K), unit(k_K)
  q_K = q_K * scale
  if real is not None:
    beta_G = jnp.where(real[..., None], beta_G, 0)
    g_GK = jnp.where(real[..., None, None], g_GK, 0)
  groups = v_GV.shape[-2] // q_K.shape[-2]
  if groups > 1:
    q_K, k_K = (jnp.repeat(x, groups, axis=-2) for x in (q_K, k_K))
  return q_K, k_K, v_GV, g_GK, beta_G
