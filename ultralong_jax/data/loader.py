"""Batches of packed rows; row i is a function of the seed and i alone."""

import functools
import sys

from absl import logging
import grain
import numpy as np

from ultralong_jax.data import encoded
from ultralong_jax.data import interleave
from ultralong_jax.data import packing
from ultralong_jax.data import reading
from ultralong_jax.data import sources
from ultralong_jax.data import synthetic

# Batches made ahead by one thread. More would only delay a stop.
AHEAD = 4


def open_data(config, tokenizer, *, context, batch, seed, split="train",
              form=None):
  """Opens one split of the documents that `config` names.

  Validation is finite, in a fixed order, and depends neither on the seed nor
  on the context of training, so that a figure means the same in every run.

  Args:
    config: leaves source, path, validation_fraction, validation_bytes,
      validation_context and, read by that source, synthetic (`config.data`).
    tokenizer: see `tokenizer.load`.
    context: tokens of a training row; validation takes validation_context.
    batch: rows of a global batch.
    seed: order of the training rows.
    split: "train" or "validation".
    form: an `images.Form`; what sources with pictures make of them.
  """
  if split not in ("train", "validation"):
    raise ValueError(f"{split=} must be 'train' or 'validation'")
  if config.source in reading.SOURCES:
    train, validation = reading.open_splits(config, form)
    encode = functools.partial(interleave.Encoded, tokenizer=tokenizer,
                               form=form)
  else:
    train, validation = sources.split(sources.open_documents(config.path),
                                      config.validation_fraction)
    encode = functools.partial(encoded.Encoded, tokenizer=tokenizer)
  if config.source == "synthetic":
    held_out = split == "validation"
    encode = functools.partial(
        synthetic.Encoded, tokenizer=tokenizer, settings=config.synthetic,
        split=split, seed=0 if held_out else seed,
        limit=config.validation_bytes if held_out else None)
  if split == "train":
    return Data(train, encode(train), tokenizer, context=context, batch=batch,
                seed=seed, endless=True)
  if config.source in reading.SOURCES:
    validation = interleave.beginning(validation, config.validation_bytes)
  elif config.source == "text":
    validation = sources.sample(validation, config.validation_bytes,
                                config.validation_context)
  if not len(validation):
    raise ValueError(
        "nothing to validate on: data.validation_fraction="
        f"{config.validation_fraction} and data.validation_bytes="
        f"{config.validation_bytes} must both be above 0")
  return Data(validation, encode(validation), tokenizer,
              context=config.validation_context, batch=batch, seed=0,
              endless=False)


