"""Rotary position for latent layers, and its scaling to longer contexts.

Pairs of channels turn with the token's position, so that the product of a
query and a key depends on how far apart they are. Nothing here is a
parameter: the same weights run with another base or factor, which is how a
later stage of training reads a longer context.
"""
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Of YaRN: a pair that turns more often than FAST in the old context keeps its
# speed, one that turns less often than SLOW is interpolated.
FAST, SLOW = 32, 1


class Rotary(NamedTuple):
  """How fast each pair of channels turns.

  Attributes:
    base: pair i of U channels turns by base^(-2i/U) radians a token.
    scaling: "none"; "linear" divides all speeds by `factor`; "yarn" divides
      the slow ones' only and sharpens the softmax (arXiv 2309.00071, 3.2-3.4).
    factor: the longer context over the one before, at least 1.
    context: tokens of the context before, which yarn counts turns in.
  """
  base: float = 10_000.
  scaling: str = "none"
  factor: float = 1.
  context: int = 4_096

  def speeds(self, width: int):
    """Returns radians a token of each pair of `width` channels, float64."""
    if width % 2:
      raise ValueError(f"{width=} is odd: channels turn in pairs")
    speed = float(self.base) ** -(np.arange(0, width, 2) / width)
    if self.scaling == "none":
      return speed
    if self.scaling == "linear":
      return speed / self.factor
    if self.scaling == "yarn":
      turns = self.context * speed / (2 * np.pi)
      keep = np.clip((turns - SLOW) / (FAST - SLOW), 0, 1)
      return keep * speed + (1 - keep) * speed / self.factor
    raise ValueError(f"scaling={self.scaling!r} is none of 'none', 'linear', "
                     "'yarn'")

  def logit_scale(self) -> float:
    """Returns what the softmax's logits are multiplied with: yarn's 1 / t."""
    if self.scaling != "yarn":
      return 1.
    return (0.1 * math.log(self.factor) + 1) ** 2


def rotate(x, positions_BT, rotary: Rotary):
  """Turns channel pairs (i, i + U / 2) by position times speed.

  Angles are counted in 2^-32 of a turn, by integers that wrap around: exact
  differences at any position, where float32 would be off by 0.03 radians at a
  million. A speed is rounded by 2^-33 turns a token at most, so 1e-3 radians
  at a million, the same for queries and keys.

  Args:
    x: [B, T, U] or [B, T, H, U].
    positions_BT: from 0 on.
    rotary: base and scaling.

  Returns:
    y: shape and dtype of `x`; computed in float32.
  """
  width = x.shape[-1]
  speed_U = np.round(rotary.speeds(width) / (2 * np.pi) * 2.**32)
  turn_BTU = positions_BT[..., None].astype(jnp.uint32) * speed_U.astype(
      np.uint32)[None, None]
  angle = jax.lax.bitcast_convert_type(turn_BTU, jnp.int32).astype(
      jnp.float32) * np.float32(2 * np.pi / 2.**32)
  if x.ndim == 4:
    angle = angle[:, :, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos],
                         -1).astype(x.dtype)
