"""Documents as token ids: bos, text, eos; read by document and stretch."""

import tempfile

import numpy as np

# Texts are encoded in parts of this size, which bounds the memory it takes.
PART_BYTES = 2**22


class Encoded:
  """Token ids of documents.

  A document of n ids is the sequence bos, ids, eos, which makes n + 1 pairs
  of input and target; one that was cut before its end lacks eos.

  Attributes:
    lengths: int64, number of pairs of each document.
  """

  def __init__(self, documents, tokenizer):
    self._tokenizer = tokenizer
    if tokenizer.bytewise:
      self._counts = documents.sizes
      self._ids = lambda d, start, stop: np.frombuffer(
          documents.read(d, start, stop), np.uint8)
    else:
      flat, offsets = _encode(documents, tokenizer)
      self._counts = np.diff(offsets)
      self._ids = lambda d, start, stop: flat[
          offsets[d] + start:min(offsets[d] + stop, offsets[d + 1])]
    self.lengths = self._counts + documents.whole

  def read(self, document, start, length):
    """Returns tokens start to start + length, the last one included.

    These are `length` inputs and, moved by one, their targets.
    """
    count = int(self._counts[document])
    tokens = np.empty(length + 1, np.int32)
    # Token 0 is bos, token 1 + i is id i, token 1 + count is eos.
    head, tail = start == 0, start + length == count + 1
    ids = self._ids(document, start - 1 + head, start + length - tail)
    tokens[int(head):length + 1 - tail] = ids
    if head:
      tokens[0] = self._tokenizer.bos
    if tail:
      tokens[-1] = self._tokenizer.eos
    return tokens


def _encode(documents, tokenizer):
  """Returns all ids in one array, and where each document begins in it.

  The array lies in a temporary file: encoding is slow and has to happen
  once, and pages that fit stay in memory anyway.
  """
  dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.uint32
  offsets = np.zeros(len(documents) + 1, np.int64)
  file = tempfile.TemporaryFile()
  for document in range(len(documents)):
    size, start = int(documents.sizes[document]), 0
    offsets[document + 1] = offsets[document]
    while start < size:
      stop = documents.border(document, start + PART_BYTES)
      ids = tokenizer.encode_array(documents.read(document, start, stop))
      length = int(tokenizer.byte_lengths[ids].sum())
      if length != stop - start:
        raise ValueError(
            f"the tokenizer gives {length} bytes of the {stop - start} bytes "
            f"of {documents.names[document]!r} back, so bits per byte could "
            "not be exact; it must not normalise, add or drop text")
      file.write(ids.astype(dtype).tobytes())
      offsets[document + 1] += len(ids)
      start = stop
  file.flush()
  if not offsets[-1]:
    return np.zeros(0, dtype), offsets
  return np.memmap(file, dtype, "r", shape=(int(offsets[-1]),)), offsets
