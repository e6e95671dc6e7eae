"""Block sizes of the Triton kernels: by shape, measured ones first."""
import dataclasses
import functools
import json
import logging
import pathlib

TUNED = pathlib.Path(__file__).parent.parent / "tuned"

_guessed = set()  # shapes whose lack of a measurement has been logged


@dataclasses.dataclass(frozen=True)
class Config:
  """Blocks and warps of each kernel.

  Attributes:
    tile: tokens that share a reference decay; |floor| * tile / 2 < 88.
    value_block: value columns of a program of the sequential kernels.
    pass_warps: warps of a program of the sequential kernels.
    pass_stages: chunks in flight in their loads.
  """
  tile: int = 32
  value_block: int = 32
  pass_warps: int = 4
  pass_stages: int = 3

  def __post_init__(self):
    for name, allowed in (
        ("tile", (16, 32)), ("value_block", (16, 32, 64, 128)),
        ("pass_warps", (4, 8)), ("pass_stages", (1, 2, 3, 4))):
      if getattr(self, name) not in allowed:
        raise ValueError(f"{name}={getattr(self, name)} is none of {allowed}")


def key(batch, time, heads, key_width, value_width, dtype):
  """Name of a shape in a tuned file."""
  return f"B{batch} T{time} H{heads} K{key_width} V{value_width} {dtype}"


def choose(device, batch, time, heads, key_width, value_width, dtype, floor):
  """The measured config of a shape on a device, or the heuristic's."""
  name = key(batch, time, heads, key_width, value_width, dtype)
  rows = read(device)
  if name in rows:
    return Config(**rows[name]["config"])
  if (device, name) not in _guessed:
    _guessed.add((device, name))
    logging.getLogger(__name__).info(
        "kda: no tuned blocks for %s on %s; using the heuristic", name, device)
  return heuristic(key_width, value_width, dtype, floor)


def heuristic(key_width, value_width, dtype, floor):
  """A config that fits shared memory for any supported shape."""
  wide = dtype == "float32"
  return Config(
      tile=32 if floor >= -5 else 16,
      value_block=16 if wide or key_width > 128 else min(32, value_width),
      pass_stages=1 if wide or key_width > 128 else 3)


def candidates():
  """What `pallas_kernels.tune` tries, one field after the other."""
  passes = [dict(value_block=block, pass_warps=4, pass_stages=stages)
            for block in (16, 32, 64) for stages in (2, 3, 4)]
  return [dict(tile=tile) for tile in (16, 32)], passes


def path(device):
  """The tuned file of a device: "NVIDIA H200" is nvidia_h200.json."""
  return TUNED / f"{device.lower().replace(' ', '_')}.json"


@functools.cache
def read(device):
  """Rows of a device's tuned file; none if it has no file."""
  if not path(device).exists():
    return {}
  return json.loads(path(device).read_text())["kda"]
