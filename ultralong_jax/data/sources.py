"""Documents: the UTF-8 files of a folder, or of Python, in two splits."""

import codecs
import collections
import dataclasses
import functools
import glob
import hashlib
import os
import stat
import sysconfig

from absl import logging
import numpy as np

# Folders of Python's library that are not its sources.
NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages")
# Folders that hold no documents, beside the hidden ones (.git, .venv).
NOT_DOCUMENTS = ("__pycache__", "CVS", "_darcs")
# Contents are held in memory up to this sum; the rest is read when needed.
HELD_BYTES = 2**28
READ_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Documents:
  """Stretches of files, in a fixed order; one column an attribute.

  Attributes:
    root: folder that `names` are relative to.
    names: path of each file.
    begins: int64, first byte of the stretch.
    sizes: int64, bytes of the stretch; never 0.
    hashes: uint8 [documents, 32], SHA-256 of the file.
    stamps: int64 [documents, 2], size and modification time of the file.
    held: contents of the file, or None where it is read when needed.
    skipped: number of files passed over, by reason.
  """
  root: str
  names: list
  begins: np.ndarray
  sizes: np.ndarray
  hashes: np.ndarray
  stamps: np.ndarray
  held: list
  skipped: dict

  def __len__(self):
    return len(self.names)

  @property
  def bytes(self):
    return int(self.sizes.sum())

  @property
  def whole(self):
    """Whether each stretch reaches the end of its file."""
    return self.begins + self.sizes == self.stamps[:, 0]

  @property
  def digest(self):
    """One hash over all stretches, in order; names do not enter."""
    digest = hashlib.sha256(self.hashes.tobytes())
    digest.update(np.stack([self.begins, self.sizes]).tobytes())
    return digest.hexdigest()[:32]

  def read(self, document, start=0, stop=None):
    """Returns bytes [start, stop) of a stretch."""
    size = int(self.sizes[document])
    stop = size if stop is None else min(stop, size)
    begin = int(self.begins[document])
    held = self.held[document]
    if held is not None:
      return held[begin + start:begin + stop]
    path = os.path.join(self.root, self.names[document])
    with open(path, "rb", buffering=0) as file:
      # A file edited during a run would change what earlier steps meant.
      if _stamp(os.fstat(file.fileno())) != tuple(self.stamps[document]):
        raise RuntimeError(f"{path} was changed while it was in use; the run "
                           "can be resumed only with the file as it was")
      file.seek(begin + start)
      return file.read(stop - start)

  def select(self, documents):
    """Returns the documents of these indices, in their order."""
    documents = np.asarray(documents, np.int64)
    return dataclasses.replace(
        self, names=[self.names[i] for i in documents],
        held=[self.held[i] for i in documents],
        begins=self.begins[documents], sizes=self.sizes[documents],
        hashes=self.hashes[documents], stamps=self.stamps[documents])

  def first(self, limit):
    """Returns the first `limit` bytes, the last document cut if need be."""
    before = np.cumsum(self.sizes) - self.sizes
    return self.heads(np.maximum(limit - before, 0))

  def heads(self, limits):
    """Returns the beginnings of documents, cut at borders of characters.

    Args:
      limits: most bytes of each; documents of which nothing is left go.
    """
    sizes = np.minimum(self.sizes, limits)
    for document in np.flatnonzero(sizes < self.sizes):
      sizes[document] = self.border(document, int(sizes[document]))
    kept = np.flatnonzero(sizes)
    return dataclasses.replace(self.select(kept), sizes=sizes[kept])

  def border(self, document, position):
    """Returns the last border of characters at or before `position`."""
    if position >= self.sizes[document]:
      return int(self.sizes[document])
    start = max(0, position - 3)  # A character has at most four bytes.
    window = self.read(document, start, position + 1)
    while position > start and window[position - start] & 0xC0 == 0x80:
      position -= 1
    return position


def open_documents(path):
  """Returns all documents of a place, sorted by relative path.

  Files that are empty, are not UTF-8, cannot be read, are being written or
  repeat an earlier one byte for byte are skipped and counted.

  Args:
    path: "" for the sources of Python's standard library; or a folder, read
      recursively without hidden entries; or a file; or a glob.
  """
  root, names = find(path)
  stamped, lost = [], 0
  for name in names:
    try:
      stamped.append((name, *_stamp(os.stat(os.path.join(root, name)))))
    except OSError:  # A dangling or circular link.
      lost += 1
  documents = _scan(root, tuple(stamped), lost)
  if not len(documents):
    reasons = ", ".join(f"{n} {r}" for r, n in documents.skipped.items())
    raise ValueError(
        f"data.path={path!r} holds no usable document ({len(names)} files"
        f"{': ' + reasons if reasons else ''}); it needs files of UTF-8 text "
        "or code that are not empty and not hidden")
  return documents


def find(path):
  """Returns the root folder and the sorted relative names of its files."""
  if not path:
    root = sysconfig.get_path("stdlib")
    files = [f for f in _walk(root, set(), NOT_LIBRARY) if f.endswith(".py")]
    # Written by the build for one machine; not a source of the library.
    files = [f for f in files
             if not os.path.relpath(f, root).startswith("_sysconfigdata")]
    if not files:
      raise FileNotFoundError(
          f"no Python sources under {root}; set data.path to a folder of text")
    return root, sorted(os.path.relpath(f, root) for f in files)
  path = os.path.expanduser(path)
  if os.path.isdir(path):
    return path, sorted(os.path.relpath(f, path) for f in _walk(path, set()))
  # A name with brackets is a file before it is a pattern.
  places = [path] if os.path.exists(path) else sorted(
      glob.glob(path, recursive=True))
  if not places:
    raise FileNotFoundError(
        f"data.path={path!r}: no such folder or file, and no match as a glob")
  seen, files = set(), set()
  for place in places:
    files.update(_walk(place, seen) if os.path.isdir(place) else [place])
  root = os.path.commonpath([os.path.dirname(os.path.abspath(f))
                             for f in files or places])
  return root, sorted(os.path.relpath(f, root) for f in files)


