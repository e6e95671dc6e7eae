"""The Triton kernel of one decoding step of KDA: one token a sequence."""
import triton
import triton.language as tl

from pallas_kernels.kda.triton_tile import LOG2E, sigmoid


@triton.jit
def step(
    # inputs
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, G, V]
    z,  # [B, G, K]
    beta,  # [B, G]
    a_log,  # [G]
    dt_bias,  # [G, K]
    real,  # [B], where PADDED: 0 leaves a sequence's state alone
    s,  # [B, G, K, V]
    # outputs
    o,  # [B, G, V]
    s_next,  # [B, G, K, V]: the memory of s
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, ASSEMBLY: tl.constexpr,
):
  """S <- Diag(e^g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale S^T q."""
  width = tl.program_id(0) * BV + tl.arange(0, BV)
  g = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  keys = tl.arange(0, K)
  head = b * G + g
  at_state = head * (K * V) + keys[:, None] * V + width[None, :]
  s_tile = tl.load(s + at_state)  # the bulk of the work; before all else
  at_key = (b * H + g // (G // H)) * K + keys
  q_row = tl.load(q + at_key).to(tl.float32)
  k_row = tl.load(k + at_key).to(tl.float32)
  decay = tl.load(z + head * K + keys).to(tl.float32)
  value = tl.load(v + head * V + width).to(tl.float32)
  power = tl.load(beta + head).to(tl.float32)
  if NORM:
    q_row *= tl.rsqrt(tl.sum(q_row * q_row, 0) + 1e-6)
    k_row *= tl.rsqrt(tl.sum(k_row * k_row, 0) + 1e-6)
  if GATE:
    rate = tl.exp2(LOG2E * tl.load(a_log + g))
    decay += tl.load(dt_bias + g * K + keys)
    if FLOOR is None:  # softplus
      decay = -rate * (tl.maximum(decay, 0.0) + tl.log(
          1.0 + tl.exp2(-LOG2E * tl.abs(decay))))
    else:
      decay = FLOOR * sigmoid(rate * decay, ASSEMBLY)
  decay = tl.exp2(LOG2E * decay)
  if SIGMOID:
    power = sigmoid(power + tl.zeros([1], tl.float32), ASSEMBLY)
  else:
    power += tl.zeros([1], tl.float32)
  if PADDED:
    present = tl.load(real + b) != 0
    decay = tl.where(present, decay, 1.0)
    power = tl.where(present, power, 0.0)
    k_row = tl.where(present, k_row, 0.0)
    value = tl.where(present, value, 0.0)
  s_tile *= decay[:, None]
  value = power * (value - tl.sum(s_tile * k_row[:, None], 0))
  s_tile += k_row[:, None] * value[None, :]
  tl.store(s_next + at_state, s_tile)
  y = tl.sum(s_tile * q_row[:, None], 0) * SCALE
  tl.store(o + head * V + width, y.to(o.dtype.element_ty))
