"""An answer is right if every token of it is."""

import jax
import numpy as np

from ultralong_jax.data import interleave
from ultralong_jax.evaluate import answers

TASKS = len(interleave.TASKS)


def slow(guess_BT, targets_BT, marks_BT):
  """One answer of one row at a time."""
  counts = np.zeros((TASKS, 2), int)
  for guess, targets, marks in zip(guess_BT, targets_BT, marks_BT):
    for mark in set(marks.tolist()) - {0}:
      own = marks == mark
      counts[(mark - 1) % TASKS] += [np.all(guess[own] == targets[own]), 1]
  return counts


def test_equals_counting_one_by_one():
  random = np.random.default_rng(0)
  targets_BT = random.integers(0, 5, (4, 30))
  guess_BT = np.where(random.random((4, 30)) < 0.8, targets_BT, 4)
  marks_BT = np.zeros((4, 30), np.int32)
  for row in marks_BT[:3]:
    at = 0
    for answer in range(5):
      at += random.integers(0, 3)
      size = random.integers(1, 4)
      row[at:at + size] = 1 + random.integers(TASKS) + TASKS * answer
      at += size
  hidden_BTD = jax.nn.one_hot(guess_BT, 5)
  counts = answers.count(hidden_BTD, np.eye(5, dtype=np.float32),
                         {"targets": targets_BT, "answers": marks_BT})
  expected = slow(guess_BT, targets_BT, marks_BT)
  np.testing.assert_array_equal(counts, expected)
  assert 0 < expected[:, 0].sum() < expected[:, 1].sum() == 15


def test_data_without_answers_counts_none():
  assert not answers.count(np.zeros((1, 2, 3)), np.eye(3), {}).any()
