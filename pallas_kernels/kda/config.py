"""Sizes of the chunked algorithm, and the bound that makes it safe."""
import math

import numpy as np

CHUNK = 64  # tokens whose interactions are dense matmuls
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
