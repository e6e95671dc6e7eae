"""The Triton kernels of KDA that walk along the sequence, one way and back.

With the matrices of `triton_intra.prepare` a chunk takes the state S to

  u = M (v - (k e^G) S);  o = (q e^G) S + A u;  S <- e^G_C S + (k e^(G_C-G))^T u

Only these two kernels are sequential: a program holds a block of the state's
value columns, which do not meet each other.
"""
import triton
import triton.language as tl

from pallas_kernels.kda.triton_tile import dot, product


@triton.jit
def forward(
    # inputs: of `prepare`, values, the state before the first token
    q_read, k_read, k_write, gamma, mix, inverse,
    v,  # [B, T, G, V]
    first,  # [B, G, K, V]
    # outputs
    o,  # [B, T, G, V]
    final,  # [B, G, K, V]
    states,  # [B, G, N, K, V]: before each chunk, where SAVE
    writes,  # [B, G, N, C, V]: u, where SAVE
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, SAVE: tl.constexpr,
    IEEE: tl.constexpr, STAGES: tl.constexpr,
):
  """Walks the chunks of one head and one block of its value columns."""
  width = tl.program_id(0) * BV + tl.arange(0, BV)
  g = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = mix.dtype.element_ty
  rows = tl.arange(0, C)
  keys = tl.arange(0, K)
  head = b * G + g
  at_state = keys[:, None] * V + width[None, :]
  at_key = rows[:, None] * K + keys[None, :]
  at_write = rows[:, None] * V + width[None, :]
  at_value = rows[:, None] * (G * V) + width[None, :]
  at_mix = rows[:, None] * C + rows[None, :]
  s = tl.load(first + head * (K * V) + at_state)
  # Pointers move by a constant: fewer instructions than new addresses.
  q_read += head * (N * C * K) + at_key
  k_read += head * (N * C * K) + at_key
  k_write += head * (N * C * K) + at_key
  gamma += head * (N * K) + keys
  mix += head * (N * C * C) + at_mix
  inverse += head * (N * C * C) + at_mix
  v += (b * T * G + g) * V + at_value
  o += (b * T * G + g) * V + at_value
  if SAVE:
    states += head * (N * K * V) + at_state
    writes += head * (N * C * V) + at_write
  for n in tl.range(0, N, num_stages=STAGES):
    inside = (n * C + rows < T)[:, None]
    narrow = s.to(kind)
    k_tile = tl.load(k_read)
    if T % C == 0:
      v_tile = tl.load(v)
    else:
      v_tile = tl.load(v, mask=inside, other=0.0)
    m_tile = tl.load(inverse)
    u_tile = v_tile.to(tl.float32) - product(k_tile, narrow, IEEE)
    u_tile = product(m_tile, u_tile.to(kind), IEEE).to(kind)
    k_tile = tl.load(k_write)
    decay = tl.load(gamma)
    s = dot(tl.trans(k_tile), u_tile, s * decay[:, None], IEEE)
    q_tile = tl.load(q_read)
    a_tile = tl.load(mix)
    y = product(q_tile, narrow, IEEE)
    y = dot(a_tile, u_tile, y, IEEE)
    if SAVE:
      tl.store(states, narrow)
      tl.store(writes, u_tile)
      states += K * V
      writes += C * V
    if T % C == 0:
      tl.store(o, y.to(o.dtype.element_ty))
    else:
      tl.store(o, y.to(o.dtype.element_ty), mask=inside)
    q_read += C * K
    k_read += C * K
    k_write += C * K
    gamma += K
    mix += C * C
    inverse += C * C
    v += C * G * V
    o += C * G * V
  tl.store(final + head * (K * V) + at_state, s)


@triton.jit
def reverse(
    # inputs: of `prepare`, and the cotangents of o and of the final state
    q_read, k_read, k_write, gamma, mix, inverse,
    do,  # [B, T, G, V]
    d_final,  # [B, G, K, V]
    # outputs
    dv,  # [B, T, G, V]: also the cotangent of v - (k e^G) S
    d_states,  # [B, G, N, K, V]: of the state after each chunk
    d_first,  # [B, G, K, V]
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr,
):
  """`forward`'s recurrence transposed, from the last chunk to the first."""
  width = tl.program_id(0) * BV + tl.arange(0, BV)
  g = tl.program_id(1)
  b = tl.program_id(2).to(tl.int64)
  kind = mix.dtype.element_ty
  rows = tl.arange(0, C)
  keys = tl.arange(0, K)
  head = b * G + g
  at_state = keys[:, None] * V + width[None, :]
  at_key = rows[:, None] * K + keys[None, :]
  at_value = rows[:, None] * (G * V) + width[None, :]
  at_mix = rows[:, None] * C + rows[None, :]
  ds = tl.load(d_final + head * (K * V) + at_state)
  end = head * N + N - 1
  q_read += end * (C * K) + at_key
  k_read += end * (C * K) + at_key
  k_write += end * (C * K) + at_key
  gamma += end * K + keys
  mix += end * (C * C) + at_mix
  inverse += end * (C * C) + at_mix
  do += ((b * T + (N - 1) * C) * G + g) * V + at_value
  dv += ((b * T + (N - 1) * C) * G + g) * V + at_value
  d_states += end * (K * V) + at_state
  for step in tl.range(0, N, num_stages=STAGES):
    inside = ((N - 1 - step) * C + rows < T)[:, None]
    narrow = ds.to(kind)
    a_tile = tl.load(mix)
    if T % C == 0:
      do_tile = tl.load(do).to(kind)
    else:
      do_tile = tl.load(do, mask=inside, other=0.0).to(kind)
    k_tile = tl.load(k_write)
    m_tile = tl.load(inverse)
    du = product(tl.trans(a_tile), do_tile, IEEE)
    du = dot(k_tile, narrow, du, IEEE)
    e = product(tl.trans(m_tile), du.to(kind), IEEE)
    q_tile = tl.load(q_read)
    k_tile = tl.load(k_read)
    decay = tl.load(gamma)
    ds = dot(tl.trans(q_tile), do_tile, ds * decay[:, None], IEEE)
    ds = dot(tl.trans(k_tile), (-e).to(kind), ds, IEEE)
    tl.store(d_states, narrow)
    if T % C == 0:
      tl.store(dv, e.to(dv.dtype.element_ty))
    else:
      tl.store(dv, e.to(dv.dtype.element_ty), mask=inside)
    q_read -= C * K
    k_read -= C * K
    k_write -= C * K
    gamma -= K
    mix -= C * C
    inverse -= C * C
    do -= C * G * V
    dv -= C * G * V
    d_states -= K * V
  tl.store(d_first + head * (K * V) + at_state, ds)
