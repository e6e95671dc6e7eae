"""The safetensors format, read a tensor at a time and distrusted.

The `safetensors` package maps whole files into memory, which counts as the
reader's until it lets go, and its errors name no tensor; so headers are read
here (github.com/huggingface/safetensors, README, "Format"). It writes them.
"""
import json
import math
import pathlib
from typing import NamedTuple

import ml_dtypes
import numpy as np

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16,
          "BF16": ml_dtypes.bfloat16, "I64": np.int64, "I32": np.int32,
          "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
ALIGNMENT = 64  # so that JAX on a CPU takes the buffer without a copy


class Refusal(ValueError):
  """A checkpoint that is not as it should be; says what to do about it."""


class Entry(NamedTuple):
  """Where a tensor is.

  Attributes:
    file: of the tensor.
    dtype: NumPy's, bfloat16 included.
    shape: of the tensor.
    begin: first byte in the file.
    size: bytes.
  """
  file: pathlib.Path
  dtype: np.dtype
  shape: tuple
  begin: int
  size: int


def entries(file) -> dict:
  """Returns {name: Entry} of a file, in the order of their bytes.

  Raises Refusal unless the tensors fill the rest of the file, without holes
  and without overlap.
  """
  file = pathlib.Path(file)
  header, data, total = _header(file)
  found = {}
  for name, fields in header.items():
    if name != "__metadata__":
      begin, size, *form = _fields(f'{file}: tensor "{name}"', fields)
      found[name] = Entry(file, *form, data + begin, size)
  found = dict(sorted(found.items(), key=lambda item: item[1][3:]))
  end, before = data, "the header"
  for name, entry in found.items():
    if entry.begin != end:
      what = "overlaps" if entry.begin < end else "leaves a hole after"
      raise Refusal(f'{file}: tensor "{name}": data_offsets begin at byte '
                    f"{entry.begin - data}, which {what} {before} that ends at "
                    f"{end - data}; the file is damaged, download it again")
    end, before = entry.begin + entry.size, f'"{name}"'
  if end != total:
    raise Refusal(f"{file}: {total} bytes, but the header speaks of {end}; the "
                  f"file is {'truncated' if end > total else 'damaged'}, "
                  "download it again")
  return found


def _header(file):
  """Returns the header, where the data begins and where the file ends."""
  total = file.stat().st_size
  with open(file, "rb") as stream:
    start = stream.read(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > min(total - 8, HEADER_BYTES_MAX):
      pickled = start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04")
      kind = ("a pickle, which can run any code" if pickled else
              "truncated, or no safetensors file")
      raise Refusal(f"{file}: header length {size} of {total} bytes: it is "
                    f"{kind}; get the safetensors of this checkpoint")
    text = stream.read(size)
  try:
    header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
  except ValueError as error:
    raise Refusal(f"{file}: header: {error}; the file is damaged, download it "
                  "again") from error
  if not isinstance(header, dict):
    raise Refusal(f"{file}: header is a {type(header).__name__}, not an "
                  "object; the file is damaged, download it again")
  return header, 8 + size, total


def _unique(pairs):
  names = [name for name, _ in pairs]
  twice = sorted({name for name in names if names.count(name) > 1}) if len(
      set(names)) < len(names) else []
  if twice:
    raise ValueError(f'"{twice[0]}" occurs twice')
  return dict(pairs)


def _fields(where, fields):
  """Returns begin, size, dtype and shape of one tensor."""
  try:
    kind, shape = fields["dtype"], tuple(fields["shape"])
    begin, end = fields["data_offsets"]
  except (TypeError, KeyError, ValueError) as error:
    raise Refusal(f"{where}: {str(fields)[:80]} has no dtype, shape and "
                  "data_offsets; the file is damaged, download it again"
                  ) from error
  if kind not in DTYPES:
    raise Refusal(f'{where}: dtype "{kind}" is none of {", ".join(DTYPES)}; '
                  "convert it to one of them")
  whole = (*shape, begin, end)
  if any(type(n) is not int or n < 0 for n in whole) or end < begin:
    raise Refusal(f"{where}: shape {list(shape)}, data_offsets "
                  f"{[begin, end]}: have to be integers from 0 on, in order; "
                  "the file is damaged, download it again")
  dtype = np.dtype(DTYPES[kind])
  if math.prod(shape) * dtype.itemsize != end - begin:
    raise Refusal(f"{where}: {kind}{list(shape)} takes "
                  f"{math.prod(shape) * dtype.itemsize} bytes, but "
                  f"data_offsets {[begin, end]} are {end - begin}; the file is "
                  "damaged, download it again")
  return begin, end - begin, dtype, shape


def load(entry: Entry) -> np.ndarray:
  """Returns one tensor, in memory of its own."""
  memory = np.empty(entry.size + ALIGNMENT, np.uint8)
  skip = -memory.ctypes.data % ALIGNMENT
  memory = memory[skip:skip + entry.size]
  with open(entry.file, "rb", buffering=0) as stream:
    stream.seek(entry.begin)
    done = 0
    while done < entry.size:
      count = stream.readinto(memory[done:])
      if not count:
        raise Refusal(f"{entry.file}: ends at byte {entry.begin + done} while "
                      "it is read; another process truncated it")
      done += count
  return memory.view(entry.dtype).reshape(entry.shape)
