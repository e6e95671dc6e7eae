"""Documents of text and pictures in one order, and their token ids.

Users bring their own as folders of JSON lines, a document a line:

    {"pieces": [{"text": "A cat: "}, {"image": "cats/1.png"},
                {"text": ". How many ears? "}, {"answer": "two"}]}

Paths are relative to the .jsonl file and stay inside of data.path. An answer
is text like any other, and `--mode evaluate` says how many are read right.
"""
import bisect
import dataclasses
import hashlib
import json
import os

from absl import logging
import numpy as np

from ultralong_jax.data import images
from ultralong_jax.data import packing
from ultralong_jax.data import sources

# What an answer is about; figures are reported for each. Of your own
# documents, of `reading`, and the rest of `synthetic`.
TASKS = ("answers", "digits", "pages",
         "needles", "pairs", "variables", "settings", "permuted")


@dataclasses.dataclass(frozen=True)
class Answer:
  """Text that evaluation compares with what the model would have written."""
  text: str
  task: str = "answers"


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
  """A picture of a document.

  Attributes:
    rows, columns: of its grid of tokens.
    digest: of its pixels, as the model gets them.
    source: uint8 [H, W, channels], whole tokens; or a file's path.
    stamp: size and modification time of that file.
  """
  rows: int
  columns: int
  digest: bytes
  source: np.ndarray | str
  stamp: tuple = ()

  @property
  def tokens(self):
    return self.rows * self.columns

  def read(self, form):
    """Returns its pixels, uint8 [H, W, channels]."""
    if not isinstance(self.source, str):
      return self.source
    # A file edited during a run would change what earlier steps meant.
    if _stamp(self.source) != self.stamp:
      raise RuntimeError(f"{self.source} was changed while it was in use; the "
                         "run can be resumed only with the file as it was")
    return images.read(self.source, form)


def picture(pixels, form, path=None) -> Picture:
  """Returns the picture of uint8 [H, W, channels], whole tokens.

  Args:
    pixels: kept, unless there is a path.
    form: see `images.Form`.
    path: the file that it was read from.
  """
  height, width, _ = pixels.shape
  return Picture(height // form.unit, width // form.unit,
                 images.digest(pixels), pixels if path is None else path,
                 () if path is None else _stamp(path))


@dataclasses.dataclass(frozen=True)
class Interleaved(sources.Documents):
  """Documents whose bytes are their text alone.

  Attributes:
    pieces: of each document, in order: str, Answer or Picture.
  """
  pieces: list

  def select(self, documents):
    return dataclasses.replace(
        super().select(documents), pieces=[self.pieces[i] for i in documents])


def documents_of(pieces, names, root="", skipped=()):
  """Returns documents of lists of pieces; those without text are left out.

  Args:
    pieces: a list for each document.
    names: what to call each one in messages.
    root: where they come from.
    skipped: number of documents passed over, by reason.
  """
  skipped, kept = dict(skipped), {}
  for name, parts in zip(names, pieces):
    text = b"".join(map(_text, parts))
    whole = hashlib.sha256(b"".join(
        part.digest if isinstance(part, Picture)
        else hashlib.sha256(repr(part).encode()).digest()
        for part in parts)).digest()
    reason = "without text" if not text else (
        "copies" if whole in kept else None)
    if reason:
      skipped[reason] = skipped.get(reason, 0) + 1
    else:
      kept[whole] = name, text, tuple(parts)
  names, texts, pieces = zip(*kept.values()) if kept else ((), (), ())
  sizes = np.array([len(text) for text in texts], np.int64)
  return Interleaved(
      root=root, names=list(names), begins=np.zeros_like(sizes), sizes=sizes,
      hashes=np.frombuffer(b"".join(kept), np.uint8).reshape(-1, 32),
      stamps=np.stack([sizes, np.zeros_like(sizes)], axis=1),
      held=list(texts), skipped=skipped, pieces=list(pieces))


