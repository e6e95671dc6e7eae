"""Reading tasks from pictures that are on every machine, inside of text.

Digits are scikit-learn's handwritten ones. Pages are text documents as an
image, in Pillow's own font; a crop of a page is to be read.
"""
import functools
import importlib.util
import re

import numpy as np
from PIL import Image
from PIL import ImageDraw
from PIL import ImageFont

from ultralong_jax.data import images
from ultralong_jax.data import interleave
from ultralong_jax.data import packing
from ultralong_jax.data import sources

SOURCES = ("interleaved", "digits", "pages", "reading")
# Tasks of a document, each after a line of running text.
TASKS_PER_DOCUMENT = 3
LINE_CHARACTERS = 24
# Times that a training digit occurs, each time after another line.
DIGIT_COPIES = 2
# Crops of pages in all, both splits together.
CROPS = 6_000
CROP_WORD = re.compile(r"(?<!\w)[A-Za-z0-9_]{2,6}(?!\w)")
PAGE_LINES = 20
PAGE_WIDTH = 400  # pixels
WORDS_PER_PAGE = 24


def open_splits(config, form):
  """Returns training and validation documents of text and pictures.

  No picture and no line of text is in both.

  Args:
    config: `config.data`; source is one of SOURCES, where "reading" is both
      digits and pages. `path` is the folder of interleaved documents, or of
      the text around digits and on pages.
    form: see `images.Form`.
  """
  if form is None:
    raise ValueError(f'data.source="{config.source}" has pictures, and the '
                     'model reads none; set model.vision="tower"')
  if config.source == "interleaved":
    return sources.split(interleave.open_folder(config.path, form),
                         config.validation_fraction)
  return _open(config.source, config.path, config.validation_fraction, form)


@functools.lru_cache(maxsize=1)
def _open(source, path, fraction, form):
  """Both splits; train and validation are opened one after the other."""
  texts = sources.split(sources.open_documents(path), fraction)
  shares = 1 - fraction, fraction
  tasks = [[], []]
  if source in ("digits", "reading"):
    train, validation = digits(fraction, form)
    tasks = [[train * DIGIT_COPIES], [validation]]
  if source in ("pages", "reading"):
    tasks = [a + [crops(text, round(CROPS * share), form)]
             for a, text, share in zip(tasks, texts, shares)]
  return tuple(_documents(kinds, text) for kinds, text in zip(tasks, texts))


def _documents(kinds, text):
  """Documents of a few tasks of one kind each, with lines between them."""
  lines = list(_lines(text))
  order = packing.shuffled(len(lines), "lines")
  pieces, used = [], 0
  for tasks in kinds:
    for first in range(0, len(tasks), TASKS_PER_DOCUMENT):
      pieces.append([])
      for task in tasks[first:first + TASKS_PER_DOCUMENT]:
        line = lines[order[used % len(lines)]]
        pieces[-1] += [line[:LINE_CHARACTERS] + "\n", *task, "\n"]
        used += 1
  mixed = packing.shuffled(len(pieces), "documents")
  pieces = [pieces[i] for i in mixed]
  return interleave.documents_of(
      pieces, [f"document {i}" for i in range(len(pieces))])


def digits(fraction, form):
  """Returns training and validation tasks of scikit-learn's 1797 digits."""
  if importlib.util.find_spec("sklearn") is None:
    raise ModuleNotFoundError(
        "the digits come with scikit-learn: pip install scikit-learn, or this "
        "package's extra `vision`")
  from sklearn import datasets  # Heavy, and nothing else needs it.

  data = datasets.load_digits()
  ink = np.round(data.images * (255 / 16)).astype(np.uint8)
  splits, seen = ([], []), set()
  for pixels, label in zip(255 - ink, data.target):
    picture = interleave.picture(images.load(pixels, form), form)
    if picture.digest not in seen:
      seen.add(picture.digest)
      held_out = int.from_bytes(picture.digest[:8], "big") < fraction * 2**64
      splits[held_out].append(
          ("Digit ", picture, ": ", interleave.Answer(str(label), "digits")))
  return splits


def crops(documents, count, form):
  """Returns up to `count` tasks of words cut out of rendered pages."""
  pages = [(d, start) for d, text in enumerate(map(_text, _all(documents)))
           for start in range(0, text.count("\n"), PAGE_LINES)]
  order = packing.shuffled(len(pages), "pages")
  tasks = []
  for place in order:
    document, start = pages[place]
    lines = _text(documents.read(document)).split("\n")
    tasks += page_crops(lines[start:start + PAGE_LINES], WORDS_PER_PAGE, form)
    if len(tasks) >= count:
      break
  return tasks[:count]


def page_crops(lines, count, form):
  """Renders a page; returns tasks of `count` of its words.

  Args:
    lines: of the page's text.
    count: of words; fewer if the page has fewer.
    form: see `images.Form`.
  """
  font = ImageFont.load_default()
  height = sum(font.getmetrics())
  page = Image.new("L", (PAGE_WIDTH, height * len(lines)), "white")
  draw = ImageDraw.Draw(page)
  words = []
  for row, line in enumerate(lines):
    draw.text((0, row * height), line, fill="black", font=font)
    words += [(row, line, match) for match in CROP_WORD.finditer(line)]
  tasks = []
  for place in packing.shuffled(len(words), "words", *lines)[:count]:
    row, line, match = words[place]
    left, right = (font.getlength(line[:end]) for end in match.span())
    box = (int(left), row * height, int(np.ceil(right)), (row + 1) * height)
    if right <= PAGE_WIDTH:
      tasks.append(("Read ", _picture(page.crop(box), form), ": ",
                    interleave.Answer(match[0], "pages")))
  return tasks


def _picture(crop, form):
  """A crop on white whole tokens: letters are not resampled."""
  width, height = (-(-size // form.unit) * form.unit for size in crop.size)
  white = Image.new("L", (width, height), "white")
  white.paste(crop, (0, 0))
  return interleave.picture(images.load(white, form), form)


def _all(documents):
  return (documents.read(d) for d in range(len(documents)))


def _text(raw):
  """Printable ASCII: what the font has, and nothing that ends a line."""
  text = raw.decode("utf-8", errors="ignore").expandtabs(4)
  return re.sub(r"[^\x20-\x7e\n]", "", text)


def _lines(documents):
  """Yields the lines of documents that have something to say."""
  for text in map(_text, _all(documents)):
    yield from (line.strip() for line in text.split("\n")
                if len(line.strip()) > 20)
