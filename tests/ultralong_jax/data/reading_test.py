"""Digits and words of pages: splits share nothing, answers are as shown."""

import types

import numpy as np
from PIL import Image
from PIL import ImageDraw
from PIL import ImageFont
import pytest
from sklearn import datasets

from ultralong_jax.data import images
from ultralong_jax.data import interleave
from ultralong_jax.data import reading

FORM = images.Form(patch=4, merge=2, channels=1, pixels=4096,
                   decoded_pixels=10**6, patches=512)


@pytest.fixture
def folder(tmp_path):
  """Ten documents of forty lines of words."""
  random = np.random.default_rng(0)
  for document in range(10):
    lines = [" ".join("".join(random.choice(list("abcdefgh"),
                                            random.integers(2, 9)))
                      for _ in range(6)) for _ in range(40)]
    (tmp_path / f"{document}.txt").write_text("\n".join(lines))
  return tmp_path


def open_splits(folder, source, form=FORM):
  return reading.open_splits(types.SimpleNamespace(
      source=source, path=str(folder), validation_fraction=0.2), form)


def tasks(documents):
  """(pixels, answer, task) of every picture."""
  for pieces in documents.pieces:
    for piece, after, answer in zip(pieces, pieces[1:], pieces[2:]):
      if isinstance(piece, interleave.Picture):
        assert after == ": "
        yield piece.read(FORM), answer.text, answer.task


def test_digits_are_all_there_and_held_out_ones_are_new(folder):
  train, validation = (list(tasks(documents)) for documents in
                       open_splits(folder, "digits"))
  data = datasets.load_digits()
  expected = {(255 - np.round(x * 255 / 16)).astype(np.uint8).tobytes(): str(y)
              for x, y in zip(data.images, data.target)}
  seen = {x.tobytes(): answer for x, answer, _ in train + validation}
  assert seen == expected
  held = {x.tobytes() for x, _, _ in validation}
  assert not held & {x.tobytes() for x, _, _ in train}
  assert 0.15 < len(held) / len(expected) < 0.25
  assert {task for _, _, task in train} == {"digits"}


def test_a_crop_of_a_page_shows_its_answer(folder):
  train, validation = open_splits(folder, "pages")
  font = ImageFont.load_default()
  checked = 0
  for pixels, answer, task in list(tasks(train))[:40]:
    alone = Image.new("L", pixels.shape[1::-1], "white")
    ImageDraw.Draw(alone).text((0, 0), answer, fill="black", font=font)
    ink = [(255. - x).ravel() for x in (pixels[..., 0], np.asarray(alone))]
    # Letters of a line may stand half a pixel aside.
    assert ink[0].sum() == pytest.approx(ink[1].sum(), rel=0.25)
    checked += task == "pages" and pixels.shape[0] == 16
  assert checked == 40
  words = ["".join(p if isinstance(p, str) else "" for p in pieces)
           for documents in (train, validation)
           for pieces in documents.pieces]
  assert len(words) > 50


def test_order_is_the_same_every_time(folder):
  first = open_splits(folder, "reading")[0].digest
  reading._open.cache_clear()
  assert open_splits(folder, "reading")[0].digest == first


def test_a_model_that_reads_no_images_is_refused(folder):
  with pytest.raises(ValueError, match='set model.vision="tower"'):
    open_splits(folder, "digits", None)
