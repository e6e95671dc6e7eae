"""What rows hold: every byte of every document, once an epoch."""

import itertools
import threading
import time
import types

import numpy as np
import pytest

from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer

BYTE = tokenizer.load("byte")


def test_batch_is_what_the_model_reads(open_train, take):
  batch, = take(open_train(), 1)
  for name in ("tokens", "targets", "segment_ids", "positions"):
    assert batch[name].shape == (4, 64) and batch[name].dtype == np.int32
  assert batch["weights"].dtype == np.float32


def pieces(rows):
  """Yields (tokens, targets) of every document piece in some rows."""
  for tokens, targets, segments in zip(rows["tokens"], rows["targets"],
                                       rows["segment_ids"]):
    for segment in range(1, segments.max() + 1):
      yield tokens[segments == segment], targets[segments == segment]


def test_an_epoch_holds_every_byte_of_every_document_once(
    open_train, rows_of, ids):
  data = open_train(ids=ids)
  steps = -(-data.rows_per_epoch // 4)
  rows = {name: x[:data.rows_per_epoch]
          for name, x in rows_of(data, steps).items()}
  for tokens, targets in pieces(rows):
    assert np.array_equal(tokens[1:], targets[:-1])
  texts = sorted(b"".join(ids.decode_bytes(targets)
                          for _, targets in chain)
                 for chain in chains(rows, data))
  expected = sorted(data.documents.read(i)
                    for i in range(len(data.documents)))
  assert texts == expected
  assert (rows["targets"] == ids.eos).sum() == len(expected)
  assert (rows["tokens"] == ids.bos).sum() == len(expected)
  assert data.targets_per_epoch == rows["weights"].sum()
  weighed = rows["targets"][rows["weights"] > 0]
  assert ids.byte_lengths[weighed].sum() == data.bytes


def chains(rows, data):
  """Returns the pieces of each document, by the plan that made them."""
  plan, order = data._plan, data._order(0)
  found = {}
  for place, row in enumerate(order):
    one = {name: x[place:place + 1] for name, x in rows.items()}
    for piece, content in zip(range(plan.first[row], plan.first[row + 1]),
                              pieces(one)):
      found.setdefault(int(plan.document[piece]), []).append(
          (int(plan.start[piece]), content))
  return [[content for _, content in sorted(parts, key=lambda p: p[0])]
          for parts in found.values()]


def test_target_is_the_next_token_also_at_a_cut(open_train, rows_of, ids):
  data = open_train(context=16, ids=ids)
  rows = rows_of(data, -(-data.rows_per_epoch // 4))
  cuts = 0
  for chain in chains({n: x[:data.rows_per_epoch] for n, x in rows.items()},
                      data):
    for (_, targets), (tokens, _) in itertools.pairwise(chain):
      assert targets[-1] == tokens[0]
      cuts += 1
    assert chain[0][0][0] == ids.bos and chain[-1][1][-1] == ids.eos
  assert cuts > 10


def test_segments_positions_and_weights(open_train, rows_of):
  rows = rows_of(open_train(context=700), 10)
  several = 0
  for row in range(len(rows["tokens"])):
    segments = rows["segment_ids"][row]
    real = segments > 0
    assert np.array_equal(rows["weights"][row], real.astype(np.float32))
    count = int(real.sum())
    assert real[:count].all()  # padding only at the end
    assert np.all(rows["tokens"][row][~real] == BYTE.pad)
    assert np.all(rows["targets"][row][~real] == BYTE.pad)
    assert np.all(rows["positions"][row][~real] == 0)
    assert np.all(np.isin(np.diff(segments[:count]), (0, 1)))
    assert segments[0] == 1
    starts = np.flatnonzero(np.diff(segments[:count], prepend=0))
    for start, stop in itertools.pairwise([*starts, count]):
      assert np.array_equal(rows["positions"][row][start:stop],
                            np.arange(stop - start))
    several += segments.max() > 1
  assert several


def test_a_tokenizer_that_loses_bytes_is_refused(open_train, train_bpe):
  tokenizers = pytest.importorskip("tokenizers")
  path = train_bpe(normalizer=tokenizers.normalizers.Replace("a", "b"))
  with pytest.raises(ValueError, match="must not normalise"):
    open_train(ids=tokenizer.load(path))


def test_long_texts_are_encoded_in_parts(open_train, rows_of, train_bpe,
                                         monkeypatch):
  bpe = tokenizer.load(train_bpe())
  monkeypatch.setattr(loader.encoded, "PART_BYTES", 10)
  data = open_train(ids=bpe)
  rows = rows_of(data, -(-data.rows_per_epoch // 4))
  targets = rows["targets"][:data.rows_per_epoch]
  assert bpe.byte_lengths[targets].sum() == data.bytes


def test_the_thread_ends_with_the_iterator(open_train):
  def running():
    return [t for t in threading.enumerate() if "grain" in t.name]

  before = len(running())
  batches = open_train().batches()
  next(batches)
  assert len(running()) == before + 1
  batches.close()
  deadline = time.monotonic() + 5
  while len(running()) > before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(running()) == before


@pytest.mark.parametrize("context", [512, 2048])
def test_library_rows_are_full_and_fast(context):
  leaves = types.SimpleNamespace(source="text", path="",
                                 validation_fraction=0.05)
  data = loader.open_data(leaves, BYTE, context=context, batch=8, seed=0)
  assert data.fill > 0.95
  batches = data.batches()
  next(batches)
  began = time.process_time()  # of all threads together
  for _ in range(50):
    next(batches)
  spent = time.process_time() - began
  batches.close()
  assert 50 * 8 * context / spent > 200_000