def open_folder(path, form):
  """Returns the documents of all .jsonl files of a place.

  Every picture is decoded once: whether a file is whole has to be known
  before rows are planned. A document with a picture that is not PNG or JPEG,
  is missing, cut off, broken or larger than `form.decoded_pixels` is skipped
  and counted, and so is one that repeats another.

  Args:
    path: as for `sources.open_documents`; other files are not looked at.
    form: see `images.Form`.

  Raises:
    ValueError: a line is no such document, or names an address or a place
      outside of the folder.
  """
  root, names = sources.find(path)
  found, labels, skipped = [], [], {}
  for name in names:
    if not name.endswith(".jsonl"):
      continue
    with open(os.path.join(root, name), encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        if not line.strip():
          continue
        label = f"{name}:{number}"
        try:
          found.append([_piece(item, root, os.path.dirname(name), form)
                        for item in _items(line)])
          labels.append(label)
        except images.Unusable as unusable:
          logging.info("%s skipped: %s", label, unusable)
          reason = f"picture {unusable.reason}"
          skipped[reason] = skipped.get(reason, 0) + 1
        except ValueError as error:
          raise ValueError(f"{os.path.join(root, label)}: {error}") from error
  documents = documents_of(found, labels, root, skipped)
  if documents.skipped:
    logging.info("%s: documents skipped: %s", root, documents.skipped)
  if len(documents) < 2:
    raise ValueError(
        f"data.path={path!r} holds {len(documents)} usable documents of text "
        f"and pictures, skipped: {documents.skipped}; it needs two or more "
        '(training and validation) in .jsonl files, a line each: {"pieces": '
        '[{"text": "..."}, {"image": "relative/path.png"}]}')
  return documents


def _items(line):
  """Returns the (kind, value) of a line's pieces."""
  try:
    pieces = json.loads(line)["pieces"]
    items = [item for piece in pieces for item in piece.items()]
    if len(items) != len(pieces):
      raise ValueError("more than one thing in a piece")
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError('not {"pieces": [{"text": ...}, {"image": ...}, ...]}: '
                     f"{error!r}") from error
  for kind, value in items:
    if kind not in ("text", "image", "answer") or not isinstance(value, str):
      raise ValueError(f'a piece is {{"text" or "image" or "answer": "..."}}, '
                       f"not {{{kind!r}: {str(value)[:40]!r}}}")
  return items


def _piece(item, root, folder, form):
  kind, value = item
  if kind == "text":
    return value
  if kind == "answer":
    return Answer(value)
  images.refuse_url(value)
  path = os.path.realpath(os.path.join(root, folder, value))
  if os.path.isabs(value) or not path.startswith(
      os.path.join(os.path.realpath(root), "")):
    raise ValueError(f"{value!r} leads out of {root}; pictures lie inside of "
                     "data.path and are named relative to the .jsonl file")
  return picture(images.read(path, form), form, path)


def beginning(documents, limit):
  """Returns the first documents, whole, that `limit` bytes of text hold."""
  held = np.searchsorted(np.cumsum(documents.sizes), limit, side="right")
  return documents.select(range(max(1, held)))


class Encoded:
  """Token ids of documents with pictures; see `data.encoded.Encoded`.

  A picture is as many placeholders as it has tokens, which are inputs and,
  without weight, targets. Ids of all documents lie in memory.

  Attributes:
    lengths: int64, number of pairs of input and target of each document.
    fingerprint: what rows depend on besides the documents.
  """

  def __init__(self, documents, tokenizer, form):
    self._media, self._form = tokenizer.media, form
    self._ids, self._answers, self._pictures = zip(*(
        _encode(pieces, tokenizer, name)
        for pieces, name in zip(documents.pieces, documents.names)))
    self.lengths = np.array([len(ids) - 1 for ids in self._ids], np.int64)
    self.fingerprint = {"images": form.fingerprint}

  def plan(self, context, seed):
    """Lays out rows of `context` tokens and `form.patches` patches."""
    limit = self._form.patches // self._form.merge**2
    cut = [(document, *piece) for document, length in enumerate(self.lengths)
           for piece in cut_document(
               int(length), [(start, seen.tokens) for start, seen
                             in self._pictures[document]], context, limit)]
    return packing.plan_pieces(*np.array(cut, np.int64).T, context, limit,
                               seed)

  def blank(self, context):
    """Returns the arrays that a row has besides a text's, as padding.

    Returns:
      media_index: int32 [T]; which embedding stands there, -1 for text.
      answers: int32 [T]; 0, or 1 + task + number of tasks * answer of the
        row where the target belongs to an answer.
      and those of `images.blank`.
    """
    return {"media_index": np.full(context, -1, np.int32),
            "answers": np.zeros(context, np.int32),
            **images.blank(self._form.patches, self._form)}

  def read(self, document, start, length):
    """Returns tokens start to start + length, the last one included."""
    return self._ids[document][start:start + length + 1]

  def finish(self, row, at, document, start, length):
    """Adds a piece's pictures and answers to a row that has its tokens.

    Args:
      row: the row's arrays.
      at: where in the row the piece begins.
      document, start, length: the piece.
    """
    targets = row["targets"][at:at + length]
    row["weights"][at:at + length][targets == self._media] = 0
    mark_answers(row["answers"], at, start, length, self._answers[document])
    pictures = self._pictures[document]
    low = bisect.bisect_left(pictures, start, key=lambda item: item[0])
    ids = row["patch_segment_ids"]
    for first, seen in pictures[low:]:
      if first >= start + length:
        break
      media = images.put(row, int(np.count_nonzero(ids)),
                         seen.read(self._form), ids.max(initial=0) + 1,
                         self._form)
      part = slice(at + first - start, at + first - start + seen.tokens)
      row["media_index"][part] = np.arange(*media)


def mark_answers(marks, at, start, length, answers):
  """Marks the answers of a piece in a row; see `Encoded.blank`.

  Args:
    marks: int32 [T], `answers` of the row.
    at: where in the row the piece begins.
    start, length: of the piece in its document.
    answers: (start, stop, task) of the document's, in tokens.
  """
  used = -(-marks.max(initial=0) // len(TASKS))
  for first, stop, task in answers:
    # Token t is the target of t - 1. Half an answer is none.
    if start < first and stop <= start + length + 1:
      part = slice(at + first - 1 - start, at + stop - 1 - start)
      marks[part] = 1 + task + len(TASKS) * used
      used += 1


def _encode(pieces, tokenizer, name):
  """Returns a document's ids, answers and pictures by token (0 is bos)."""
  ids, answers, pictures, at = [[tokenizer.bos]], [], [], 1
  for piece in pieces:
    if isinstance(piece, Picture):
      part = np.full(piece.tokens, tokenizer.media, np.int32)
      pictures.append((at, piece))
    else:
      text = _text(piece)
      part = tokenizer.encode_array(text)
      if tokenizer.decode_bytes(part) != text:
        raise ValueError(f"the tokenizer does not give {name!r} back as it "
                         "was, so bits per byte could not be exact")
      if isinstance(piece, Answer):
        answers.append((at, at + len(part), TASKS.index(piece.task)))
    ids.append(part)
    at += len(part)
  ids.append([tokenizer.eos])
  return np.concatenate(ids).astype(np.int32), answers, pictures


def cut_document(length, pictures, context, limit):
  """Cuts a document into pieces that fit into rows, in order.

  Text is cut anywhere, where the row is full; a picture never: what does not
  fit as a whole begins the next piece.

  Args:
    length: tokens.
    pictures: (first token, tokens) of each picture, in order.
    context: tokens of a row.
    limit: tokens of a row that show pictures.

  Returns:
    [(start, length, tokens of pictures)].
  """
  pieces, start, shown = [], 0, 0

  def cut(stop):
    nonlocal start, shown
    pieces.append((start, stop - start, shown))
    start, shown = stop, 0

  for first, tokens in pictures:
    if tokens > min(context, limit):
      raise ValueError(f"a picture of {tokens} tokens fits into no row of "
                       f"{context} tokens, {limit} of them of pictures")
    while first - start >= context:
      cut(start + context)
    if first > start and (first + tokens - start > context
                          or shown + tokens > limit):
      cut(first)
    shown += tokens
  while length - start > context:
    cut(start + context)
  if length > start:
    cut(length)
  return pieces


def _text(piece) -> bytes:
  if isinstance(piece, Picture):
    return b""
  return (piece if isinstance(piece, str) else piece.text).encode()


def _stamp(path):
  status = os.stat(path)
  return status.st_size, status.st_mtime_ns
