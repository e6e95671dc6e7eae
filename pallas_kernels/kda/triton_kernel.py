"""Triton bodies of chunked KDA with a bounded decay: five kernels.

A chunk is C tokens. With G the running sum of the log decay inside a chunk, S
the state before it and M = (I + diag(beta) P)^-1 diag(beta),

  solve    P = tril(k e^G (k e^-G)^T, -1), A = tril(q e^G (k e^-G)^T), M
  expand   W = M (k e^G), U = M v, and the decayed q and k
  forward  u = U - W S;  o = (q e^G) S + A u;  S <- e^G_C S + (k e^(G_C-G))^T u
  reverse  the same recurrence for dS and du, from the last chunk to the first
  gradient everything else of the backward pass, chunks in parallel

Only `forward` and `reverse` are sequential. e^-G is taken in blocks of R tokens
relative to the block's middle, so exponents stay below |floor| R / 2: 80 for
R = 32 and a floor of -5, where e^80 fits float32 and bfloat16.

Documents may start anywhere: a token code is 2 * document + real. Pairs of
tokens of two documents are masked, and only the document that a chunk begins
with reads the incoming state; padding has beta 0 and decay 1.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# A write strength of exactly 0 would make the gradient of beta 0 / 0.
TINY = tl.constexpr(1e-12)


@triton.jit
def _exp2(x, ASSEMBLY: tl.constexpr):
  """2^x, one instruction: what would be denormal becomes 0."""
  if not ASSEMBLY:  # the interpreter knows none
    return tl.exp2(x)
  return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                   dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, ASSEMBLY: tl.constexpr):
  return tl.fdiv(1.0, 1.0 + _exp2(-LOG2E * x, ASSEMBLY))


@triton.jit
def _dot(a, b, acc, IEEE: tl.constexpr):
  """Matrix product of two tiles in their own precision, plus acc."""
  if IEEE:
    return tl.dot(a, b, acc, input_precision="ieee")
  return tl.dot(a, b, acc)


@triton.jit
def _sums(x, keep, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr):
  """keep @ x for a mask `keep`, with x split in terms of bfloat16.

  A scan over rows would do, but leaves the result in the layout of a load;
  this leaves it in the layout of a product, where all its users are.
  """
  keep = tl.where(keep, 1.0, 0.0)
  if not ASSEMBLY:  # nor does the interpreter multiply bfloat16
    return tl.dot(keep, x, input_precision="ieee")
  keep = keep.to(tl.bfloat16)
  high = x.to(tl.bfloat16)
  rest = x - high.to(tl.float32)
  low = rest.to(tl.bfloat16)
  out = tl.dot(keep, high)
  out = tl.dot(keep, low, out)
  if IEEE:
    out = tl.dot(keep, (rest - low.to(tl.float32)).to(tl.bfloat16), out)
  return out


@triton.jit
def _documents(code, b, n, T, N: tl.constexpr, C: tl.constexpr,
               DOCUMENTS: tl.constexpr):
  """Document of each row, real rows, the chunk's first and last document."""
  rows = tl.arange(0, C)
  if DOCUMENTS:
    base = code + b * (N * C) + n * C
    token = tl.load(base + rows)
    carried = tl.load(base - 1, mask=n > 0, other=0) >> 1
    last = tl.load(base + C - 1) >> 1
    return token >> 1, (token & 1) == 1, carried, last
  return rows * 0, n * C + rows < T, 0, 0


@triton.jit
def _strength(beta, offset, inside, real, SIGMOID: tl.constexpr,
              ASSEMBLY: tl.constexpr):
  """Write strength of each row; 0 where a row is padding."""
  x = tl.load(beta + offset, mask=inside, other=0.0).to(tl.float32)
  if SIGMOID:
    x = _sigmoid(x, ASSEMBLY)
  return tl.where(real, tl.maximum(x, TINY), 0.0)


