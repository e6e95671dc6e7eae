"""The order of rows: a function of the seed and the position alone."""

import functools
import time

import chex
import jax
import numpy as np
import pytest

assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


def test_restart_anywhere_equals_the_continuous_stream(open_train, rows_of):
  data = open_train()
  rows = rows_of(data, 60)
  assert data.rows_per_epoch < 200  # The stream crosses borders of epochs.
  for position in (0, 1, 4, 37, data.rows_per_epoch - 1, data.rows_per_epoch,
                   data.rows_per_epoch + 2):
    again = rows_of(open_train(), 3, position=position)
    assert_same(again, {name: x[position:position + 12]
                        for name, x in rows.items()})


def test_rows_do_not_depend_on_the_batch(open_train, rows_of):
  rows = rows_of(open_train(batch=4), 6)
  assert_same(rows, rows_of(open_train(batch=8), 3))


def test_a_far_position_costs_no_history(open_train, take):
  data = open_train()
  began = time.process_time()
  far, = take(data, 1, position=10**15)
  assert time.process_time() - began < 1
  epoch, place = divmod(10**15, data.rows_per_epoch)
  assert 0 <= place < data.rows_per_epoch and epoch > 10**12
  assert far["weights"].any()


def test_epochs_have_the_same_rows_in_another_order(open_train, rows_of):
  data = open_train(batch=1)
  n = data.rows_per_epoch
  rows = rows_of(data, 2 * n)["tokens"]
  first, second = rows[:n].tolist(), rows[n:].tolist()
  assert first != second and sorted(first) == sorted(second)


def test_seed_changes_the_order(open_train, take):
  a, b = (take(open_train(seed=seed), 1)[0] for seed in (0, 1))
  assert not np.array_equal(a["tokens"], b["tokens"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_slices_of_processes_make_the_global_batch(open_train, take, count):
  data = open_train()
  where = {"position": 11, "skipped": [[13, 20]]}
  whole = take(data, 5, **where)
  slices = [take(data, 5, process_index=i, process_count=count, **where)
            for i in range(count)]
  for step in range(5):
    assert_same(whole[step], jax.tree.map(
        lambda *parts: np.concatenate(parts), *[s[step] for s in slices]))


def test_rows_that_do_not_divide_are_refused(open_train):
  with pytest.raises(ValueError, match="batch=4.*process_count=3"):
    open_train().batches(process_count=3)


@pytest.mark.parametrize("skipped", [
    [[5, 9]], [[0, 4]], [[5, 9], [2, 3]], [[5, 8], [7, 30]], [[3, 3]],
    [[5, 7], [7, 9]], [(100, 10_000)]])
def test_skipped_ranges_are_passed_over(open_train, rows_of, skipped):
  data = open_train()
  rows = rows_of(data, 20)
  left = [i for i in range(80) if not any(a <= i < b for a, b in skipped)]
  for position in (0, 2, 7, 12):
    got = rows_of(data, 2, position=position, skipped=skipped)
    taken = left[position:position + 8]
    assert_same(got, {name: x[taken] for name, x in rows.items()})


def test_skipping_what_lies_ahead_does_not_move_what_lies_behind(
    open_train, rows_of):
  # A range that is added in the middle of a run keeps positions valid.
  before = rows_of(open_train(), 10)
  after = rows_of(open_train(), 10, skipped=[[20, 28]])
  assert_same({n: x[:20] for n, x in before.items()},
              {n: x[:20] for n, x in after.items()})
  assert_same({n: x[28:40] for n, x in before.items()},
              {n: x[20:32] for n, x in after.items()})


def test_impossible_ranges_are_refused(open_train):
  for wrong in ([[3, 1]], [[-1, 2]]):
    with pytest.raises(ValueError, match="not a range"):
      open_train().batches(skipped=wrong)
  with pytest.raises(ValueError, match="position=-1"):
    open_train().batches(position=-1)
