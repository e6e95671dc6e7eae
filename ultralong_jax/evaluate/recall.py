"""What is found again in held-out text, by its length and by the depth."""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax import sharding
from ultralong_jax.data import haystack as haystack_lib
from ultralong_jax.data import synthetic
from ultralong_jax.models import hybrid

TASKS = ("needles", "pairs")
NORMAL = 1.959964  # deviations on both sides that hold 95 %


def defaults():
  """Returns the leaves of `evaluate` that are read here."""
  return {"recall_lengths": (), "recall_depths": (0., 0.25, 0.5, 0.75, 1.),
          "recall_samples": 32, "recall_segment": 4_096,
          "recall_statements": 4}


class Recall:
  """Counts answers that greedy decoding gives to needles and pairs.

  Each token of an answer is predicted after the true ones before it; where
  all are right, greedy decoding would have written just these.
  """

  def __init__(self, guess, documents, tokenizer, settings, *, tokens=1,
               devices=1, stop=lambda: False):
    """Prepares; documents are made when they are read.

    Args:
      guess: (params, router, tokens_BT, places_BA) -> ids_BA, the likeliest
        token after each place, or None if it was stopped; see `Segmented`.
      documents: held-out text, the haystack.
      tokenizer: see `tokenizer.load`.
      settings: `config.evaluate`.
      tokens: that are read together, where a document has fewer.
      devices: the rows of a batch are a multiple.
      stop: polled before each batch; a run that stops yields nothing more.
    """
    self._guess, self._c, self._stop = guess, settings, stop
    # Encoding is slow, and most runs measure no recall.
    self._haystack = functools.cache(
        lambda: haystack_lib.Haystack(documents, tokenizer))
    self._tokens, self._devices = tokens, devices

  def run(self, params, router):
    """Yields (name, table) of each task, if any length is asked for.

    A row of the table is [length, depth, right, asked, low, high]: tokens,
    place of the evidence from 0 (far back) to 1, answers that are right,
    answers, and a 95 % interval of the share.
    """
    for task in TASKS if self._c.recall_lengths else ():
      rows = []
      for length in self._c.recall_lengths:
        for depth in self._c.recall_depths:
          right = self._right(task, length, depth, params, router)
          if right is None:
            return
          asked = self._c.recall_samples
          rows.append([length, depth, right, asked, *wilson(right, asked)])
      yield f"validation_recall_{task}", rows

  def _right(self, task, length, depth, params, router):
    """Returns how many answers are right; None if stopped."""
    samples = self._c.recall_samples
    rows = min(self._tokens // length, samples)
    rows = max(1, -(-rows // self._devices)) * self._devices
    right = 0
    for first in range(0, samples, rows):
      if self._stop():
        return None
      # The last batch is filled up with documents that do not count.
      ids, answers = zip(*(self.document(task, length, depth, i)
                           for i in range(first, first + rows)))
      most = max(stop - start for start, stop in answers)
      places_BA = np.array([[*range(start - 1, stop - 1),
                             *[-1] * (most - stop + start)]
                            for start, stop in answers], np.int32)
      ids = np.stack(ids)
      guess_BA = self._guess(params, router, ids[:, :-1], places_BA)
      if guess_BA is None:
        return None
      answer_BA = np.take_along_axis(ids, places_BA + 1, axis=1)
      right_B = np.all((guess_BA == answer_BA) | (places_BA < 0), axis=1)
      right += int(right_B[:samples - first].sum())
    return right

  def document(self, task, length, depth, index):
    """Returns ids [length + 1] and the answer's place, the same every time."""
    statements = self._c.recall_statements
    low = synthetic.least_distance(statements)
    high = length - synthetic.room(statements)
    distance = round(high + depth * (low - high))
    ids, answer, _ = synthetic.document(
        self._haystack(),
        haystack_lib.Draw("recall", task, length, depth, index), task,
        length=length, distance=distance, statements=statements)
    return ids, answer


def wilson(right, asked, normal=NORMAL):
  """Returns Wilson's interval of a share, of which `right` of `asked` are.

  Unlike the normal interval it is none of no width where all or none are.
  """
  share, spread = right / asked, normal**2 / asked
  middle = (share + spread / 2) / (1 + spread)
  half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
  return [max(0., middle - half), min(1., middle + half)]


class Segmented:
  """Guesses of a model that reads rows a segment at a time.

  A row leaves behind the model's own state and nothing else, as in decoding,
  so that its length costs no activations.
  """

  def __init__(self, model, segment, mesh, stop=lambda: False):
    """Prepares; each length of rows compiles at its first call.

    Args:
      model: Hybrid.
      segment: tokens that are read at a time.
      mesh: of `sharding.data_mesh`; rows are split over it.
      stop: polled before each segment.
    """
    self._model, self._segment, self._stop = model, segment, stop
    self._mesh = mesh

    def read(params, router, batch, start, state):
      hidden_BTD, state = model.apply(
          {"params": params, "router": router}, batch["tokens"],
          batch["segment_ids"], None, state, method="features")
      # The unembedding sees the places that are asked, not the segment.
      at_BA = batch["places"] - start
      hidden_BAD = jnp.take_along_axis(
          hidden_BTD, jnp.clip(at_BA, 0, hidden_BTD.shape[1] - 1)[..., None],
          axis=1)
      w_DW = hybrid.unembedding(params).astype(hidden_BAD.dtype)
      logits_BAW = jnp.einsum("BAD,DW->BAW", hidden_BAD, w_DW,
                              preferred_element_type=jnp.float32)
      here_BA = (at_BA >= 0) & (at_BA < hidden_BTD.shape[1])
      return jnp.where(here_BA, jnp.argmax(logits_BAW, axis=-1), 0), state

    # How the state lies is only known with the number of rows.
    self._read = {}
    self._function = read

  def __call__(self, params, router, tokens_BT, places_BA):
    """Returns ids_BA, the likeliest token after each place, 0 after -1.

    Args:
      params, router: of the model.
      tokens_BT: int32, all rows; this process gives its own to its devices.
      places_BA: int32, -1 where there is none.
    """
    rows, length = tokens_BT.shape
    size = min(self._segment, length)
    state, read = self._compiled(rows, -(-length // size) * size)
    share = rows // jax.process_count()
    own = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    guess_BA = np.zeros_like(places_BA)
    for start in range(0, length, size):
      if self._stop():
        return None
      part_BT = tokens_BT[own, start:start + size]
      padding = (0, 0), (0, size - part_BT.shape[1])
      batch = {"tokens": np.pad(part_BT, padding),
               "segment_ids": np.pad(np.ones_like(part_BT), padding),
               "places": places_BA[own]}
      new_BA, state = read(params, router, sharding.put(batch, self._mesh),
                           np.int32(start), state)
      guess_BA += jax.device_get(new_BA)
    return guess_BA

  def _compiled(self, rows, capacity):
    """Returns the state before the first token, and what reads a segment."""
    def empty(rows=rows):
      return hybrid.empty_state(self._model, rows, capacity)

    placed = jax.tree.map(
        lambda one, more: sharding.rows(self._mesh, next(
            axis for axis, (a, b) in enumerate(zip(one.shape, more.shape))
            if a != b)),
        jax.eval_shape(empty), jax.eval_shape(lambda: empty(rows + 1)))
    if (rows, capacity) not in self._read:
      self._read[rows, capacity] = (
          jax.jit(empty, out_shardings=placed),
          jax.jit(self._function, donate_argnums=4,
                  out_shardings=(sharding.whole(self._mesh), placed)))
    start, read = self._read[rows, capacity]
    return start(), read
