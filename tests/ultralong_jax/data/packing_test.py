"""Rows planned from lengths: complete, full, whole, repeatable."""

import time

import numpy as np
import pytest

from ultralong_jax.data import packing


def some_lengths(count, seed=0):
  """Long-tailed lengths, as files have."""
  rng = np.random.default_rng(seed)
  return 1 + np.minimum(rng.lognormal(6, 2, count), 1e5).astype(np.int64)


def row_of(plan):
  """Returns the row of every piece."""
  return np.repeat(np.arange(plan.rows), np.diff(plan.first))


@pytest.mark.parametrize("context", [1, 7, 512, 2048, 10**6])
def test_every_token_is_in_one_row_once(context):
  lengths = some_lengths(300 if context < 100 else 3000) % 5000 + 1
  plan = packing.plan(lengths, context, seed=1)
  assert plan.length.min() > 0
  by_place = np.lexsort((plan.start, plan.document))
  document, start = plan.document[by_place], plan.start[by_place]
  stop = start + plan.length[by_place]
  begins = np.diff(document, prepend=-1) > 0
  assert np.all(start[begins] == 0) and begins.sum() == len(lengths)
  assert np.all(start[~begins] == stop[np.flatnonzero(~begins) - 1])
  assert np.all(stop[np.append(np.flatnonzero(begins)[1:] - 1, -1)]
                == lengths)


@pytest.mark.parametrize("context", [1, 64, 512, 10**6])
def test_rows_are_not_overfull_and_none_is_empty(context):
  plan = packing.plan(some_lengths(500) % 3000 + 1, context, seed=1)
  tokens = np.bincount(row_of(plan), plan.length, plan.rows)
  assert tokens.max() <= context and tokens.min() > 0
  assert plan.first[0] == 0 and plan.first[-1] == len(plan.length)


def test_documents_that_fit_stay_whole():
  lengths = some_lengths(2000)
  plan = packing.plan(lengths, 512, seed=0)
  cut = np.bincount(plan.document) > 1
  assert np.array_equal(cut, lengths > 512)
  # And a longer one is cut into full rows and one rest.
  short = plan.length < 512
  assert np.bincount(plan.document[short]).max() == 1


@pytest.mark.parametrize("context", [512, 2048, 8192])
def test_little_is_padding(context):
  assert packing.plan(some_lengths(5000), context, seed=0).fill > 0.99


def test_plan_is_a_function_of_its_arguments():
  lengths = some_lengths(2000)
  one, two, other = (packing.plan(lengths, 512, seed=s) for s in (3, 3, 4))
  for name in ("document", "start", "length", "first"):
    assert np.array_equal(getattr(one, name), getattr(two, name))
  assert not np.array_equal(one.document, other.document)


def test_order_of_an_epoch_is_a_permutation_of_its_own():
  orders = [packing.order(1000, seed, epoch)
            for seed in (0, 1) for epoch in (0, 1)]
  for a in orders:
    assert np.array_equal(np.sort(a), np.arange(1000))
  # Seed 1 is not seed 0 moved by an epoch.
  assert len({a.tobytes() for a in orders}) == 4


def test_order_never_changes():
  # These values are in checkpoints; a change of them is a new VERSION.
  assert packing.VERSION == 1
  assert packing.order(10, 0, 0).tolist() == [2, 9, 0, 3, 7, 8, 6, 5, 4, 1]
  plan = packing.plan([5, 3, 12, 4, 9], 8, 0)
  assert plan.document.tolist() == [2, 4, 1, 0, 3, 2, 4]
  assert plan.first.tolist() == [0, 1, 2, 4, 6, 7]


def test_order_looks_random():
  places = np.array([packing.order(50, 0, e)[0] for e in range(2000)])
  counts = np.bincount(places, minlength=50)
  assert counts.min() > 15 and counts.max() < 75  # 40 expected


def test_no_documents_make_no_rows():
  assert packing.plan([], 8, 0).rows == 0


def test_context_of_nothing_is_refused():
  with pytest.raises(ValueError, match="context=0"):
    packing.plan([1], 0, 0)


@pytest.mark.parametrize("context", [64, 4096, 2**20])
def test_many_documents_take_seconds(context):
  lengths = np.random.default_rng(0).integers(1, 400, 200_000)
  began = time.process_time()
  plan = packing.plan(lengths, context, seed=0)
  assert time.process_time() - began < 10
  assert plan.fill > 0.9
  held = sum(x.nbytes for x in (plan.document, plan.start, plan.length,
                                plan.first))
  assert held / len(plan.length) <= 24