@triton.jit
def _inverse(lower, rows, cols, kind, IEEE: tl.constexpr):
  """(I + lower)^-1 of 64 rows, strictly lower; merges blocks of 2, 4, ... rows.

  Each merge is [[a, 0], [c, b]]^-1 = [[a', 0], [-b' c a', b']]: as stable as
  substitution, which a power series with its large terms is not. In bfloat16,
  a Newton step with the residual to 16 bits takes out the merges' rounding.
  """
  row = rows[:, None]
  col = cols[None, :]
  eye = tl.where(row == col, 1.0, 0.0)
  zero = tl.zeros([64, 64], tl.float32)
  x = eye - tl.where(row // 2 == col // 2, lower, 0.0)
  for level in tl.static_range(1, 6):
    joins = (row // (2 << level) == col // (2 << level)) & (
        row // (1 << level) != col // (1 << level))
    y = _dot(tl.where(joins, lower, 0.0).to(kind), x.to(kind), zero, IEEE)
    x = _dot((-x).to(kind), y.to(kind), x, IEEE)
  if not IEEE:
    narrow = x.to(kind)
    high = lower.to(kind)
    y = _dot(high, narrow, zero, IEEE)
    y = _dot((lower - high.to(tl.float32)).to(kind), narrow, y, IEEE)
    x = narrow.to(tl.float32)
    x = _dot(narrow, (eye - x - y).to(kind), x, IEEE)
  return x


@triton.jit
def _load(x, at, width, inside):
  """A tile of rows of an input as float32; 0 after the last token."""
  return tl.load(x + at[:, None] + width[None, :], mask=inside[:, None],
                 other=0.0).to(tl.float32)


@triton.jit
def _gate(z, rate, dt_bias, at, width, real, inside, FLOOR: tl.constexpr,
          GATE: tl.constexpr, ASSEMBLY: tl.constexpr):
  """Log2 decay of a block of channels; 0 where a row is padding."""
  x = _load(z, at, width, inside)
  if GATE:
    x += tl.load(dt_bias + width)[None, :]
    x = (FLOOR * LOG2E) * _sigmoid(rate * x, ASSEMBLY)
  else:
    x *= LOG2E
  return tl.where(real[:, None], x, 0.0)


@triton.jit
def _block(sums, r, rows, R: tl.constexpr, ASSEMBLY: tl.constexpr):
  """Decay of block r's rows as readers and of all up to it as keys.

  Both from the middle of block r; `sums` are running sums of the log2 decay.
  """
  middle = tl.sum(tl.where((rows == r * R + R // 2)[:, None], sums, 0.0), 0)
  d = sums - middle[None, :]
  up = _exp2(tl.where((rows // R == r)[:, None], d, -1000.0), ASSEMBLY)
  down = _exp2(tl.where((rows < (r + 1) * R)[:, None], -d, -1000.0), ASSEMBLY)
  return up, down


@triton.jit
def _ends(sums, total, document, carried, last, DOCUMENTS: tl.constexpr,
          ASSEMBLY: tl.constexpr):
  """Decay from the chunk's start, to its end, and over all of it."""
  read = _exp2(sums, ASSEMBLY)
  write = _exp2(total[None, :] - sums, ASSEMBLY)
  whole = _exp2(total, ASSEMBLY)
  if DOCUMENTS:
    read = tl.where((document == carried)[:, None], read, 0.0)
    write = tl.where((document == last)[:, None], write, 0.0)
    whole = tl.where(carried == last, whole, 0.0)
  return read, write, whole


@triton.jit
def solve(
    # inputs
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    z,  # [B, T, G, K]
    beta,  # [B, T, G]
    a_log,  # [G]
    dt_bias,  # [G, K]
    code,  # [B, N * C]
    # outputs
    mix,  # [B, G, N, C, C]: A
    inverse,  # [B, G, N, C, C]: M
    scales,  # [B, G, N, 2, C]: factors of the rows of q and k
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FLOOR: tl.constexpr,
    SCALE: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    SIGMOID: tl.constexpr, DOCUMENTS: tl.constexpr, IEEE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
  """How the tokens of one chunk of one head meet each other."""
  g = tl.program_id(0)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = mix.dtype.element_ty
  rows = tl.arange(0, C)
  cols = tl.arange(0, C)
  t = n * C + rows
  inside = t < T
  document, real, _, _ = _documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  q += ((b * T + n * C) * H + g // (G // H)) * K
  k += ((b * T + n * C) * H + g // (G // H)) * K
  z += token * K
  at_q = rows * (H * K)
  at_z = rows * (G * K)
  dt_bias += g * K
  rate = tl.exp2(LOG2E * tl.load(a_log + g))

  a = tl.zeros([C, C], tl.float32)
  p = tl.zeros([C, C], tl.float32)
  q_square = tl.zeros([C], tl.float32)
  k_square = tl.zeros([C], tl.float32)
  for block in tl.range(0, K // BK, num_stages=1):
    width = block * BK + tl.arange(0, BK)
    x = _gate(z, rate, dt_bias, at_z, width, real, inside, FLOOR, GATE,
              ASSEMBLY)
    q_tile = _load(q, at_q, width, inside)
    k_tile = _load(k, at_q, width, inside)
    if NORM:
      q_square += tl.sum(q_tile * q_tile, 1)
      k_square += tl.sum(k_tile * k_tile, 1)
    x = _sums(x, rows[:, None] >= cols[None, :], IEEE, ASSEMBLY)
    for r in tl.range(0, C // R, num_stages=1):
      up, down = _block(x, r, rows, R, ASSEMBLY)
      k_down = tl.trans((k_tile * down).to(kind))
      a = _dot((q_tile * up).to(kind), k_down, a, IEEE)
      p = _dot((k_tile * up).to(kind), k_down, p, IEEE)
  q_scale = q_square * 0.0 + 1.0
  k_scale = q_scale
  if NORM:
    q_scale = tl.rsqrt(q_square + 1e-6)
    k_scale = tl.rsqrt(k_square + 1e-6)
  tile = (b * G + g) * N + n
  tl.store(scales + tile * (2 * C) + rows, q_scale)
  tl.store(scales + tile * (2 * C) + C + rows, k_scale)
  q_scale = tl.where(real, q_scale * SCALE, 0.0)
  pair = rows[:, None] >= cols[None, :]
  if DOCUMENTS:
    column, _, _, _ = _documents(code, b, n, T, N, C, DOCUMENTS)
    pair = pair & (document[:, None] == column[None, :])
  mix += tile * (C * C)
  inverse += tile * (C * C)
  to = rows[:, None] * C + cols[None, :]
  a = tl.where(pair, a * q_scale[:, None] * k_scale[None, :], 0.0)
  tl.store(mix + to, a.to(kind))
  strength = _strength(beta + token, rows * G, inside, real, SIGMOID, ASSEMBLY)
  p = tl.where(pair & (rows[:, None] > cols[None, :]),
               p * (k_scale * strength)[:, None] * k_scale[None, :], 0.0)
  m = _inverse(p, rows, cols, kind, IEEE)
  tl.store(inverse + to, (m * strength[None, :]).to(kind))


@triton.jit
def expand(
    # inputs
    q, k, z, a_log, dt_bias, code,
    v,  # [B, T, G, V]: values; in the backward pass the cotangent of o
    mix,  # [B, G, N, C, C]: A
    inverse,  # [B, G, N, C, C]: M
    scales,  # [B, G, N, 2, C]
    # outputs
    w,  # [B, G, N, C, K]
    u,  # [B, G, N, C, V]: M v; in the backward pass A^T do
    q_g,  # [B, G, N, C, K]
    k_g,  # [B, G, N, C, K]
    gamma,  # [B, G, N, K]
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FLOOR: tl.constexpr,
    SCALE: tl.constexpr, GATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    BACKWARD: tl.constexpr, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
  """How the tokens of one chunk of one head meet the state."""
  g = tl.program_id(0)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = w.dtype.element_ty
  rows = tl.arange(0, C)
  cols = tl.arange(0, C)
  t = n * C + rows
  inside = t < T
  document, real, carried, last = _documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  q += ((b * T + n * C) * H + g // (G // H)) * K
  k += ((b * T + n * C) * H + g // (G // H)) * K
  z += token * K
  at_q = rows * (H * K)
  at_z = rows * (G * K)
  dt_bias += g * K
  rate = tl.exp2(LOG2E * tl.load(a_log + g))
  tile = (b * G + g) * N + n
  at_mix = rows[:, None] * C + cols[None, :]
  mix += tile * (C * C)
  inverse += tile * (C * C)
  v += token * V
  w += tile * (C * K)
  q_g += tile * (C * K)
  k_g += tile * (C * K)
  gamma += tile * K
  u += tile * (C * V)

  q_scale = tl.load(scales + tile * (2 * C) + rows) * SCALE
  q_scale = tl.where(real, q_scale, 0.0)
  k_scale = tl.load(scales + tile * (2 * C) + C + rows)
  m = tl.load(inverse + at_mix)
  for block in tl.range(0, K // BK, num_stages=1):
    width = block * BK + tl.arange(0, BK)
    x = _gate(z, rate, dt_bias, at_z, width, real, inside, FLOOR, GATE,
              ASSEMBLY)
    total = tl.sum(x, 0)
    x = _sums(x, rows[:, None] >= cols[None, :], IEEE, ASSEMBLY)
    read, write, whole = _ends(x, total, document, carried, last, DOCUMENTS,
                               ASSEMBLY)
    tl.store(gamma + width, whole)
    to = rows[:, None] * K + width[None, :]
    q_tile = _load(q, at_q, width, inside)
    tl.store(q_g + to, (q_tile * q_scale[:, None] * read).to(kind))
    k_tile = _load(k, at_q, width, inside) * k_scale[:, None]
    tl.store(k_g + to, (k_tile * write).to(kind))
    y = _dot(m, (k_tile * read).to(kind), tl.zeros([C, BK], tl.float32), IEEE)
    tl.store(w + to, y.to(kind))

  if BACKWARD:
    m = tl.trans(tl.load(mix + at_mix))
  for block in tl.range(0, V // BV, num_stages=1):
    width = block * BV + tl.arange(0, BV)
    x = _load(v, rows * (G * V), width, inside).to(kind)
    y = _dot(m, x, tl.zeros([C, BV], tl.float32), IEEE)
    tl.store(u + rows[:, None] * V + width[None, :],
             y.to(kind))


@triton.jit
def forward(
    # inputs: of `solve` and `expand`, and the state before the first token
    w, u, q_g, k_g, gamma, mix,
    first,  # [B, G, K, V]
    # outputs
    o,  # [B, T, G, V]
    final,  # [B, G, K, V]
    states,  # [B, G, N, K, V], where SAVE
    writes,  # [B, G, N, C, V]: u, where SAVE
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, SAVE: tl.constexpr,
    IEEE: tl.constexpr, STAGES: tl.constexpr,
):
  """Walks the chunks of one head and one block of its value columns."""
  width = tl.program_id(0) * BV + tl.arange(0, BV)
  g = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = w.dtype.element_ty
  rows = tl.arange(0, C)
  keys = tl.arange(0, K)
  head = b * G + g
  at_state = keys[:, None] * V + width[None, :]
  at_key = rows[:, None] * K + keys[None, :]
  at_value = rows[:, None] * V + width[None, :]
  at_o = rows[:, None] * (G * V) + width[None, :]
  at_mix = rows[:, None] * C + tl.arange(0, C)[None, :]
  s = tl.load(first + head * (K * V) + at_state)
  for n in tl.range(0, N, num_stages=STAGES):
    tile = head * N + n
    narrow = s.to(kind)
    if SAVE:
      tl.store(states + tile * (K * V) + at_state, narrow)
    w_tile = tl.load(w + tile * (C * K) + at_key)
    u_tile = tl.load(u + tile * (C * V) + at_value).to(tl.float32)
    q_tile = tl.load(q_g + tile * (C * K) + at_key)
    k_tile = tl.load(k_g + tile * (C * K) + at_key)
    mix_tile = tl.load(mix + tile * (C * C) + at_mix)
    decay = tl.load(gamma + tile * K + keys)
    zero = tl.zeros([C, BV], tl.float32)
    u_tile = (u_tile - _dot(w_tile, narrow, zero, IEEE)).to(kind)
    s = _dot(tl.trans(k_tile), u_tile, s * decay[:, None], IEEE)
    y = _dot(q_tile, narrow, zero, IEEE)
    y = _dot(mix_tile, u_tile, y, IEEE)
    if SAVE:
      tl.store(writes + tile * (C * V) + at_value, u_tile)
    t = n * C + rows
    tl.store(o + ((b * T + n * C) * G + g) * V + at_o,
             y.to(o.dtype.element_ty), mask=(t < T)[:, None])
  tl.store(final + head * (K * V) + at_state, s)


@triton.jit
def reverse(
    # inputs: of `expand`, and the cotangents of o and of the final state
    w, q_g, k_g, gamma,
    local,  # [B, G, N, C, V]: A^T do
    do,  # [B, T, G, V]
    d_final,  # [B, G, K, V]
    # outputs
    d_states,  # [B, G, N, K, V]: of the state after each chunk
    d_writes,  # [B, G, N, C, V]
    d_first,  # [B, G, K, V]
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr,
):
  """`forward`'s recurrence transposed, from the last chunk to the first."""
  width = tl.program_id(0) * BV + tl.arange(0, BV)
  g = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = w.dtype.element_ty
  rows = tl.arange(0, C)
  keys = tl.arange(0, K)
  head = b * G + g
  at_state = keys[:, None] * V + width[None, :]
  at_key = rows[:, None] * K + keys[None, :]
  at_value = rows[:, None] * V + width[None, :]
  at_o = rows[:, None] * (G * V) + width[None, :]
  ds = tl.load(d_final + head * (K * V) + at_state)
  for step in tl.range(0, N, num_stages=STAGES):
    n = N - 1 - step
    tile = head * N + n
    narrow = ds.to(kind)
    tl.store(d_states + tile * (K * V) + at_state, narrow)
    w_tile = tl.load(w + tile * (C * K) + at_key)
    q_tile = tl.load(q_g + tile * (C * K) + at_key)
    k_tile = tl.load(k_g + tile * (C * K) + at_key)
    local_tile = tl.load(local + tile * (C * V) + at_value).to(tl.float32)
    decay = tl.load(gamma + tile * K + keys)
    t = n * C + rows
    do_tile = tl.load(
        do + ((b * T + n * C) * G + g) * V + at_o,
        mask=(t < T)[:, None], other=0.0).to(kind)
    du = _dot(k_tile, narrow, local_tile, IEEE)
    tl.store(d_writes + tile * (C * V) + at_value, du.to(kind))
    ds = _dot(tl.trans(q_tile), do_tile, ds * decay[:, None], IEEE)
    ds = _dot(tl.trans(w_tile), (-du).to(kind), ds, IEEE)
  tl.store(d_first + head * (K * V) + at_state, ds)


@triton.jit
def meet(
    # inputs
    v, beta, code,
    o,  # [B, T, G, V]
    do,  # [B, T, G, V]
    writes,  # [B, G, N, C, V]
    d_writes,  # [B, G, N, C, V]
    inverse,  # [B, G, N, C, C]: M
    # outputs
    dv,  # [B, T, G, V]: also the cotangent of v - (k e^G) S
    d_beta,  # [B, T, G]
    d_mix,  # [B, G, N, C, C]: of A
    d_pair,  # [B, G, N, C, C]: of P
    along,  # [B, G, N, 2, C]: products of q and k with their cotangents
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, SIGMOID: tl.constexpr,
    DOCUMENTS: tl.constexpr, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
  """Gradients of `solve`'s results, of the values and of beta."""
  g = tl.program_id(0)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = inverse.dtype.element_ty
  rows = tl.arange(0, C)
  cols = tl.arange(0, C)
  t = n * C + rows
  inside = t < T
  document, real, _, _ = _documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  v += token * V
  o += token * V
  do += token * V
  dv += token * V
  at_o = rows * (G * V)
  tile = (b * G + g) * N + n
  at_mix = rows[:, None] * C + cols[None, :]
  writes += tile * (C * V)
  d_writes += tile * (C * V)
  inverse += tile * (C * C)
  d_mix += tile * (C * C)
  d_pair += tile * (C * C)
  m = tl.load(inverse + at_mix)
  da = tl.zeros([C, C], tl.float32)
  dp = tl.zeros([C, C], tl.float32)
  d_strength = tl.zeros([C], tl.float32)
  q_along = tl.zeros([C], tl.float32)
  k_along = tl.zeros([C], tl.float32)
  for block in tl.range(0, V // BV, num_stages=1):
    width = block * BV + tl.arange(0, BV)
    at_value = rows[:, None] * V + width[None, :]
    du = tl.load(d_writes + at_value)
    u = tl.load(writes + at_value)
    do_tile = _load(do, at_o, width, inside)
    q_along += tl.sum(do_tile * _load(o, at_o, width, inside), 1)
    do_tile = do_tile.to(kind)
    e = _dot(tl.trans(m), du, tl.zeros([C, BV], tl.float32), IEEE)
    d_strength += tl.sum(e * u.to(tl.float32), 1)
    k_along -= tl.sum(e * _load(v, at_o, width, inside), 1)
    da = _dot(do_tile, tl.trans(u), da, IEEE)
    dp = _dot(e.to(kind), tl.trans(u), dp, IEEE)
    tl.store(dv + at_o[:, None] + width[None, :], e.to(dv.dtype.element_ty),
             mask=inside[:, None])
  pair = (rows[:, None] >= cols[None, :]) & real[:, None]
  if DOCUMENTS:
    column, _, _, _ = _documents(code, b, n, T, N, C, DOCUMENTS)
    pair = pair & (document[:, None] == column[None, :])
  tl.store(d_mix + at_mix, tl.where(pair, da, 0.0).to(kind))
  tl.store(d_pair + at_mix, tl.where(
      pair & (rows[:, None] > cols[None, :]), -dp, 0.0).to(kind))
  # With T = (I + diag(beta) P)^-1, e is diag(beta) T^T du and d beta_i is
  # (T^T du)_i u_i / beta_i. What a normalised row's cotangent is along the row
  # itself follows from o being linear in q, and u in what k reads and writes.
  strength = _strength(beta + token, rows * G, inside, real, SIGMOID, ASSEMBLY)
  d_strength /= tl.where(real, strength, 1.0)
  tl.store(along + tile * (2 * C) + rows, tl.where(real, q_along, 0.0))
  tl.store(along + tile * (2 * C) + C + rows,
           tl.where(real, k_along + 2.0 * d_strength, 0.0))
  if SIGMOID:
    d_strength *= 1.0 - strength
  else:
    d_strength /= tl.where(real, strength, 1.0)
  tl.store(d_beta + token + rows * G, tl.where(real, d_strength, 0.0),
           mask=inside)


@triton.jit
def gradient(
    # inputs
    q, k, z, a_log, dt_bias, code,
    do,  # [B, T, G, V]
    dv,  # [B, T, G, V]
    states,  # [B, G, N, K, V]: before each chunk
    d_states,  # [B, G, N, K, V]: cotangent of the state after it
    writes,  # [B, G, N, C, V]
    d_mix,  # [B, G, N, C, C]
    d_pair,  # [B, G, N, C, C]
    scales,  # [B, G, N, 2, C]
    along,  # [B, G, N, 2, C]
    # outputs
    dq,  # [B, T, G, K]
    dk,  # [B, T, G, K]
    dz,  # [B, T, G, K]
    d_rate,  # [B, N, G, K / BK]
    d_bias,  # [B, N, G, K]
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FLOOR: tl.constexpr,
    SCALE: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    DOCUMENTS: tl.constexpr, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
  """Gradients of q, k and the gate for one chunk and a block of channels."""
  part = tl.program_id(0) % (K // BK)
  g = tl.program_id(0) // (K // BK)
  n = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = d_mix.dtype.element_ty
  rows = tl.arange(0, C)
  cols = tl.arange(0, C)
  inside = n * C + rows < T
  document, real, carried, last = _documents(code, b, n, T, N, C, DOCUMENTS)
  token = (b * T + n * C) * G + g
  q += ((b * T + n * C) * H + g // (G // H)) * K
  k += ((b * T + n * C) * H + g // (G // H)) * K
  z += token * K
  do += token * V
  dv += token * V
  at_q = rows * (H * K)
  at_z = rows * (G * K)
  at_o = rows * (G * V)
  dt_bias += g * K
  tile = (b * G + g) * N + n
  at_mix = rows[:, None] * C + cols[None, :]
  states += tile * (K * V)
  d_states += tile * (K * V)
  writes += tile * (C * V)
  keys = part * BK + tl.arange(0, BK)

  dq_tile = tl.zeros([C, BK], tl.float32)
  dk_read = tl.zeros([C, BK], tl.float32)
  dk_write = tl.zeros([C, BK], tl.float32)
  d_gamma = tl.zeros([BK], tl.float32)
  for block in tl.range(0, V // BV, num_stages=1):
    width = block * BV + tl.arange(0, BV)
    at_state = keys[:, None] * V + width[None, :]
    s = tl.load(states + at_state)
    ds = tl.load(d_states + at_state)
    do_tile = _load(do, at_o, width, inside).to(kind)
    dv_tile = _load(dv, at_o, width, inside).to(kind)
    u = tl.load(writes + rows[:, None] * V + width[None, :])
    d_gamma += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    dq_tile = _dot(do_tile, tl.trans(s), dq_tile, IEEE)
    dk_read = _dot(dv_tile, tl.trans(s), dk_read, IEEE)
    dk_write = _dot(u, tl.trans(ds), dk_write, IEEE)
  rate = tl.exp2(LOG2E * tl.load(a_log + g))
  x = _gate(z, rate, dt_bias, at_z, keys, real, inside, FLOOR, GATE, ASSEMBLY)
  total = tl.sum(x, 0)
  x = _sums(x, rows[:, None] >= cols[None, :], IEEE, ASSEMBLY)
  read, write, whole = _ends(x, total, document, carried, last, DOCUMENTS,
                             ASSEMBLY)
  dq_tile = tl.where(real[:, None], dq_tile * (read * SCALE), 0.0)
  dk_read *= -read
  dk_write *= write
  q_scale = tl.load(scales + tile * (2 * C) + rows)
  k_scale = tl.load(scales + tile * (2 * C) + C + rows)
  q_tile = _load(q, at_q, keys, inside) * q_scale[:, None]
  k_tile = _load(k, at_q, keys, inside) * k_scale[:, None]
  d_last = tl.sum(k_tile * dk_write, 0) + whole * d_gamma
  # Reading sees +G and writing -G; g of a token enters every later G. A pair
  # of tokens must enter both sides with the same rounding: the two cancel in
  # every g before the pair.
  d = q_tile * dq_tile + k_tile * (dk_read - dk_write)
  dk_read += dk_write
  da = tl.load(d_mix + tile * (C * C) + at_mix)
  dp = tl.load(d_pair + tile * (C * C) + at_mix)
  for r in tl.range(0, C // R, num_stages=1):
    up, down = _block(x, r, rows, R, ASSEMBLY)
    zero = tl.zeros([C, BK], tl.float32)
    q_up = (q_tile * (up * SCALE)).to(kind)
    k_up = (k_tile * up).to(kind)
    k_down = (k_tile * down).to(kind)
    y = _dot(da, k_down, zero, IEEE)
    d += q_up * y
    dq_tile += (up * SCALE) * y
    y = _dot(dp, k_down, zero, IEEE)
    d += k_up * y
    dk_read += up * y
    y = _dot(tl.trans(da), q_up, zero, IEEE)
    y = _dot(tl.trans(dp), k_up, y, IEEE)
    d -= k_down * y
    dk_read += down * y
  if NORM:  # back through x / |x|
    dq_tile -= q_tile * tl.load(along + tile * (2 * C) + rows)[:, None]
    dk_read -= k_tile * tl.load(along + tile * (2 * C) + C + rows)[:, None]
  to = token * K + at_z[:, None] + keys[None, :]
  tl.store(dq + to, (dq_tile * q_scale[:, None]).to(dq.dtype.element_ty),
           mask=inside[:, None])
  tl.store(dk + to, (dk_read * k_scale[:, None]).to(dk.dtype.element_ty),
           mask=inside[:, None])
  d = _sums(d, rows[:, None] <= cols[None, :], IEEE, ASSEMBLY)
  d = tl.where(real[:, None], d + d_last[None, :], 0.0)
  if GATE:
    y = _load(z, at_z, keys, inside) + tl.load(dt_bias + keys)[None, :]
    slope = _sigmoid(rate * y, ASSEMBLY)
    d = d * (FLOOR * rate) * slope * (1.0 - slope)
    row = (b * N + n) * G + g
    tl.store(d_bias + row * K + keys, tl.sum(d, 0))
    tl.store(d_rate + row * (K // BK) + part, tl.sum(tl.sum(d * y, 1), 0))
  tl.store(dz + to, d.to(dz.dtype.element_ty), mask=inside[:, None])
