"""The Triton kernels of KDA's backward pass that see one chunk at a time."""
import triton
import triton.language as tl

from pallas_kernels.kda.triton_tile import (
    LOG2E, documents, dot, exp2, exponents, gate, halves, load, pairs, product,
    rounded, sigmoid, strength, sums)


@triton.jit
def cotangents(do, dv, writes, at_v, block, inside, kind, C: tl.constexpr,
               V: tl.constexpr, BV: tl.constexpr):
  """A block of value columns: cotangent of o, of v - (k e^G) S, and u."""
  width = block * BV + tl.arange(0, BV)
  at_write = tl.arange(0, C)[:, None] * V + width[None, :]
  return (load(do, at_v, width, inside).to(kind),
          load(dv, at_v, width, inside).to(kind), tl.load(writes + at_write))


@triton.jit
def along(x, other, at_v, block, inside, BV: tl.constexpr):
  """Products of the rows of a tile and of another array."""
  y = load(other, at_v, block * BV + tl.arange(0, BV), inside)
  return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)


@triton.jit
def meet(
    # inputs
    v, beta, code,
    o,  # [B, T, G, V]
    do,  # [B, T, G, V]
    dv,  # [B, T, G, V]: the cotangent of v - (k e^G) S
    writes,  # [B, G, N, C, V]
    # outputs
    d_beta,  # [B, T, G]
    d_mix,  # [B, G, N, 2, C, C]: of A and P
    along_,  # [B, G, N, 2, C]: products of q and k with their cotangents
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, SIGMOID: tl.constexpr,
    DOCUMENTS: tl.constexpr, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
  """Gradients of `prepare`'s matrices and of beta."""
  g = tl.program_id(0)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = writes.dtype.element_ty
  rows = tl.arange(0, C)
  inside = n * C + rows < T
  document, real, _, _ = documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  v += token * V
  o += token * V
  do += token * V
  dv += token * V
  at_v = rows * (G * V)
  tile = (b * G + g) * N + n
  writes += tile * (C * V)
  da = tl.zeros([C, C], tl.float32)
  dp = tl.zeros([C, C], tl.float32)
  q_along = tl.zeros([C], tl.float32)
  k_along = tl.zeros([C], tl.float32)
  for block in tl.range(0, V // BV, num_stages=1):
    do_tile, e, u = cotangents(do, dv, writes, at_v, block, inside, kind, C,
                               V, BV)
    q_along += along(do_tile, o, at_v, block, inside, BV)
    k_along -= along(e, v, at_v, block, inside, BV)
    da = dot(do_tile, tl.trans(u), da, IEEE)
    dp = dot(e, tl.trans(u), dp, IEEE)

  # With W = (I + diag(beta) P)^-1, e is diag(beta) W^T du and d beta_i is
  # (W^T du)_i u_i / beta_i. What a normalised row's cotangent is along the row
  # itself follows from o being linear in q, and u in what k reads and writes.
  apart = rows[:, None] ^ rows[None, :]
  d_strength = tl.sum(tl.where(apart == 0, dp, 0.0), 1)
  power = strength(beta + token, rows * G, inside, real, SIGMOID, ASSEMBLY)
  d_strength /= tl.where(real, power, 1.0)
  k_along += 2.0 * d_strength
  along_ += tile * (2 * C)
  tl.store(along_ + rows, tl.where(real, q_along, 0.0))
  tl.store(along_ + C + rows, tl.where(real, k_along, 0.0))
  if SIGMOID:
    d_strength *= 1.0 - power
  else:
    d_strength /= tl.where(real, power, 1.0)
  tl.store(d_beta + token + rows * G, tl.where(real, d_strength, 0.0),
           mask=inside)
  seen = pairs(code, document, real, b, n, T, N, C, DOCUMENTS)
  d_mix += tile * (2 * C * C) + rows[:, None] * C + rows[None, :]
  tl.store(d_mix, tl.where(seen, da, 0.0).to(kind))
  tl.store(d_mix + C * C, tl.where(seen & (apart > 0), -dp, 0.0).to(kind))


@triton.jit
def gradient(
    # inputs
    q, k, z, a_log, dt_bias, code, keep,
    do,  # [B, T, G, V]
    dv,  # [B, T, G, V]
    states,  # [B, G, N, K, V]: before each chunk
    d_states,  # [B, G, N, K, V]: cotangent of the state after it
    writes,  # [B, G, N, C, V]
    d_mix,  # [B, G, N, 2, C, C]
    along_,  # [B, G, N, 2, C]
    marks,  # [B, G, N, 4, K]
    scales,  # [B, G, N, 2, C]
    # outputs
    dq,  # [B, T, G, K]
    dk,  # [B, T, G, K]
    dz,  # [B, T, G, K]
    d_rate,  # [B, N, G, K / BK]
    d_bias,  # [B, N, G, K]
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, DOCUMENTS: tl.constexpr,
    IEEE: tl.constexpr, ASSEMBLY: tl.constexpr, STAGES: tl.constexpr,
):
  """Gradients of q, k and the gate for one chunk and a block of channels."""
  part = tl.program_id(0) % (K // BK)
  g = tl.program_id(0) // (K // BK)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = writes.dtype.element_ty
  rows = tl.arange(0, C)
  inside = n * C + rows < T
  document, real, carried, last = documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  q += ((b * T + n * C) * H + g // (G // H)) * K
  k += ((b * T + n * C) * H + g // (G // H)) * K
  z += token * K
  do += token * V
  dv += token * V
  at_q = rows * (H * K)
  at_z = rows * (G * K)
  at_v = rows * (G * V)
  tile = (b * G + g) * N + n
  states += tile * (K * V)
  d_states += tile * (K * V)
  writes += tile * (C * V)
  marks += tile * (4 * K)
  d_mix += tile * (2 * C * C) + rows[:, None] * C + rows[None, :]
  along_ += tile * (2 * C)
  scales += tile * (2 * C)
  keys = part * BK + tl.arange(0, BK)
  dt_bias += g * K
  rate = tl.exp2(LOG2E * tl.load(a_log + g))
  first = (rows < 32)[:, None]

  bias = tl.load(dt_bias + keys)
  x = gate(load(z, at_z, keys, inside), rate, bias, real, FLOOR, GATE,
           DOCUMENTS, IEEE, ASSEMBLY)
  before = tl.load(keep + rows[:, None] * C + rows[None, :])
  x = exponents(before, x, IEEE, ASSEMBLY)
  d_gamma = tl.zeros([BK], tl.float32)
  dk_tile = tl.zeros([C, BK], tl.float32)
  dk_read = tl.zeros([C, BK], tl.float32)
  dq_tile = tl.zeros([C, BK], tl.float32)
  for block in tl.range(0, V // BV, num_stages=STAGES):
    do_tile, e, u = cotangents(do, dv, writes, at_v, block, inside, kind, C, V,
                               BV)
    width = block * BV + tl.arange(0, BV)
    at_state = keys[:, None] * V + width[None, :]
    s = tl.load(states + at_state)
    ds = tl.load(d_states + at_state)
    d_gamma += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    dk_tile = dot(u, tl.trans(ds), dk_tile, IEEE)
    dk_read = dot(e, tl.trans(s), dk_read, IEEE)
    dq_tile = dot(do_tile, tl.trans(s), dq_tile, IEEE)
  q_scale = tl.load(scales + rows) * SCALE
  k_scale = tl.load(scales + C + rows)
  q_tile = load(q, at_q, keys, inside).to(tl.float32) * q_scale[:, None]
  k_tile = load(k, at_q, keys, inside).to(tl.float32) * k_scale[:, None]
  total = tl.load(marks + 3 * K + keys)
  read = exp2(x, ASSEMBLY)
  write = exp2(total[None, :] - x, ASSEMBLY)
  whole = exp2(total, ASSEMBLY)
  if DOCUMENTS:
    read = tl.where((document == carried)[:, None], read, 0.0)
    write = tl.where((document == last)[:, None], write, 0.0)
    whole = tl.where(carried == last, whole, 0.0)
  # Reading sees +G and writing -G; g of a token enters every later G. A pair
  # of tokens must enter both sides with the same rounding: the two cancel in
  # every g before the pair.
  dk_tile *= write
  dk_read *= read
  dq_tile = tl.where(real[:, None], dq_tile * read, 0.0)
  d = k_tile * dk_tile
  d_last = tl.sum(d, 0) + whole * d_gamma
  d = q_tile * dq_tile - k_tile * dk_read - d
  dk_tile -= dk_read

  middle = tl.load(marks + 2 * K + keys) - tl.load(marks + keys)
  last_middle = total + tl.load(marks + K + keys)
  far = exp2(last_middle[None, :] - x, ASSEMBLY)
  x -= tl.where(first, middle[None, :], last_middle[None, :])
  near = exp2(-x, ASSEMBLY)
  up = exp2(x, ASSEMBLY)
  q_up = rounded(q_tile * up, kind)
  k_up = rounded(k_tile * up, kind)
  k_near = rounded(k_tile * near, kind)
  k_far = rounded(k_tile * far, kind)
  da = tl.load(d_mix)
  dp = tl.load(d_mix + C * C)
  y = tl.where(first, product(da, k_near.to(kind), IEEE),
               product(da, k_far.to(kind), IEEE))
  d += q_up * y
  dq_tile += up * y
  y = tl.where(first, product(dp, k_near.to(kind), IEEE),
               product(dp, k_far.to(kind), IEEE))
  d += k_up * y
  dk_tile += up * y
  q_first, q_up = halves(q_up)
  k_first, k_up = halves(k_up)
  y = product(tl.trans(da), q_first.to(kind), IEEE)
  y = dot(tl.trans(dp), k_first.to(kind), y, IEEE)
  d -= k_near * y
  dk_tile += near * y
  y = product(tl.trans(da), q_up.to(kind), IEEE)
  y = dot(tl.trans(dp), k_up.to(kind), y, IEEE)
  d -= k_far * y
  dk_tile += far * y
  if NORM:  # back through x / |x|
    y = tl.load(along_ + rows) / (SCALE * SCALE)
    dq_tile -= q_tile * y[:, None]
    dk_tile -= k_tile * tl.load(along_ + C + rows)[:, None]
  to = token * K + at_z[:, None] + keys[None, :]
  tl.store(dq + to, (dq_tile * q_scale[:, None]).to(dq.dtype.element_ty),
           mask=inside[:, None])
  tl.store(dk + to, (dk_tile * k_scale[:, None]).to(dk.dtype.element_ty),
           mask=inside[:, None])
  after = tl.trans(before).to(tl.float32)
  at_end = d_last[None, :]
  if DOCUMENTS:
    # What other documents' rows add sums to zero, but only up to rounding.
    column, _, _, _ = documents(code, b, n, T, N, C, DOCUMENTS)
    after = tl.where(document[:, None] == column[None, :], after, 0.0)
    at_end = tl.where((document == last)[:, None], at_end, 0.0)
  d = sums(after, d, IEEE, ASSEMBLY)
  d = tl.where(real[:, None], d + at_end, 0.0)
  if GATE:
    # Loaded once more: to hold it this long would take registers.
    y = load(z, at_z, keys, inside).to(tl.float32) + bias[None, :]
    slope = sigmoid(rate * y, ASSEMBLY)
    d = d * (FLOOR * rate) * slope * (1.0 - slope)
    row = (b * N + n) * G + g
    tl.store(d_bias + row * K + keys, tl.sum(d, 0))
    tl.store(d_rate + row * (K // BK) + part, tl.sum(tl.sum(d * y, 1), 0))
  tl.store(dz + to, d.to(dz.dtype.element_ty), mask=inside[:, None])
