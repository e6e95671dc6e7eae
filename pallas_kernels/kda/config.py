"""Sizes of the chunked algorithm, and the bound that makes it safe."""
import math

import jax
import numpy as np

CHUNK = 64  # tokens whose interactions are dense matmuls, at most
TILE = 16  # tokens that share one reference decay

# exp overflows float32 above this; a tile's decay ratio must stay below it.
MAX_EXPONENT = math.log(float(np.finfo(np.float32).max))


def check_floor(floor):
  """Raises unless exp(-floor * TILE), a tile's decay ratio, fits float32."""
  if floor is not None and not 0 < -floor * TILE < MAX_EXPONENT:
    raise ValueError(
        f"floor={floor} a token must be negative and at least "
        f"{-MAX_EXPONENT / TILE:.2f}: over a tile of {TILE} tokens the decay "
        f"ratio exp({-floor * TILE:g}) must fit float32; use a floor such as "
        "-5, or floor=None for the unbounded gate")


def chunk_tokens(key_width):
  """Chunk length of the plain JAX form.

  Work inside chunks grows with the chunk, work on the state with K / chunk:
  narrow heads want half a chunk.
  """
  return CHUNK if key_width > 32 else CHUNK // 2


def group_rows():
  """Tokens x heads that are worked on together, in groups of chunks.

  It bounds memory beside inputs and outputs; on a CPU it also keeps what one
  operation hands to the next inside the cache.
  """
  return 1 << 13 if jax.default_backend() == "cpu" else 1 << 16
