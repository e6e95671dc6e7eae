"""Sizes and patches of pictures, and the files that are refused."""

import io

import numpy as np
from PIL import Image
import pytest

from ultralong_jax.data import images

FORM = images.Form(patch=2, merge=2, channels=1, pixels=256,
                   decoded_pixels=10_000, patches=64)


def noise(height, width, *channels):
  return np.random.default_rng(0).integers(
      0, 256, (height, width, *channels), np.uint8)


def encoded(image, kind="PNG", **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def test_any_size_becomes_whole_tokens_within_the_budget():
  random = np.random.default_rng(0)
  for height, width in np.exp(random.uniform(0, 8, (500, 2))).astype(int):
    height, width = max(height, 1), max(width, 1)
    rows, columns = images.grid(height, width, FORM)
    assert rows >= 1 and columns >= 1 and rows * columns * 16 <= FORM.pixels
    # Each side is within a token of what keeps the aspect.
    shrink = min(1, (FORM.pixels / (height * width))**0.5) / 4
    for side, size in ((rows, height), (columns, width)):
      assert abs(side - size * shrink) < 1 or 1 in (rows, columns)
  assert images.grid(8, 12, FORM) == (2, 3)
  assert images.grid(800, 800, FORM) == (4, 4)
  assert images.grid(1, 10**6, FORM) == (1, 16)


def test_patches_of_a_token_are_neighbours():
  picture = noise(8, 12, 1)
  patches_PI, places_P4 = images.patchify(picture, FORM)
  assert patches_PI.shape == (24, 4)
  for pixels, (row, column, rows, columns) in zip(patches_PI, places_P4):
    assert (rows, columns) == (4, 6)
    expected = picture[2 * row:2 * row + 2, 2 * column:2 * column + 2]
    np.testing.assert_array_equal(pixels, expected.reshape(-1))
  for token in range(6):
    places = places_P4[4 * token:4 * token + 4, :2] - [
        2 * (token // 3), 2 * (token % 3)]
    assert places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_picture_of_whole_tokens_keeps_its_pixels():
  picture = noise(8, 12)
  np.testing.assert_array_equal(images.load(picture, FORM)[..., 0], picture)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "LA", "I;16"])
def test_reads_what_png_can_hold(tmp_path, mode):
  image = Image.fromarray(np.full((8, 8), 200, np.uint8))
  if mode == "I;16":
    image = Image.fromarray(np.full((8, 8), 200 << 8, np.uint16))
  else:
    image = image.convert(mode)
  path = tmp_path / "a.png"
  path.write_bytes(encoded(image))
  for channels in (1, 3):
    form = images.Form(2, 2, channels, 256, 10_000, 64)
    picture = images.read(path, form)
    assert picture.shape == (8, 8, channels) and picture.dtype == np.uint8
    if mode != "1":
      assert np.abs(picture.astype(int) - 200).max() <= 8


def test_transparency_is_white_and_exif_is_applied(tmp_path):
  clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
  assert images.load(clear, FORM).min() == 255
  exif = Image.Exif()
  exif[0x0112] = 6  # turned by a quarter
  path = tmp_path / "a.jpg"
  path.write_bytes(encoded(Image.new("L", (12, 8)), "JPEG", exif=exif))
  assert images.read(path, FORM).shape == (12, 8, 1)


BOMB = Image.new("1", (12_000, 12_000))


@pytest.mark.parametrize("content, reason", [
    (encoded(Image.fromarray(noise(40, 40)))[:900], "corrupt"),
    (encoded(Image.fromarray(noise(40, 40)), "JPEG")[:900], "corrupt"),
    (encoded(Image.fromarray(noise(8, 8)), "GIF"), "neither PNG nor JPEG"),
    (b"", "neither PNG nor JPEG"),
    (b"\x89PNG\r\n\x1a\n" + 50 * b"x", "corrupt"),
    (encoded(Image.new("1", (101, 100))), "too large"),
    (encoded(BOMB), "too large"),
    (encoded(BOMB.resize((20_000, 12_000))), "too large")],
    ids=["png cut off", "jpeg cut off", "gif", "empty", "garbage",
         "just too large", "pillow warns", "pillow refuses"])
def test_what_cannot_be_used_says_why(tmp_path, content, reason, monkeypatch):
  path = tmp_path / "a.png"
  path.write_bytes(content)
  if reason == "too large":  # nothing is decoded
    monkeypatch.setattr(Image.Image, "load", None)
  with pytest.raises(images.Unusable) as error:
    images.read(path, FORM)
  assert error.value.reason == reason


def test_missing_file_is_unusable(tmp_path):
  with pytest.raises(images.Unusable) as error:
    images.read(tmp_path / "a.png", FORM)
  assert error.value.reason == "missing"


@pytest.mark.parametrize("url", [
    "http://example.org/a.png", "HTTPS://x", "data:image/png;base64,AA",
    "file:///etc/a.png", "www.example.org/a.png", "//host/a.png"])
def test_nothing_is_fetched(url):
  with pytest.raises(ValueError, match="never fetched"):
    images.load(url, FORM)


def test_arrays_that_are_no_pictures_are_refused():
  with pytest.raises(ValueError, match="float64; give uint8"):
    images.load(np.zeros((8, 8)), FORM)
  with pytest.raises(images.Unusable, match="decoded_pixels is 10000"):
    images.load(noise(101, 100), FORM)
