"""Bits per byte of counting models: what a network has to beat at least."""

import numpy as np

# The end of a document is a symbol after the bytes, and so is its start.
SYMBOLS = 257
# Counts settle long before this; it bounds the time on big folders.
COUNTED_BYTES = 2**26
PART_BYTES = 2**20


def bits_per_byte(train, validation):
  """Returns {"unigram": ..., "bigram": ...} in bits per validation byte.

  Counts of the training bytes plus one, over 256 bytes and the end of a
  document; the bits for that end are paid, as in a model's loss.

  Args:
    train: `sources.Documents` to count.
    validation: `sources.Documents` to predict.
  """
  seen = count_pairs(train.first(COUNTED_BYTES))
  asked = count_pairs(validation)
  bigram = np.log2((seen + 1) / (seen + 1).sum(axis=1, keepdims=True))
  single = seen.sum(axis=0) + 1
  unigram = np.log2(single / single.sum())
  return {"unigram": float(-(asked.sum(axis=0) * unigram).sum()
                           / validation.bytes),
          "bigram": float(-(asked * bigram).sum() / validation.bytes)}


def count_pairs(documents):
  """Returns how often a symbol (row) is followed by another (column)."""
  counts = np.zeros(SYMBOLS**2, np.int64)
  for part in _parts(documents):
    # Between documents stands one border symbol: end of one, start of the
    # next.
    counts += np.bincount(part[:-1] * SYMBOLS + part[1:],
                          minlength=SYMBOLS**2)
  return counts.reshape(SYMBOLS, SYMBOLS)


def _parts(documents):
  """Yields the symbols of documents in parts that overlap by one symbol."""
  border = np.array([SYMBOLS - 1])
  parts, waiting = [border], 0
  for document, whole in enumerate(documents.whole):
    size = int(documents.sizes[document])
    for start in range(0, size, PART_BYTES):
      raw = documents.read(document, start, start + PART_BYTES)
      parts.append(np.frombuffer(raw, np.uint8).astype(np.int64))
      waiting += len(raw)
      if waiting >= PART_BYTES:
        part = np.concatenate(parts)
        yield part
        parts, waiting = [part[-1:]], 0
    if whole:
      parts.append(border)
    else:
      # Cut before its end: no end is predicted, the next one starts anew.
      yield np.concatenate(parts)
      parts, waiting = [border], 0
  yield np.concatenate(parts)
