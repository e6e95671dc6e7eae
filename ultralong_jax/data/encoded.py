"""Documents as token ids: bos, text, eos; read by document and stretch."""

import tempfile

from absl import logging
import numpy as np

from ultralong_jax.data import packing

# Texts are encoded in parts of this size, which bounds the memory it takes.
PART_BYTES = 2**22


class Encoded:
  """Token ids of documents.

  A document of n ids is the sequence bos, ids, eos, which makes n + 1 pairs
  of input and target; one that was cut before its end lacks eos.

  Attributes:
    lengths: int64, number of pairs of each document.
    fingerprint: what rows depend on besides documents and tokenizer.
  """
  fingerprint = {}

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

  def plan(self, context, seed):
    """Returns the `packing.Plan` of rows of `context` tokens."""
    return packing.plan(self.lengths, context, seed)

  def blank(self, context):
    """Returns what else a row holds: nothing. See `interleave.Encoded`."""
    del context
    return {}

  def finish(self, row, at, document, start, length):
    """Adds what else a piece of a row has: nothing."""

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
  logging.info("encoding %d bytes", documents.bytes)
  with tempfile.TemporaryFile() as file:
    for document in range(len(documents)):
      ids = [_encode_part(documents, document, *part, tokenizer)
             for part in _parts(documents, document)]
      offsets[document + 1] = offsets[document] + sum(map(len, ids))
      file.writelines(part.astype(dtype).tobytes() for part in ids)
    file.flush()
    # The mapping outlives the open file.
    return np.memmap(file, dtype, "r", shape=(int(offsets[-1]),)), offsets


def _parts(documents, document):
  """Yields where the parts of a document begin and end."""
  start, size = 0, int(documents.sizes[document])
  while start < size:
    stop = documents.border(document, start + PART_BYTES)
    yield start, stop
    start = stop


def _encode_part(documents, document, start, stop, tokenizer):
  """Returns the ids of one part; raises unless they stand for its bytes."""
  text = documents.read(document, start, stop)
  ids = tokenizer.encode_array(text)
  if tokenizer.decode_bytes(ids) != text:
    raise ValueError(
        f"the tokenizer does not give {documents.names[document]!r} back as "
        "it was, so bits per byte could not be exact; it must not normalise, "
        "add or drop text")
  return ids
