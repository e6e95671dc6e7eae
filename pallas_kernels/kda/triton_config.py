"""Block sizes of the Triton kernels: by shape, measured ones first."""
import dataclasses
import functools
import json
import logging
import pathlib

import numpy as np

CHUNK = 64
TUNED = pathlib.Path(__file__).parent.parent / "tuned"

ALLOWED = dict(
    value_block=(16, 32, 64, 128), pass_warps=(4, 8), pass_stages=(1, 2, 3, 4),
    prepare_keys=(16, 32, 64), prepare_warps=(4, 8),
    prepare_stages=(1, 2, 3, 4), gradient_keys=(16, 32, 64),
    gradient_warps=(4, 8), gradient_stages=(1, 2))

_guessed = set()  # shapes whose lack of a measurement has been logged


@dataclasses.dataclass(frozen=True)
class Config:
  """Blocks and warps of each kernel.

  Attributes:
    value_block: value columns of a program of the sequential kernels.
    pass_warps: warps of a program of the sequential kernels.
    pass_stages: chunks in flight in their loads.
    prepare_keys: channels that `prepare` holds at a time.
    prepare_warps: its warps.
    prepare_stages: blocks of channels in flight in its loads.
    gradient_keys: channels that `gradient` holds at a time.
    gradient_warps: its warps.
    gradient_stages: blocks of channels in flight in its loads.
  """
  value_block: int = 32
  pass_warps: int = 4
  pass_stages: int = 3
  prepare_keys: int = 32
  prepare_warps: int = 4
  prepare_stages: int = 4
  gradient_keys: int = 32
  gradient_warps: int = 4
  gradient_stages: int = 1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value not in ALLOWED[field.name]:
        raise ValueError(
            f"{field.name}={value} is none of {ALLOWED[field.name]}")


def key(batch, time, heads, key_width, value_width, dtype):
  """Name of a shape in a tuned file."""
  return f"B{batch} T{time} H{heads} K{key_width} V{value_width} {dtype}"


def choose(device, batch, time, heads, key_width, value_width, dtype,
           capability=(9, 0)):
  """The measured config of a shape on a device, or the heuristic's."""
  name = key(batch, time, heads, key_width, value_width, dtype)
  rows = read(device)
  if name in rows:
    return Config(**rows[name]["config"])
  if (device, name) not in _guessed:
    _guessed.add((device, name))
    logging.getLogger(__name__).info(
        "kda: no tuned blocks for %s on %s; using the heuristic", name, device)
  return heuristic(key_width, value_width, dtype, capability)


def heuristic(key_width, value_width, dtype, capability=(9, 0)):
  """A config that fits shared memory for any supported shape.

  Before Hopper that is 100 KB (Ada): a chunk's matrices take 68.
  """
  wide = dtype == "float32"
  deep = not wide and key_width <= 128 and capability >= (9, 0)
  return Config(
      value_block=16 if wide or key_width > 128 else min(32, value_width),
      pass_stages=1 if wide or key_width > 128 else 3 if deep else 2,
      prepare_keys=16 if wide else 32, prepare_stages=4 if deep else 1,
      gradient_keys=16 if wide or key_width > 128 else 32)


def capability_of(device):
  """Compute capability of a GPU, (9, 0) for Hopper; (0, 0) if unknown."""
  numbers = str(getattr(device, "compute_capability", "0.0")).split(".")
  return tuple(map(int, numbers))


def candidates():
  """What `pallas_kernels.tune` tries, one kernel after the other."""
  return [[dict(prepare_keys=keys, prepare_stages=stages)
           for keys, stages in ((32, 4), (32, 3), (16, 4))],
          [dict(value_block=block, pass_stages=stages)
           for block, stages in ((32, 3), (32, 2), (16, 3))],
          [dict(gradient_keys=keys, gradient_stages=stages)
           for keys in (16, 32) for stages in (1, 2)]]


def path(device):
  """The tuned file of a device: "NVIDIA H200" is nvidia_h200.json."""
  return TUNED / f"{device.lower().replace(' ', '_')}.json"


@functools.cache
def read(device):
  """Rows of a device's tuned file; none if it has no file."""
  if not path(device).exists():
    return {}
  return json.loads(path(device).read_text())["kda"]


@functools.cache
def sums_of_decay():
  """Which log decays each exponent of a token sums up, [4, C, C].

  From the chunk's start up to the token; after the token to the chunk's end;
  from the middle of the token's half up to it; from it up to the middle of the
  second half. A middle is half-way through its token.
  """
  i, j = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]
  before = (j <= i) * 1.0
  half = CHUNK // 2
  middle = i // half * half + half // 2
  up = before - (j < middle) - 0.5 * (j == middle)
  last = half + half // 2
  far = (j < last) + 0.5 * (j == last) - before
  return np.stack([before, 1.0 - before, up, far]).astype(np.float16)