def split(documents, fraction):
  """Returns train and validation documents, chosen by their hashes.

  Neither is empty, unless `fraction` is 0: where hashes would leave one so,
  the document nearest to the border changes sides, and a single document is
  cut in two. Validation is in the order of hashes, so that its first bytes
  are a sample of everything.

  Args:
    documents: distinct documents.
    fraction: share of documents for validation, in [0, 1).
  """
  if not 0 <= fraction < 1:
    raise ValueError(f"data.validation_fraction={fraction} is not in [0, 1)")
  if fraction == 0:
    return documents, documents.select([])
  if len(documents) == 1:
    return _halves(documents, fraction)
  rank = np.frombuffer(documents.hashes[:, :8].tobytes(), ">u8")
  order = np.argsort(rank.astype(np.uint64), kind="stable")
  count = np.clip((rank / 2.0**64 < fraction).sum(), 1, len(documents) - 1)
  return (documents.select(np.sort(order[count:])),
          documents.select(order[:count]))


def sample(documents, limit, least):
  """Returns `limit` bytes that come from as many documents as they can.

  Every document gives its beginning, all up to the same length. The first
  documents alone would not do: one file of Python's library is longer than
  all others that fall to validation with it.

  Args:
    documents: what to take from.
    limit: bytes altogether.
    least: the common length is at least this, even if not every document has
      its turn then.
  """
  sizes = np.sort(documents.sizes)
  before = np.cumsum(sizes) - sizes
  left = len(sizes) - np.arange(len(sizes))  # documents as long or longer
  at = np.searchsorted(before + sizes * left, limit)
  if at == len(sizes):
    return documents
  length = -((before[at] - limit) // left[at])  # rounded up
  return documents.heads(max(length, least)).first(limit)


def _halves(documents, fraction):
  """Cuts a single document: the end of it is for validation."""
  size = documents.bytes
  cut = documents.border(0, min(size - 1, round(size * (1 - fraction))))
  if cut == 0:
    raise ValueError(
        f"the only document, {documents.names[0]!r}, has {size} bytes: too "
        "few to cut off a validation part; give data.path more text")
  train, validation = documents.select([0]), documents.select([0])
  train.sizes[0] = cut
  validation.begins[0] += cut
  validation.sizes[0] -= cut
  return train, validation


def _walk(folder, seen, left_out=()):
  """Yields the files under `folder`; follows links, each folder once."""
  def kept(name):
    return not (name.startswith(".") or name in NOT_DOCUMENTS
                or name in left_out)

  for place, folders, files in os.walk(folder, followlinks=True):
    real = os.path.realpath(place)
    if real in seen:  # A link to a folder above, or to one already read.
      folders.clear()
      continue
    seen.add(real)
    folders[:] = sorted(filter(kept, folders))
    for name in sorted(filter(kept, files)):
      yield os.path.join(place, name)


# Train, validation and baseline open the same files: they are read once, and
# again only if a size or time of modification differs.
@functools.lru_cache(maxsize=1)
def _scan(root, stamped, lost):
  """Reads every file once: is it text, what is its hash, how long is it."""
  skipped = collections.Counter({"unreadable": lost} if lost else {})
  columns, seen, total = [], set(), 0
  for name, size, modified in stamped:
    try:
      digest, length, content = _read(os.path.join(root, name),
                                      size <= HELD_BYTES - total)
    except UnicodeDecodeError:
      skipped["undecodable"] += 1
      continue
    except OSError:
      skipped["unreadable"] += 1
      continue
    reason = ("changing" if length != size else "empty" if not size else
              "copies" if digest in seen else None)
    if reason:
      skipped[reason] += 1
      continue
    seen.add(digest)
    total += len(content or b"")
    columns.append((name, size, modified, digest, content))
  if skipped:
    logging.info("%s: files skipped: %s", root, dict(skipped))
  names, sizes, times, hashes, held = zip(*columns) if columns else [()] * 5
  sizes = np.array(sizes, np.int64)
  return Documents(
      root=root, names=list(names), begins=np.zeros_like(sizes), sizes=sizes,
      hashes=np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32),
      stamps=np.stack([sizes, np.array(times, np.int64)], axis=1),
      held=list(held), skipped=dict(skipped))


def _read(path, hold):
  """Returns hash and length of a text file and, if `hold`, its contents."""
  decoder = codecs.getincrementaldecoder("utf-8")()
  digest, length, chunks = hashlib.sha256(), 0, []
  # A pipe would block for ever, so nothing but a regular file is opened.
  if not stat.S_ISREG(os.stat(path).st_mode):
    raise OSError(f"{path} is not a regular file")
  with open(path, "rb", buffering=0) as file:
    while chunk := file.read(READ_BYTES):
      decoder.decode(chunk)
      digest.update(chunk)
      length += len(chunk)
      if hold:
        chunks.append(chunk)
  decoder.decode(b"", final=True)
  return digest.digest(), length, b"".join(chunks) if hold else None


def _stamp(status):
  return status.st_size, status.st_mtime_ns
