"""Generated tasks over real text, whose answers need evidence far back.

  needles    "code of k is 48213" among others of the kind; the code of k?
  pairs      the same, but all pairs stand together, as a list
  variables  "let a = 48213" ... "let b = a" ..., beside another chain; b?
  settings   "rule k: backward w" ...; what 48213 gives by the rule of k
  permuted   documents of other texts out of order, each with a number and a
             mark; all the marks, by number
"""
import functools
from typing import NamedTuple

import numpy as np

from ultralong_jax.data import haystack as haystack_lib
from ultralong_jax.data import interleave
from ultralong_jax.data import packing

# Raised when a document changes for the same settings, seed and index.
VERSION = 1
# Bytes, so at most tokens, of a statement with its share of an answer, and of
# a question with the rest of it.
STATEMENT = 32
QUESTION = 64
ORDERS = {"forward": lambda x: x,
          "backward": lambda x: x[::-1],
          "ascending": lambda x: "".join(sorted(x)),
          "descending": lambda x: "".join(sorted(x, reverse=True))}


class Work(NamedTuple):
  """What a document is about.

  Attributes:
    statements: in the order in which they stand.
    asked: which of them the distance is measured from: of those that the
      answer needs the one furthest back.
    question, answer: at the end of the document.
    together: the statements stand side by side.
  """
  statements: list
  asked: int
  question: str
  answer: str
  together: bool = False


def _needles(draw, fresh, count):
  names, codes = fresh.words(count), fresh.numbers(count)
  asked = draw.below(count)
  return Work([f"\ncode of {name} is {code}\n"
               for name, code in zip(names, codes)], asked,
              f"\ncode of {names[asked]} is ", codes[asked])


def _pairs(draw, fresh, count):
  names, codes = fresh.words(count), fresh.numbers(count)
  asked = draw.below(count)
  return Work([f"\n{name} {code};" for name, code in zip(names, codes)], asked,
              f"\n{names[asked]} ", codes[asked], together=True)


