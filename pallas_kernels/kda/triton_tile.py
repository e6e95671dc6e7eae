"""What every Triton kernel of KDA does to the tokens of one chunk.

A chunk is 64 tokens. The decay between two of them, e^(G_i - G_j) with G the
running sum of the log decay, factors through the middle m of the half of 32
that the reader i is in: up_i down_j = e^(G_i - G_m) e^(G_m - G_j). Exponents
of one half stay within 15.5 |floor|, 86 at the lowest floor, where e^86 fits
float32 and bfloat16; where the second half reads the first, that of the key is
below 0. So all pairs of tokens are dense products, with three exponentials a
channel: up, and down for readers of the first half (`near`) and of the second
(`far`). The exponents are products too: of the log decay and the constants of
`triton_config.sums_of_decay`.

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
def exp2(x, ASSEMBLY: tl.constexpr):
  """2^x, one instruction: what would be denormal becomes 0."""
  if not ASSEMBLY:  # the interpreter knows none
    return tl.exp2(x)
  return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                   dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, ASSEMBLY: tl.constexpr):
  """1 / x, one instruction."""
  if not ASSEMBLY:
    return 1.0 / x
  return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                   dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x, ASSEMBLY: tl.constexpr):
  return reciprocal(1.0 + exp2(-LOG2E * x, ASSEMBLY), ASSEMBLY)


@triton.jit
def dot(a, b, acc, IEEE: tl.constexpr):
  """Matrix product of two tiles in their own precision, plus acc."""
  if IEEE:
    return tl.dot(a, b, acc, input_precision="ieee")
  return tl.dot(a, b, acc)


@triton.jit
def product(a, b, IEEE: tl.constexpr):
  """Matrix product of two tiles in their own precision."""
  if IEEE:
    return tl.dot(a, b, input_precision="ieee")
  return tl.dot(a, b)


@triton.jit
def rounded(x, kind):
  """float32 to the nearest bfloat16, kept as float32; ties away from 0.

  Where a value is an operand of a product and a factor beside it, this takes
  two cheap instructions and not a slow conversion there and one back.
  """
  if kind == tl.bfloat16:
    x = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    x = x.to(tl.float32, bitcast=True)
  return x


@triton.jit
def sums(keep, x, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr):
  """keep @ x in the precision of float32, for few-bit entries of keep.

  x is split in terms of bfloat16: two, or three where inputs are float32.
  """
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
def documents(code, b, n, T, N: tl.constexpr, C: tl.constexpr,
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
def pairs(code, document, real, b, n, T, N: tl.constexpr, C: tl.constexpr,
          DOCUMENTS: tl.constexpr):
  """Which tokens (columns) a token (row) may see; itself among them."""
  rows = tl.arange(0, C)
  seen = (rows[:, None] >= rows[None, :]) & real[:, None]
  if DOCUMENTS:
    column, _, _, _ = documents(code, b, n, T, N, C, DOCUMENTS)
    seen = seen & (document[:, None] == column[None, :])
  return seen


@triton.jit
def strength(beta, offset, inside, real, SIGMOID: tl.constexpr,
             ASSEMBLY: tl.constexpr):
  """Write strength of each row; 0 where a row is padding."""
  x = tl.load(beta + offset, mask=inside, other=0.0).to(tl.float32)
  if SIGMOID:
    x = sigmoid(x, ASSEMBLY)
  return tl.where(real, tl.maximum(x, TINY), 0.0)


@triton.jit
def load(x, at, width, inside):
  """A tile of rows of an input; 0 after the last token."""
  return tl.load(x + at[:, None] + width[None, :], mask=inside[:, None],
                 other=0.0)


@triton.jit
def gate(z, rate, bias, real, FLOOR: tl.constexpr, GATE: tl.constexpr,
         DOCUMENTS: tl.constexpr, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr):
  """Log2 decay of a block of channels; 0 where a row is padding.

  For bfloat16 inputs it is rounded to float16, whose 11 bits are more than
  the gate's input has, so that its sums are one exact product.
  """
  x = z.to(tl.float32)
  one = tl.where(real, 1.0, 0.0)[:, None]
  if GATE:
    x = (x + bias[None, :]) * (-LOG2E * rate)
    x = reciprocal(1.0 + exp2(x, ASSEMBLY), ASSEMBLY) * (FLOOR * LOG2E * one)
  else:
    x *= LOG2E * one
  if DOCUMENTS:  # whatever padding holds
    x = tl.where(real[:, None], x, 0.0)
  if not IEEE:
    x = x.to(tl.float16)
  return x


@triton.jit
def exponents(keep, x, IEEE: tl.constexpr, ASSEMBLY: tl.constexpr):
  """The sums of the log decay that `keep` asks for."""
  if IEEE:
    return sums(keep.to(tl.float32), x, IEEE, ASSEMBLY)
  else:
    return tl.dot(keep, x)


@triton.jit
def halves(x):
  """A tile with the rows of the first half alone, and of the second."""
  first = tl.where(tl.arange(0, x.shape[0]) < 32, 1.0, 0.0)[:, None]
  return x * first, x * (1.0 - first)