class Data:
  """Rows of packed documents, in batches.

  Attributes:
    documents: see `sources.Documents`; of generated ones, their haystack.
    bytes: bytes of text in these.
    rows_per_epoch: rows in which every document occurs exactly once.
    targets_per_epoch: targets with weight in an epoch.
    fill: share of tokens that are not padding.
    context, batch: tokens of a row, rows of a global batch.
    fingerprint: dict for JSON; what the order of rows depends on.
  """

  def __init__(self, documents, encoded, tokenizer, *, context, batch, seed,
               endless):
    if batch < 1:
      raise ValueError(f"{batch=} must be at least 1")
    self.documents = documents
    self.context = context
    self.batch = batch
    self._seed = seed
    self._endless = endless
    self._pad = tokenizer.pad
    self._encoded = encoded
    self._plan = encoded.plan(context, seed)
    self.bytes = documents.bytes
    self.rows_per_epoch = self._plan.rows
    self.targets_per_epoch = int(self._encoded.lengths.sum())
    self.fill = self._plan.fill
    self.fingerprint = {
        "split": "train" if endless else "validation",
        "files": documents.digest, "documents": len(documents),
        "bytes": documents.bytes, "seed": seed, "context": context,
        "batch": batch, "tokenizer": tokenizer.fingerprint,
        "grain": grain.__version__, "packing": packing.VERSION,
        **encoded.fingerprint}
    # An epoch's order is computed when its first row is asked for.
    self._order = functools.lru_cache(maxsize=2)(
        lambda epoch: packing.order(self.rows_per_epoch, seed, epoch))
    self._rows = grain.MapDataset.range(
        sys.maxsize if endless else self.rows_per_epoch).map(self.row)
    logging.info(
        "%s: %d documents, %d bytes, %d rows of %d tokens, %.1f %% padding",
        self.fingerprint["split"], len(documents), self.bytes,
        self.rows_per_epoch, context, 100 * (1 - self.fill))

  def batches(self, position=0, skipped=(), process_index=0, process_count=1):
    """Returns an iterator of batches; `close()` ends its thread early.

    Training is endless. Validation ends with a batch filled up by padding.

    Args:
      position: rows taken before, all processes together. Rows passed over
        do not count, so after n steps it is n * batch, whatever was skipped.
      skipped: [start, stop) ranges of global rows that are passed over.
      process_index: which slice of each global batch is wanted.
      process_count: number of slices.
    """
    if self.batch % process_count:
      raise ValueError(f"batch={self.batch} rows cannot be divided among "
                       f"{process_count=} processes")
    if position < 0:
      raise ValueError(f"{position=} must not be negative")
    share = self.batch // process_count
    offset = position + process_index * share
    skipped = merged(skipped)

    def batch_at(step):
      begin = offset + step * self.batch
      return self._stack([global_row(i, skipped)
                          for i in range(begin, begin + share)])

    left = sys.maxsize - position if self._endless else max(
        0, self.rows_per_epoch - skipped_rows(skipped, self.rows_per_epoch)
        - position)
    steps = grain.MapDataset.range(-(-left // self.batch)).map(batch_at)
    return iter(steps.to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)))

  def row(self, index):
    """Returns the global row `index` as a dict of arrays [T].

    Returns:
      tokens: int32.
      targets: int32; the next token of the document, also where it is cut.
      segment_ids: int32; 1, 2, ... for the pieces in a row, 0 for padding.
      positions: int32; place in the piece.
      weights: float32; 1, or 0 for padding and targets that are pictures;
        of generated documents, as `data.synthetic.weights` says.
      and, of other sources than text, what their `Encoded.blank` has.
    """
    row = self._padding()
    if self._endless:
      epoch, place = divmod(index, self.rows_per_epoch)
      index = int(self._order(epoch)[place])
    plan, at = self._plan, 0
    first, last = plan.first[index], plan.first[index + 1]
    for segment, piece in enumerate(range(first, last), 1):
      length = int(plan.length[piece])
      stretch = int(plan.document[piece]), int(plan.start[piece]), length
      ids = self._encoded.read(*stretch)
      part = slice(at, at + length)
      row["tokens"][part] = ids[:-1]
      row["targets"][part] = ids[1:]
      row["segment_ids"][part] = segment
      row["positions"][part] = np.arange(length)
      row["weights"][part] = 1
      self._encoded.finish(row, at, *stretch)
      at += length
    return row

  def _padding(self):
    """Returns a row of padding only."""
    return {
        "tokens": np.full(self.context, self._pad, np.int32),
        "targets": np.full(self.context, self._pad, np.int32),
        "segment_ids": np.zeros(self.context, np.int32),
        "positions": np.zeros(self.context, np.int32),
        "weights": np.zeros(self.context, np.float32),
        **self._encoded.blank(self.context)}

  def _stack(self, indices):
    rows = [self._rows[i] if i < len(self._rows) else self._padding()
            for i in indices]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def merged(ranges):
  """Returns [start, stop) ranges sorted, without overlap and empty ones."""
  result = []
  for start, stop in sorted((int(a), int(b)) for a, b in ranges):
    if start < 0 or stop < start:
      raise ValueError(f"[{start}, {stop}) is not a range of rows")
    if result and start <= result[-1][1]:
      result[-1][1] = max(stop, result[-1][1])
    elif start < stop:
      result.append([start, stop])
  return result


def global_row(position, skipped):
  """Returns the global row that is taken after `position` others.

  Args:
    position: rows taken before it.
    skipped: ranges of global rows passed over, as `merged` returns them.
  """
  for start, stop in skipped:
    if position < start:
      break
    position += stop - start
  return position


def skipped_rows(skipped, stop):
  """Returns how many rows below `stop` merged ranges pass over."""
  return sum(max(0, min(b, stop) - a) for a, b in skipped)


def compare(saved, current):
  """Says how two fingerprints differ, one sentence a difference.

  Args:
    saved: fingerprint from a checkpoint.
    current: fingerprint of the data that is open.

  Returns:
    Such as ["data.seed: saved 0, now 1"]; [] if the order is the same.
  """
  absent = "nothing"
  return [
      f"data.{key}: saved {saved.get(key, absent)}, "
      f"now {current.get(key, absent)}"
      for key in {**saved, **current}
      if key not in saved or key not in current or saved[key] != current[key]]