def _variables(draw, fresh, count):
  own, other = fresh.words(-(-count // 2)), fresh.words(count // 2)
  chains = [[f"\nlet {name} = {value}\n" for name, value in
             zip(names, [*fresh.numbers(1), *names])]
            for names in (own, other)]
  turns = draw.shuffled([0] * len(own) + [1] * len(other))
  left = [iter(chain) for chain in chains]
  return Work([next(left[turn]) for turn in turns], turns.index(0),
              f"\nprint {own[-1]} gives ", chains[0][0].split()[-1])


def _settings(draw, fresh, count):
  names, marks = fresh.words(count), fresh.words(count)
  orders = [list(ORDERS)[draw.below(len(ORDERS))] for _ in names]
  asked, number = draw.below(count), fresh.numbers(1)[0]
  return Work([f"\nrule {name}: {order} {mark}\n"
               for name, order, mark in zip(names, orders, marks)], asked,
              f"\nrule {names[asked]} on {number} gives ",
              f"{ORDERS[orders[asked]](number)} {marks[asked]}")


def _permuted(draw, fresh, count):
  marks = fresh.words(count)
  return Work([f"\ndocument {number + 1}, mark {marks[number]}\n"
               for number in draw.shuffled(range(count))], 0,
              f"\nmarks of documents 1 to {count}: ", " ".join(marks))


MAKERS = {"needles": _needles, "pairs": _pairs, "variables": _variables,
          "settings": _settings, "permuted": _permuted}
TASKS = tuple(MAKERS)


def defaults():
  """Returns the leaves of `data.synthetic`, for runs from before them."""
  return {"documents": 8_192, "distance_low": 128, "distance_high": 256,
          "statements": 4, "shares": dict.fromkeys(TASKS, 1.0),
          "weights": dict.fromkeys(("text", *TASKS), 1.0)}


def least_distance(statements):
  """Returns tokens that hold the statements after the evidence."""
  return statements * STATEMENT


def room(statements):
  """Returns tokens that suffice beside the distance."""
  return statements * STATEMENT + QUESTION + 2


def document(haystack, draw, task, *, length, distance, statements):
  """Returns one document of a task; see `haystack.lay`."""
  return haystack_lib.lay(
      haystack, draw, lambda fresh: MAKERS[task](draw, fresh, statements),
      length=length, distance=distance,
      places=statements + 1 if task == "permuted" else 1)


class Encoded:
  """Token ids of generated documents; see `data.encoded.Encoded`.

  Document i depends on the settings, the text, the seed and i alone, and is
  made when it is read.

  Attributes:
    lengths: int64, number of pairs of input and target of each document.
    fingerprint: what rows depend on besides text and tokenizer.
  """

  def __init__(self, documents, tokenizer, *, settings, split, seed,
               limit=None):
    """Opens one split.

    Args:
      documents: of text, the haystack.
      tokenizer: see `tokenizer.load`.
      settings: `config.data.synthetic`.
      split: "train" or "validation". Only in training do weights differ: the
        figures of two runs compare.
      seed: of the documents.
      limit: bytes of text that the first documents have, which are all;
        None: `settings.documents` of them.
    """
    self._haystack = haystack_lib.Haystack(documents, tokenizer)
    self._settings, self._key = settings, ("synthetic", split, seed)
    weights = settings.weights if split == "train" else dict.fromkeys(
        settings.weights, 1.0)
    self._text_weight = weights["text"]
    self._weights = [weights[task] for task in TASKS]
    # A row is read in two turns, and seldom more than a document at a time.
    self._document = functools.lru_cache(maxsize=2)(self._make)
    count = settings.documents
    if limit is not None:
      count = self._first(limit, tokenizer.byte_lengths)
    self.lengths = np.array([self._shape(i)[2] for i in range(count)],
                            np.int64)
    self.fingerprint = {
        "synthetic": VERSION,
        **{name: value if isinstance(value, (int, float)) else dict(value)
           for name, value in settings.items()},
        "documents": count}

  def _shape(self, index):
    """Returns task, distance, length and what draws the rest."""
    c, draw = self._settings, haystack_lib.Draw(*self._key, index)
    task = TASKS[draw.weighted([c.shares[name] for name in TASKS])]
    distance = draw.between(c.distance_low, c.distance_high)
    beside = room(c.statements)
    length = draw.between(distance + beside, c.distance_high + beside)
    return task, distance, length, draw

  def _make(self, index):
    """Returns the ids, the place of the answer and the task of a document."""
    task, distance, length, draw = self._shape(index)
    ids, answer, _ = document(
        self._haystack, draw, task, length=length, distance=distance,
        statements=self._settings.statements)
    return ids, answer, task

  def _first(self, limit, byte_lengths):
    """Returns how many documents `limit` bytes hold, at least one."""
    for index in range(self._settings.documents):
      limit -= int(byte_lengths[self._make(index)[0]].sum())
      if limit < 0:
        return max(1, index)
    return self._settings.documents

  def plan(self, context, seed):
    """Returns the `packing.Plan` of rows of `context` tokens."""
    return packing.plan(self.lengths, context, seed)

  def blank(self, context):
    """Returns `answers` of a row, as `interleave.Encoded.blank` has it."""
    return {"answers": np.zeros(context, np.int32)}

  def read(self, index, start, length):
    """Returns tokens start to start + length, the last one included."""
    return self._document(index)[0][start:start + length + 1]

  def finish(self, row, at, index, start, length):
    """Marks and weighs the answer of a piece; see `interleave.Encoded`."""
    _, (first, stop), task = self._document(index)
    weights = row["weights"][at:at + length]
    weights[:] = self._text_weight
    # Token t is the target of t - 1.
    weights[max(0, first - 1 - start):max(0, stop - 1 - start)] = (
        self._weights[TASKS.index(task)])
    interleave.mark_answers(row["answers"], at, start, length, [
        (first, stop, interleave.TASKS.index(task))])
