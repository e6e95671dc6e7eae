"""Kimi delta attention: the one public function."""
import logging

import jax.numpy as jnp

from pallas_kernels.kda import mosaic, reference, triton, xla
from pallas_kernels.kda.config import check_floor

# In order of preference.
BACKENDS = {"mosaic": mosaic, "triton": triton, "xla": xla}

_chosen = set()  # what has been logged


def kda(q, k, v, decay, beta, *, a_log=None, dt_bias=None, floor=None,
        normalize_qk=False, sigmoid_beta=False, scale=None, initial_state=None,
        segment_ids=None, implementation=None):
  """Runs Kimi delta attention: a linear-time recurrence over tokens.

    S_t = Diag(exp g_t) S_{t-1};  u_t = beta_t (v_t - S_t^T k_t)
    S_t = S_t + k_t u_t^T;        o_t = scale S_t^T q_t

  Differentiable in all arrays but `segment_ids`. The state is float32
  throughout; float32 inputs are computed in float32, bfloat16 inputs are
  raised on entry. With T ≥ 1 any, memory is linear in T.

  Args:
    q: queries, [B, T, H, K].
    k: keys, [B, T, H, K]; unit norm unless `normalize_qk`.
    v: values, [B, T, G, V]; G value heads, a multiple of H.
    decay: [B, T, G, K]; without `a_log` the log decay g ≤ 0 in nats a token
      (with `floor`, the caller promises g ≥ floor); with `a_log` the raw gate
      input z.
    beta: write strength in [0, 1], [B, T, G]; logits if `sigmoid_beta`.
    a_log: [G] or None; g = floor * sigmoid(exp(a_log) (z + dt_bias)), or
      -exp(a_log) softplus(z + dt_bias) when `floor` is None.
    dt_bias: [G, K], given with `a_log`.
    floor: lower bound of the log decay, in (-5.5, 0), or None: unbounded.
      A bound makes every block a dense matmul.
    normalize_qk: divides q and k by sqrt(sum of squares + 1e-6).
    sigmoid_beta: `beta` are logits.
    scale: of the queries; default K**-0.5.
    initial_state: [B, G, K, V] float32, of each row's first document; default
      zeros.
    segment_ids: [B, T] integers. A change of id starts a document, from a
      state of zeros; 0 is padding, which changes no state (its outputs are
      to be ignored). Default: a row is one document.
    implementation: a name of BACKENDS or "reference"; None takes the first
      that can run here. A named one never falls back.

  Returns:
    o: [B, T, G, V], in v's dtype.
    final_state: [B, G, K, V] float32, of each row's last document.

  Raises:
    ValueError: shapes, dtypes or options do not fit; names the argument.
    NotImplementedError: no backend can run; gives each one's reason.

  Source: Kimi Linear, arXiv 2510.26692; the bounded gate, arXiv 2607.24653.
  """
  _check(q, k, v, decay, beta, a_log, dt_bias, initial_state, segment_ids)
  check_floor(floor)
  options = dict(
      a_log=a_log, dt_bias=dt_bias, floor=floor, normalize_qk=normalize_qk,
      sigmoid_beta=sigmoid_beta,
      scale=q.shape[-1]**-0.5 if scale is None else scale,
      initial_state=initial_state, segment_ids=segment_ids)
  backend = _choose(implementation, q, v, floor)
  return backend.kda(q, k, v, decay, beta, **options)


def _choose(implementation, q, v, floor):
  if implementation == "reference":
    return reference
  if implementation is not None and implementation not in BACKENDS:
    raise ValueError(f"implementation={implementation!r} is none of "
                     f"{['reference', *BACKENDS]}")
  names = BACKENDS if implementation is None else (implementation,)
  reasons = {}
  for name in names:
    reasons[name] = BACKENDS[name].unsupported(q, v, floor=floor)
    if reasons[name] is None:
      key = (name, q.shape, v.shape, q.dtype)
      if key not in _chosen:
        _chosen.add(key)
        logging.getLogger(__name__).info(
            "kda: %s for q %s, v %s, %s", name, q.shape, v.shape, q.dtype)
      return BACKENDS[name]
  raise NotImplementedError(f"no backend for kda: {reasons}")


def _check(q, k, v, decay, beta, a_log, dt_bias, initial_state, segment_ids):
  """Compares every shape with what q and v make it."""
  if q.ndim != 4 or v.ndim != 4:
    raise ValueError(f"q and v must be [B, T, heads, width]; they are "
                     f"{q.shape} and {v.shape}")
  batch, time, heads, key = q.shape
  groups, value = v.shape[2:]
  if time < 1:
    raise ValueError(f"q has T={time} tokens; at least one is needed")
  if groups % heads:
    raise ValueError(f"v has {groups} heads, which is no multiple of q's "
                     f"{heads}")
  if (a_log is None) != (dt_bias is None):
    raise ValueError("a_log and dt_bias come together: give both or neither")
  wanted = dict(
      k=(k, q.shape), v=(v, (batch, time, groups, value)),
      decay=(decay, (batch, time, groups, key)),
      beta=(beta, (batch, time, groups)), a_log=(a_log, (groups,)),
      dt_bias=(dt_bias, (groups, key)),
      initial_state=(initial_state, (batch, groups, key, value)),
      segment_ids=(segment_ids, (batch, time)))
  for name, (array, shape) in wanted.items():
    if array is not None and array.shape != shape:
      raise ValueError(f"{name} has shape {array.shape}; with q {q.shape} and "
                       f"v {v.shape} it must be {shape}")
  for name, array in dict(q=q, k=k, v=v, decay=decay, beta=beta).items():
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} is {array.dtype}; it must be floating point")
  if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype,
                                                    jnp.integer):
    raise ValueError(f"segment_ids is {segment_ids.dtype}; it must be integer")
