"""Pictures to patches: safe decoding, sizes, and the order of patches."""
import dataclasses
import hashlib
import math
import os
import warnings

import numpy as np
import PIL
from PIL import Image
from PIL import ImageOps

FORMATS = ("PNG", "JPEG")
# Bytes of a file: a cap on pixels alone lets a file of any size be read.
FILE_BYTES = 2**28
# What Pillow raises on files that are not what their first bytes say.
BROKEN = (OSError, ValueError, SyntaxError, EOFError)


class Unusable(ValueError):
  """A picture that is skipped; `reason` is what to count it as."""

  def __init__(self, reason, detail):
    super().__init__(detail)
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class Form:
  """What a model wants of pictures.

  Attributes:
    patch: pixels along a patch's side.
    merge: patches along a side that become one token.
    channels: 1 grey or 3 colour.
    pixels: most pixels of a picture; larger ones are shrunk.
    decoded_pixels: most pixels of a file; larger ones are refused unread.
    patches: of a row of the data.
  """
  patch: int
  merge: int
  channels: int
  pixels: int
  decoded_pixels: int
  patches: int

  @property
  def unit(self):
    """Pixels along the side of a token."""
    return self.patch * self.merge

  @property
  def fingerprint(self):
    """What the rows of a data set depend on besides its documents."""
    return {**dataclasses.asdict(self), "pillow": PIL.__version__}


def form(config) -> Form | None:
  """Returns the form of a config; None where the model reads no images."""
  model = config.model
  if model.vision == "none":
    return None
  data = config.data
  return Form(
      patch=model.vision_patch, merge=model.vision_merge,
      channels=model.vision_channels, pixels=data.image_pixels,
      decoded_pixels=data.decoded_pixels, patches=data.patches)


def grid(height, width, form):
  """Returns the rows and columns of tokens of a picture.

  The picture is resized to whole tokens: at its own size if that is within
  `form.pixels`, else shrunk to it; sides to the nearest token, or down where
  that would pass `form.pixels`, and never to none. So its aspect changes by
  less than a token a side, and no pixel of padding is made.
  """
  most = max(1, form.pixels // form.unit**2)
  scale = min(1., math.sqrt(most * form.unit**2 / (height * width)))
  sides = [size * scale / form.unit for size in (height, width)]
  rows, columns = (max(1, round(side)) for side in sides)
  if rows * columns > most:
    rows, columns = (max(1, int(side)) for side in sides)
    # One of them may have been raised to 1.
    rows, columns = min(rows, most), min(columns, most)
  return rows, columns


def read(path, form):
  """Returns the picture of a PNG or JPEG file: uint8 [H, W, channels].

  The size in the header is checked before anything is decoded.

  Args:
    path: a file; nothing else is opened, links of the network included.
    form: see `Form`.

  Raises:
    Unusable: too large, truncated, corrupt, of another format or unreadable.
  """
  try:
    if os.stat(path).st_size > FILE_BYTES:
      raise Unusable("too large", f"{path} has more than {FILE_BYTES} bytes")
    # Pillow warns of sizes that are refused below anyway.
    with warnings.catch_warnings():
      warnings.simplefilter("ignore", Image.DecompressionBombWarning)
      image = Image.open(path, formats=FORMATS)
    with image:
      if image.width * image.height > form.decoded_pixels:
        raise Unusable(
            "too large", f"{path} has {image.width} x {image.height} pixels; "
            f"data.decoded_pixels is {form.decoded_pixels}")
      return to_array(image, form)
  except Image.DecompressionBombError as error:
    raise Unusable("too large", f"{path}: {error}") from error
  except Unusable:
    raise
  except PIL.UnidentifiedImageError as error:
    raise Unusable("neither PNG nor JPEG", str(error)) from error
  except FileNotFoundError as error:
    raise Unusable("missing", str(error)) from error
  except BROKEN as error:
    raise Unusable("corrupt", f"{path}: {error}") from error


def to_array(image, form):
  """Returns a picture as uint8 [H, W, channels], shrunk into the budget.

  Args:
    image: a PIL image; transparency is laid on white, EXIF rotation applied.
    form: see `Form`.
  """
  image = ImageOps.exif_transpose(image)
  if image.mode.startswith("I"):  # 16 bits; Pillow would clip, not scale
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
  if image.has_transparency_data:
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image)
  image = image.convert("L" if form.channels == 1 else "RGB")
  rows, columns = grid(image.height, image.width, form)
  size = (columns * form.unit, rows * form.unit)
  if size != image.size:
    image = image.resize(size, Image.Resampling.BICUBIC)
  return np.asarray(image).reshape(size[1], size[0], form.channels)


