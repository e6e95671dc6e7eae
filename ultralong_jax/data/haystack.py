"""Real text as a haystack, with statements at exact places in it."""
import random

import numpy as np

from ultralong_jax.data import encoded

# Words of a made-up name: text hardly ever has five of these in a row.
LETTERS = "bcdfghjklmnpqrstvwxz"
WORD_LETTERS = 5
DIGITS = 5


class Draw:
  """Random choices that depend on `key` and on no library's version."""

  def __init__(self, *key):
    # Of `random`, only seeds of text and random() are promised to stay.
    self._random = random.Random(repr(key)).random

  def below(self, count):
    """Returns an integer in [0, count)."""
    return int(self._random() * count)

  def between(self, low, high):
    """Returns an integer in [low, high]."""
    return low + self.below(high - low + 1)

  def weighted(self, weights):
    """Returns an index, as often as its weight says."""
    bounds = np.cumsum(weights)
    return int(np.searchsorted(bounds, self._random() * bounds[-1], "right"))

  def shuffled(self, items):
    """Returns the items in another order."""
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
      other = self.below(last + 1)
      items[last], items[other] = items[other], items[last]
    return items

  def word(self):
    """Returns a name of WORD_LETTERS letters."""
    return "".join(LETTERS[self.below(len(LETTERS))]
                   for _ in range(WORD_LETTERS))

  def number(self):
    """Returns DIGITS digits, the first of them not 0."""
    return str(self.between(10**(DIGITS - 1), 10**DIGITS - 1))


class Fresh:
  """Names and numbers that neither the text nor an earlier one holds."""

  def __init__(self, draw, text):
    self._draw, self._text, self._given = draw, text, set()

  def _new(self, make):
    while True:
      found = make()
      if found not in self._given and found.encode() not in self._text:
        self._given.add(found)
        return found

  def words(self, count):
    """Returns that many different names."""
    return [self._new(self._draw.word) for _ in range(count)]

  def numbers(self, count):
    """Returns that many different numbers."""
    return [self._new(self._draw.number) for _ in range(count)]


class Haystack:
  """The ids of documents, end to end and then from the start again.

  Attributes:
    tokenizer: that made them.
  """

  def __init__(self, documents, tokenizer):
    self.tokenizer = tokenizer
    self._encoded = encoded.Encoded(documents, tokenizer)
    # Without the end of each document, which is no text.
    counts = self._encoded.lengths - documents.whole
    self._stops = np.cumsum(counts)
    if not len(counts) or not self._stops[-1]:
      raise ValueError("a haystack needs text; data.path has none for one of "
                       "training and validation")

  def take(self, draw, count):
    """Returns `count` ids in a row, int32, from a place that `draw` says."""
    at = draw.below(int(self._stops[-1]))
    parts = [np.zeros(0, np.int32)]
    while count:
      document = int(np.searchsorted(self._stops, at, "right"))
      stop = int(self._stops[document])
      begin = int(self._stops[document - 1]) if document else 0
      part = min(count, stop - at)
      # Token 0 of a document is bos.
      parts.append(self._encoded.read(document, at - begin + 1, part - 1))
      count -= part
      at = stop % int(self._stops[-1])
    return np.concatenate(parts)


def lay(haystack, draw, work_of, *, length, distance, places=1):
  """Returns a document whose evidence is `distance` before its question.

    bos, text and statements, evidence, text and statements, question, answer
                                        `---- distance ----'

  Args:
    haystack: see `Haystack`.
    draw: see `Draw`.
    work_of: function of a `Fresh` that returns a `synthetic.Work`.
    length: pairs of input and target of the document.
    distance: tokens from the evidence that stands furthest back to the
      question, neither included.
    places: 1, or number of statements + 1: places of the haystack that the
      text is of; after a statement begins another one.

  Returns:
    ids: int32 [length + 1], bos first, eos last.
    answer: [start, stop) of the answer in `ids`.
    evidence: [start, stop) of the evidence in `ids`.
  """
  tokenizer, encode = haystack.tokenizer, haystack.tokenizer.encode_array
  # More text than is used: how much, is known once the names are, and those
  # have to differ from the text.
  texts = [haystack.take(draw, length) for _ in range(places)]
  work = work_of(Fresh(draw, b" ".join(map(tokenizer.decode_bytes, texts))))
  statements = [encode(x) for x in work.statements]
  question, answer = encode(work.question), encode(work.answer)
  asked, sizes = work.asked, [len(x) for x in statements]
  stop = length - len(answer) - len(question) - distance  # of the evidence
  before = stop - 1 - sum(sizes[:asked + 1])
  after = distance - sum(sizes[asked + 1:])
  if min(before, after) < 0:
    raise ValueError(f"{length=} and {distance=} leave no room for "
                     f"{len(statements)} statements of {sum(sizes)} tokens")
  gaps = [*_gaps(draw, before, asked, work.together and "first"),
          *_gaps(draw, after, len(sizes) - asked - 1,
                 work.together and "last")]
  if places == 1:
    texts = np.split(texts[0], np.cumsum(gaps))
  parts = [[tokenizer.bos], texts[0][:gaps[0]]]
  for statement, text, gap in zip(statements, texts[1:], gaps[1:]):
    parts += [statement, text[:gap]]
  ids = np.concatenate([*parts, question, answer, [tokenizer.eos]])
  return (ids.astype(np.int32), (length - len(answer), length),
          (stop - sizes[asked], stop))


def _gaps(draw, text, statements, together):
  """Returns text before, between and after statements, in tokens.

  Args:
    draw: see `Draw`.
    text: tokens in all.
    statements: how many.
    together: False, or the gap that gets all, "first" or "last".
  """
  if together:
    gaps = [0] * (statements + 1)
    gaps[0 if together == "first" else -1] = text
    return gaps
  cuts = sorted(draw.between(0, text) for _ in range(statements))
  return np.diff([0, *cuts, text]).tolist()
