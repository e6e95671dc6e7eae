"""Which pieces of which documents share a row, planned from lengths alone."""

import bisect
import dataclasses
import hashlib

import numpy as np

# Raised when a plan or an order changes for the same arguments: checkpoints
# hold it, so that a resume with another order refuses.
VERSION = 1
# Pieces are fitted to each other within windows of about this many rows. It
# bounds the search, not the result: 512 rows already fill beyond 99 %.
WINDOW_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
  """Pieces sorted by row; pieces first[r] to first[r + 1] make up row r.

  Attributes:
    document: index of the document of each piece.
    start: first token of the piece in its document.
    length: tokens of the piece.
    first: [rows + 1], first piece of each row.
    context: tokens of a row.
  """
  document: np.ndarray
  start: np.ndarray
  length: np.ndarray
  first: np.ndarray
  context: int

  @property
  def rows(self):
    return len(self.first) - 1

  @property
  def fill(self):
    """Share of tokens that are not padding."""
    return float(self.length.sum()) / (self.rows * self.context)


def plan(lengths, context, seed):
  """Lays out every token of every document once.

  A document longer than a row is cut into rows from its start on; what is
  left of it, and every shorter document, stays whole and shares a row with
  others. Rows with the same pieces return every epoch, in another order
  (`order`): pieces of a row do not see each other, so other company would
  teach nothing, and a fixed number of rows makes the epoch of a row a
  division instead of a history.

  Args:
    lengths: tokens of each document, at least 1.
    context: tokens of a row.
    seed: decides which pieces may meet.
  """
  if context < 1:
    raise ValueError(f"{context=} must be at least 1")
  lengths = np.asarray(lengths, np.int64)
  whole, rest = np.divmod(lengths, context)
  # Full rows: `whole` of them for a document.
  document = np.repeat(np.arange(len(lengths)), whole)
  ordinal = np.arange(len(document)) - np.repeat(np.cumsum(whole) - whole,
                                                 whole)
  # Shorter pieces, at most one for a document.
  short = np.flatnonzero(rest)
  short = short[shuffled(len(short), "pieces", seed)]
  row = len(document) + _fit(rest[short], context)
  by_row = np.argsort(row, kind="stable")
  short, row = short[by_row], row[by_row]
  row = np.concatenate([np.arange(len(document)), row])
  rows = int(row[-1]) + 1 if len(row) else 0
  return Plan(
      document=np.concatenate([document, short]).astype(np.int32),
      start=np.concatenate([ordinal * context, whole[short] * context]),
      length=np.concatenate([np.full(len(document), context),
                             rest[short]]).astype(np.int32),
      first=np.searchsorted(row, np.arange(rows + 1)), context=context)


def plan_pieces(document, start, length, media, context, limit, seed):
  """Lays out pieces that are cut already, pictures among their tokens.

  Args:
    document, start, length: of each piece, see `Plan`.
    media: tokens of each piece that show pictures.
    context: tokens of a row.
    limit: tokens of a row that show pictures; no piece has more.
    seed: decides which pieces may meet.
  """
  mixed = shuffled(len(length), "pieces", seed)
  row = _fit(length[mixed], context, media[mixed], limit)
  by_row = np.argsort(row, kind="stable")
  mixed, row = mixed[by_row], row[by_row]
  rows = int(row[-1]) + 1
  return Plan(
      document=document[mixed].astype(np.int32), start=start[mixed],
      length=length[mixed].astype(np.int32),
      first=np.searchsorted(row, np.arange(rows + 1)), context=context)


def order(rows, seed, epoch):
  """Returns the permutation in which an epoch goes through the rows."""
  return shuffled(rows, "rows", seed, epoch)


def shuffled(count, *key):
  """Returns a permutation that depends on `key` and on no library's version.

  Sorts by a bijective hash of the index (the finaliser of splitmix64).
  """
  digest = hashlib.sha256(repr(key).encode("utf-8")).digest()
  x = np.arange(count, dtype=np.uint64)
  x = x * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(digest, "<u8")[0]
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return np.argsort(x ^ (x >> np.uint64(31)))


def _fit(lengths, context, media=None, limit=0):
  """Returns the row of each piece, window by window."""
  media = np.zeros_like(lengths) if media is None else media
  row = np.zeros(len(lengths), np.int64)
  # Windows by tokens, not by pieces: a million short pieces may be few rows.
  window = (np.cumsum(lengths) - 1) // (WINDOW_ROWS * context)
  borders = np.flatnonzero(np.diff(window)) + 1
  rows = 0
  for part in np.split(np.arange(len(lengths)), borders):
    row[part], rows = _best_fit(lengths[part], context, rows, media[part],
                                limit)
  return row


def _best_fit(lengths, context, rows, media, limit):
  """Best fit, longest first; returns rows of pieces and the next free row."""
  row = np.zeros(len(lengths), np.int64)
  sizes, media = lengths.tolist(), media.tolist()
  free = []  # (free tokens, row) of rows with room, sorted
  dark = {}  # row: tokens that may still show pictures
  for piece in np.argsort(-lengths, kind="stable").tolist():
    at = bisect.bisect_left(free, (sizes[piece], 0))
    while at < len(free) and dark[free[at][1]] < media[piece]:
      at += 1
    if at < len(free):
      room, row[piece] = free.pop(at)
    else:
      room, row[piece] = context, rows
      dark[rows] = limit
      rows += 1
    dark[int(row[piece])] -= media[piece]
    if room > sizes[piece]:
      bisect.insort(free, (room - sizes[piece], int(row[piece])))
  return row, rows