def load(picture, form):
  """Returns the array of a path, a PIL image or an array (see `to_array`).

  Args:
    picture: path of a file; or a PIL image; or uint8 [H, W] or [H, W, 3].
    form: see `Form`.
  """
  if isinstance(picture, (str, os.PathLike)):
    refuse_url(picture)
    return read(picture, form)
  if not isinstance(picture, Image.Image):
    picture = np.asarray(picture)
    if picture.dtype != np.uint8:
      raise ValueError(f"a picture has dtype {picture.dtype}; give uint8, "
                       "0 black to 255 white")
    picture = Image.fromarray(picture)
  if picture.width * picture.height > form.decoded_pixels:
    raise Unusable("too large", f"a picture of {picture.width} x "
                   f"{picture.height} pixels; data.decoded_pixels is "
                   f"{form.decoded_pixels}")
  return to_array(picture, form)


def refuse_url(path):
  """Raises on what would have to be fetched."""
  text = os.fspath(path)
  if "://" in text or text.lower().startswith(("data:", "www.", "//")):
    raise ValueError(f"{text[:80]!r} is not the path of a file: data is never "
                     "fetched from an address; download it first")


def patchify(picture, form):
  """Cuts a picture into patches, a token's patches one after another.

  Tokens go row by row over the picture, and patches row by row inside of
  theirs.

  Args:
    picture: uint8 [H, W, channels], sides whole tokens.
    form: see `Form`.

  Returns:
    patches_PI: uint8, a patch's pixels row by row, channels last.
    places_P4: int32; row, column, and rows and columns of the grid.
  """
  height, width, channels = picture.shape
  p, m = form.patch, form.merge
  rows, columns = height // p, width // p

  def by_token(x):
    x = x.reshape(rows // m, m, columns // m, m, -1)
    return x.swapaxes(1, 2).reshape(rows * columns, -1)

  patches = picture.reshape(rows, p, columns, p, channels).swapaxes(1, 2)
  row, column = np.mgrid[:rows, :columns].astype(np.int32)
  places = np.stack([row, column, np.full_like(row, rows),
                     np.full_like(row, columns)], axis=-1)
  return by_token(patches), by_token(places)


def blank(count, form):
  """Returns `count` patches of padding, as the arrays of a row.

  Returns:
    patches: uint8 [P, patch^2 * channels].
    patch_segment_ids: int32 [P]; 1, 2, ... for the pictures, 0 for padding.
    patch_places: int32 [P, 4]; see `patchify`.
  """
  return {"patches": np.zeros((count, form.patch**2 * form.channels),
                              np.uint8),
          "patch_segment_ids": np.zeros(count, np.int32),
          "patch_places": np.zeros((count, 4), np.int32)}


def put(row, at, picture, segment, form):
  """Writes a picture's patches into arrays of `blank`, from `at` on.

  Returns:
    (first, stop): tokens of the row's pictures, those of this one.
  """
  patches, places = patchify(picture, form)
  part = slice(at, at + len(patches))
  row["patches"][part] = patches
  row["patch_segment_ids"][part] = segment
  row["patch_places"][part] = places
  return part.start // form.merge**2, part.stop // form.merge**2


def pack(rows, form):
  """Packs the pictures of some rows into arrays of one size.

  Args:
    rows: for each row its pictures, as `load` returns them.
    form: see `Form`; `form.patches` does not matter.

  Returns:
    The arrays of `blank`, with the rows first. Patches are as many as the
    row with most needs, up to a power of two: few sizes to compile for.
  """
  most = max(sum(x.size for x in row) for row in rows) // (
      form.patch**2 * form.channels)
  count = form.merge**2 << max(0, most // form.merge**2 - 1).bit_length()
  packed = []
  for pictures in rows:
    packed.append(blank(count, form))
    at = 0
    for segment, picture in enumerate(pictures, 1):
      at = put(packed[-1], at, picture, segment, form)[1] * form.merge**2
  return {name: np.stack([row[name] for row in packed]) for name in packed[0]}


def digest(picture):
  """Returns the SHA-256 of a picture's size and pixels."""
  shape = np.array(picture.shape, np.int64)
  return hashlib.sha256(shape.tobytes() + picture.tobytes()).digest()
