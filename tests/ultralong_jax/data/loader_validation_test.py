"""The validation split: finite, and the same in every run."""

import functools

import chex
import jax
import numpy as np
import pytest

from ultralong_jax.data import tokenizer

BYTE = tokenizer.load("byte")
assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


def test_validation_is_finite_fixed_and_of_its_own_size(
    open_validation, take, rows_of, ids):
  data = open_validation(ids=ids)
  rows, batches = rows_of(data), -(-data.rows_per_epoch // 4)
  assert len(take(data)) == batches
  assert rows["tokens"].shape == (4 * batches, 64)
  assert 1000 - 3 <= data.bytes <= 1000
  targets = rows["targets"][rows["weights"] > 0]
  assert ids.byte_lengths[targets].sum() == data.bytes
  assert rows["weights"].sum() == data.targets_per_epoch
  # Neither the training's context nor its seed nor its batch matter.
  other = open_validation(ids=ids, batch=1, context=999, seed=5)
  assert_same({n: x[:data.rows_per_epoch] for n, x in rows.items()},
              rows_of(other))


def test_validation_last_batch_is_filled_with_padding(
    open_validation, take):
  data = open_validation(batch=7)
  assert data.rows_per_epoch % 7
  last = take(data)[-1]
  filled = data.rows_per_epoch % 7
  assert last["weights"][:filled].any(axis=1).all()
  assert not last["weights"][filled:].any()
  assert not last["segment_ids"][filled:].any()
  slices = [take(data, process_index=i, process_count=7)[-1]
            for i in range(7)]
  assert_same(last, jax.tree.map(lambda *parts: np.concatenate(parts),
                                 *slices))


def test_train_and_validation_share_no_document(open_train, open_validation):
  train, validation = open_train(), open_validation()
  contents = [{d.read(i) for i in range(len(d))}
              for d in (train.documents, validation.documents)]
  assert contents[0] and contents[1] and not contents[0] & contents[1]


def test_a_cut_document_has_no_end(open_validation, rows_of):
  data = open_validation()
  rows = rows_of(data)
  whole = data.documents.whole
  assert not whole.all()
  assert (rows["targets"] == BYTE.eos).sum() == whole.sum()
  assert (rows["tokens"] == BYTE.bos).sum() == len(whole)


def test_says_why_there_is_nothing_to_validate_on(open_train):
  for change in ({"validation_fraction": 0}, {"validation_bytes": 0}):
    with pytest.raises(ValueError, match="nothing to validate on"):
      open_train("validation", **change)
  with pytest.raises(ValueError, match="split='test'"):
    open_train("test")
