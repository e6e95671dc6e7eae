"""Recall: an oracle finds all, a guesser nothing, segments change nothing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax import sharding
from ultralong_jax.data import sources
from ultralong_jax.data import tokenizer
from ultralong_jax.evaluate import recall
from ultralong_jax.models import hybrid

BYTE = tokenizer.load("byte")


def settings(**leaves):
  c = common.get_config().evaluate
  c.recall_lengths, c.recall_depths, c.recall_samples = (330, 700), (0., 1.), 5
  c.update(leaves)
  return c


@functools.cache
def documents():
  return sources.sample(sources.open_documents(""), 2**16, 2**10)


def figures(guess, **leaves):
  evaluator = recall.Recall(guess, documents(), BYTE, settings(**leaves),
                            tokens=1400, devices=2)
  return dict(evaluator.run({}, {}))


def oracle(params, router, tokens_BT, places_BA):
  """Reads the prompt, as text, and looks for what stands there twice."""
  del params, router
  guess_BA = np.zeros_like(places_BA)
  for guess_A, tokens_T, places_A in zip(guess_BA, tokens_BT, places_BA):
    prompt = BYTE.decode(tokens_T[:places_A[0] + 1])
    name = prompt.split()[-1 if prompt[-7] == "\n" else -2]
    (answer,) = re.findall(
        rf"\n(?:code of )?{name} (?:is )?(\d{{5}})[\n;]", prompt)
    guess_A[:] = BYTE.encode(answer)
  return guess_BA


def constant(params, router, tokens_BT, places_BA):
  del params, router, tokens_BT
  return np.broadcast_to(np.array(BYTE.encode("48213")), places_BA.shape)


def test_the_oracle_is_right_everywhere():
  tables = figures(oracle)
  assert list(tables) == ["validation_recall_needles",
                          "validation_recall_pairs"]
  for table in tables.values():
    assert [row[:4] for row in table] == [
        [length, depth, 5, 5] for length in (330, 700) for depth in (0., 1.)]
    assert all(row[4:] == pytest.approx([0.56551, 1], abs=1e-5)
               for row in table)


def test_a_guesser_is_right_by_chance():
  for table in figures(constant, recall_samples=40).values():
    for *_, right, asked, low, high in table:
      # One of 90,000 numbers.
      assert right == 0 and asked == 40 and low <= 1 / 90_000 < high < 0.1


def test_depth_is_where_the_evidence_stands():
  evaluator = recall.Recall(oracle, documents(), BYTE, settings())
  shares = []
  for depth in (0., 0.5, 1.):
    ids, (start, stop) = evaluator.document("needles", 5_000, depth, 3)
    assert len(ids) == 5_001 and stop == 5_000
    answer = BYTE.decode(ids[start:stop])
    shares.append(BYTE.decode(ids).index(f"is {answer}\n") / 5_000)
  assert shares == pytest.approx([0, 0.5, 1], abs=0.05)


@pytest.mark.parametrize("right, asked, low, high", [
    (0, 10, 0., 0.27753), (10, 10, 0.72247, 1.), (5, 10, 0.23659, 0.76341),
    (81, 263, 0.25529, 0.36621)])  # the last: Newcombe 1998, table I
def test_intervals_are_wilsons(right, asked, low, high):
  assert recall.wilson(right, asked) == pytest.approx([low, high], abs=1e-4)


def test_no_length_asks_nothing_and_a_stop_ends_it():
  assert not figures(None, recall_lengths=())
  stopped = recall.Recall(None, documents(), BYTE, settings(),
                          stop=lambda: True)
  assert not dict(stopped.run({}, {}))
  assert not figures(lambda *_: None)  # inside of a document


@functools.cache
def model_and_variables():
  c = common.get_config().model
  c.update(dict(vocab=272, width=16, layers=3, pattern="ddm", heads=2,
                key_width=8, value_width=8, latent_heads=2,
                latent_key_width=8, latent_shared_width=4,
                latent_value_width=8, latent_rank=8, dense_hidden=16,
                dense_layers=3, position="rope"))
  model = hybrid.Hybrid(**c)
  variables = jax.jit(model.init)(jax.random.key(1),
                                  jnp.zeros((1, 1), jnp.int32))
  return model, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x,
                             variables["params"])


def test_segments_guess_what_one_pass_does():
  model, params = model_and_variables()
  random = np.random.default_rng(0)
  tokens_BT = random.integers(0, 256, (2, 150)).astype(np.int32)
  # In the first segment, over borders, at the end; one row asks for less.
  places_BA = np.array([[3, 63, 64, 127, 128, 149],
                        [60, 61, 62, 63, -1, -1]], np.int32)
  logits_BTW = jax.jit(lambda: model.apply({"params": params}, tokens_BT)[0])()
  expected_BA = np.where(places_BA < 0, 0, np.take_along_axis(
      np.asarray(jnp.argmax(logits_BTW, -1)), places_BA, axis=1))
  assert len(set(expected_BA.ravel().tolist())) > 4
  for segment in (64, 4_096):
    guess = recall.Segmented(model, segment, sharding.data_mesh())
    for _ in range(2):  # nothing stays from the rows before
      np.testing.assert_array_equal(
          guess(params, {}, tokens_BT, places_BA), expected_BA)
  shifted = np.roll(tokens_BT, 1, axis=1)
  assert np.any(guess(params, {}, shifted, places_BA) != expected_BA)


def test_a_model_is_stopped_between_segments():
  model, params = model_and_variables()
  stops = iter([False, True])
  guess = recall.Segmented(model, 64, sharding.data_mesh(),
                           lambda: next(stops))
  assert guess(params, {}, np.zeros((2, 150), np.int32),
               np.zeros((2, 6), np.int32)) is None
