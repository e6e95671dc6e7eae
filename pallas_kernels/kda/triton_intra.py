"""The Triton kernel of KDA that sees one chunk and no state.

With P = tril(k e^G (k e^-G)^T, -1) and A = tril(q e^G (k e^-G)^T), a chunk's
writes are u = M (v - (k e^G) S) where M = (I + diag(beta) P)^-1 diag(beta).
"""
import triton
import triton.language as tl

from pallas_kernels.kda.triton_tile import (
    LOG2E, documents, dot, exp2, exponents, gate, halves, load, pairs,
    product, strength)


@triton.jit
def inverse_of(lower, rows, IEEE: tl.constexpr):
  """(I + lower)^-1 of 64 rows, strictly lower; merges blocks of 2, 4, ... rows.

  Each merge is [[a, 0], [c, b]]^-1 = [[a', 0], [-b' c a', b']]: as stable as
  substitution, which a power series with its large terms is not. No entry of
  the inverse is above 1 for unit keys, so float16 holds it, with three bits
  more than bfloat16.
  """
  apart = rows[:, None] ^ rows[None, :]  # its highest bit: where they meet
  x = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
  if not IEEE:
    x = x.to(tl.float16)
    lower = lower.to(tl.float16)
  for level in tl.static_range(1, 6):
    joins = (apart & (64 - (1 << level))) == (1 << level)
    corner = tl.where(joins, lower, 0.0).to(x.dtype)
    y = product(corner, x, IEEE)
    y = product(x, y.to(x.dtype), IEEE)
    x = x - y.to(x.dtype)  # no entry is set in both
  return x.to(tl.float32)


@triton.jit
def prepare(
    # inputs
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    z,  # [B, T, G, K]
    beta,  # [B, T, G]
    a_log,  # [G]
    dt_bias,  # [G, K]
    code,  # [B, N * C]
    keep,  # [4, C, C]: which log decays an exponent sums up
    # outputs
    q_read,  # [B, G, N, C, K]: scale q e^G
    k_read,  # [B, G, N, C, K]: k e^G
    k_write,  # [B, G, N, C, K]: k e^(G_C - G)
    gamma,  # [B, G, N, K]: e^G_C
    mix,  # [B, G, N, C, C]: A
    inverse,  # [B, G, N, C, C]: M
    marks,  # [B, G, N, 4, K]: exponents of the chunk's ends: up of the first
            # token, far of the last, read of the first, read of the last
    scales,  # [B, G, N, 2, C]: factors of the rows of q and k
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, FLOOR: tl.constexpr,
    SCALE: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    SIGMOID: tl.constexpr, DOCUMENTS: tl.constexpr, IEEE: tl.constexpr,
    ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):
  """How the tokens of one chunk of one head meet each other and the state."""
  g = tl.program_id(0)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = mix.dtype.element_ty
  rows = tl.arange(0, C)
  inside = n * C + rows < T
  document, real, carried, last = documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  q += ((b * T + n * C) * H + g // (G // H)) * K
  k += ((b * T + n * C) * H + g // (G // H)) * K
  z += token * K
  at_q = rows * (H * K)
  at_z = rows * (G * K)
  dt_bias += g * K
  rate = tl.exp2(LOG2E * tl.load(a_log + g))
  tile = (b * G + g) * N + n
  q_read += tile * (C * K)
  k_read += tile * (C * K)
  k_write += tile * (C * K)
  gamma += tile * K
  marks += tile * (4 * K)

  # All loads before the first use: memory answers late.
  if NORM:
    q_rows = load(q, at_q, tl.arange(0, K), inside)
    k_rows = load(k, at_q, tl.arange(0, K), inside)
  keep += rows[:, None] * C + rows[None, :]
  of_read = tl.load(keep)
  of_write = tl.load(keep + C * C)
  of_up = tl.load(keep + 2 * C * C)
  of_far = tl.load(keep + 3 * C * C)
  power = strength(beta + token, rows * G, inside, real, SIGMOID, ASSEMBLY)
  if NORM:
    q_rows = q_rows.to(tl.float32)
    k_rows = k_rows.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(q_rows * q_rows, 1) + 1e-6)
    k_scale = tl.rsqrt(tl.sum(k_rows * k_rows, 1) + 1e-6)
  else:
    q_scale = tl.full([C], 1.0, tl.float32)
    k_scale = q_scale
  scales += tile * (2 * C)
  tl.store(scales + rows, q_scale)
  tl.store(scales + C + rows, k_scale)
  q_scale = tl.where(real, q_scale * SCALE, 0.0)

  a = tl.zeros([C, C], tl.float32)
  p = tl.zeros([C, C], tl.float32)
  for block in tl.range(0, K // BK, num_stages=STAGES):
    width = block * BK + tl.arange(0, BK)
    x = gate(load(z, at_z, width, inside), rate, tl.load(dt_bias + width), real,
             FLOOR, GATE, DOCUMENTS, IEEE, ASSEMBLY)
    up = exponents(of_up, x, IEEE, ASSEMBLY)
    far = exponents(of_far, x, IEEE, ASSEMBLY)
    write = exponents(of_write, x, IEEE, ASSEMBLY)
    x = exponents(of_read, x, IEEE, ASSEMBLY)
    only = marks + width[None, :] + (rows * 0)[:, None]
    start = (rows == 0)[:, None]
    end = (rows == C - 1)[:, None]
    tl.store(only, up, mask=start)
    tl.store(only + K, far, mask=end)
    tl.store(only + 2 * K, x, mask=start)
    tl.store(only + 3 * K, x, mask=end)
    read = exp2(x, ASSEMBLY)
    whole = read
    write = exp2(write, ASSEMBLY)
    if DOCUMENTS:
      read = tl.where((document == carried)[:, None], read, 0.0)
      write = tl.where((document == last)[:, None], write, 0.0)
      whole = tl.where(carried == last, whole, 0.0)
    tl.store(gamma + width[None, :] + (rows * 0)[:, None], whole,
             mask=end)
    to = rows[:, None] * K + width[None, :]
    q_tile = load(q, at_q, width, inside).to(tl.float32) * q_scale[:, None]
    k_tile = load(k, at_q, width, inside).to(tl.float32) * k_scale[:, None]
    tl.store(q_read + to, (q_tile * read).to(kind))
    tl.store(k_read + to, (k_tile * read).to(kind))
    tl.store(k_write + to, (k_tile * write).to(kind))
    near = tl.trans((k_tile * exp2(-up, ASSEMBLY)).to(kind))
    far = tl.trans((k_tile * exp2(far, ASSEMBLY)).to(kind))
    first, second = halves(exp2(up, ASSEMBLY))
    a = dot((q_tile * first).to(kind), near, a, IEEE)
    a = dot((q_tile * second).to(kind), far, a, IEEE)
    p = dot((k_tile * first).to(kind), near, p, IEEE)
    p = dot((k_tile * second).to(kind), far, p, IEEE)

  seen = pairs(code, document, real, b, n, T, N, C, DOCUMENTS)
  to = tile * (C * C) + rows[:, None] * C + rows[None, :]
  tl.store(mix + to, tl.where(seen, a, 0.0).to(kind))
  p = tl.where(seen & (rows[:, None] != rows[None, :]), p * power[:, None], 0.0)
  m = inverse_of(p, rows, IEEE)
  tl.store(inverse + to, (m * power[None, :]).to(kind))
