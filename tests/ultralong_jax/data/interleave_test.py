"""Text and pictures in one order: packing, places, weights, resume."""

import json
import types

import numpy as np
from PIL import Image
import pytest

from ultralong_jax.data import images
from ultralong_jax.data import interleave
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer

FORM = images.Form(patch=2, merge=2, channels=1, pixels=256,
                   decoded_pixels=10_000, patches=48)
BYTE = tokenizer.load("byte")
CONTEXT = 40


def write(folder, documents, name="docs.jsonl"):
  lines = [json.dumps({"pieces": pieces}) for pieces in documents]
  (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
  """Thirty documents of up to six pieces, in two files; twelve pictures."""
  random = np.random.default_rng(0)
  (tmp_path / "pictures").mkdir()
  for i in range(12):
    size = 4 * random.integers(1, 5, 2)
    picture = random.integers(0, 256, size, np.uint8)
    Image.fromarray(picture).save(tmp_path / "pictures" / f"{i}.png")
  documents = []
  for i in range(30):
    pieces = [{"text": f"document {i}: é"}]
    for _ in range(random.integers(6)):
      pieces.append([
          {"image": f"pictures/{random.integers(12)}.png"},
          {"text": "x" * int(random.integers(60))},
          {"answer": f"answer {i}"}][random.integers(3)])
    documents.append(pieces)
  write(tmp_path, documents[:10], "a.jsonl")
  write(tmp_path, documents[10:], "b.jsonl")
  return tmp_path


def open_split(folder, split="train", **changes):
  leaves = types.SimpleNamespace(**{
      "source": "interleaved", "path": str(folder),
      "validation_fraction": 0.2, "validation_bytes": 10**6,
      "validation_context": CONTEXT})
  return loader.open_data(leaves, BYTE, split=split, form=FORM,
                          **{"context": CONTEXT, "batch": 2, "seed": 0,
                             **changes})


def expected_pairs(documents):
  """Every (input, target) of documents; an image's token is its pixels."""
  pairs = []
  for pieces in documents.pieces:
    tokens = [BYTE.bos]
    for piece in pieces:
      if isinstance(piece, interleave.Picture):
        patches_PI, _ = images.patchify(piece.read(FORM), FORM)
        tokens += [part.tobytes() for part in patches_PI.reshape(
            piece.tokens, -1)]
      else:
        text = piece if isinstance(piece, str) else piece.text
        tokens += list(text.encode())
    pairs += zip(tokens, tokens[1:] + [BYTE.eos])
  return pairs


def seen_pairs(rows):
  """The same, read out of rows."""
  pairs = []
  for row in rows:
    patches = row["patches"].reshape(FORM.patches // 4, -1)
    show = [patches[i].tobytes() if i >= 0 else token for token, i in zip(
        row["tokens"].tolist(), row["media_index"])]
    for t in np.flatnonzero(row["segment_ids"]):
      target = int(row["targets"][t])
      after = show[t + 1] if target == BYTE.media and t + 1 < CONTEXT else (
          target)
      pairs.append((show[t], after))
  return pairs


def test_an_epoch_has_every_token_and_picture_once(folder):
  data = open_split(folder)
  rows = [data.row(i) for i in range(data.rows_per_epoch)]
  count = {}
  for pair in expected_pairs(data.documents):
    count[pair] = count.get(pair, 0) + 1
  for first, second in seen_pairs(rows):
    if second == BYTE.media:  # the picture begins the next row
      (key,) = [k for k in count if k[0] == first and count[k]
                and isinstance(k[1], bytes)][:1]
      second = key[1]
    count[first, second] -= 1
  assert not any(count.values())
  assert data.rows_per_epoch > 10


def test_rows_are_as_text_and_pictures_say(folder):
  data = open_split(folder)
  whole = 0
  for index in range(data.rows_per_epoch):
    row = data.row(index)
    real = row["segment_ids"] > 0
    shows = row["media_index"] >= 0
    # Placeholders stand where pictures are; loss is on text alone.
    np.testing.assert_array_equal(row["tokens"] == BYTE.media, shows)
    np.testing.assert_array_equal(
        row["weights"], real & (row["targets"] != BYTE.media))
    # Embeddings in order, each once; every patch belongs to one.
    used = row["media_index"][shows]
    np.testing.assert_array_equal(used, np.arange(len(used)))
    patches = np.count_nonzero(row["patch_segment_ids"])
    assert patches == 4 * len(used) <= FORM.patches
    # One picture lies in one document, and starts and ends with it there.
    for n in range(1, row["patch_segment_ids"].max() + 1):
      own = np.flatnonzero(row["patch_segment_ids"] == n)[::4] // 4
      at = np.flatnonzero(np.isin(row["media_index"], own))
      assert len(set(row["segment_ids"][at])) == 1
      np.testing.assert_array_equal(np.diff(at), 1)
      rows, columns = row["patch_places"][4 * own[0], 2:]
      assert rows * columns == 4 * len(own)
      whole += 1
    for segment in range(1, row["segment_ids"].max() + 1):
      own = row["segment_ids"] == segment
      np.testing.assert_array_equal(row["positions"][own],
                                    np.arange(own.sum()))
  assert whole > 10


def test_row_depends_on_seed_and_place_alone(folder, goes_on):
  data, again = open_split(folder), open_split(folder)
  goes_on(data, again)
  other = open_split(folder, seed=1)
  assert any(np.any(other.row(i)["tokens"] != data.row(i)["tokens"])
             for i in range(4))
  assert other.fingerprint != data.fingerprint


def test_answers_are_marked_where_they_are_predicted(folder):
  data = open_split(folder)
  found = 0
  for index in range(data.rows_per_epoch):
    row = data.row(index)
    tasks = len(interleave.TASKS)
    for mark in set(row["answers"].tolist()) - {0}:
      text = BYTE.decode(row["targets"][row["answers"] == mark])
      assert text.startswith("answer ") and (mark - 1) % tasks == 0
      found += 1
  assert found > 5


def test_validation_holds_other_documents(folder):
  train, validation = open_split(folder), open_split(folder, "validation")
  held = set(validation.documents.hashes.view("V32").ravel().tolist())
  assert held and not held & set(
      train.documents.hashes.view("V32").ravel().tolist())
  batch = next(iter(validation.batches()))
  assert batch["patches"].shape == (2, FORM.patches, 4)


@pytest.mark.parametrize("limit", [4, 7, 12])
def test_documents_are_cut_between_pictures(limit):
  pictures = [(3, 4), (7, 4), (30, 2), (32, 1), (33, 3)]
  pieces = interleave.cut_document(70, pictures, 16, limit)
  starts = [start for start, _, _ in pieces]
  lengths = [length for _, length, _ in pieces]
  assert starts == np.cumsum([0] + lengths[:-1]).tolist()
  assert sum(lengths) == 70 and max(lengths) <= 16
  for start, length, shown in pieces:
    inside = [n for first, n in pictures if start <= first < start + length]
    assert shown == sum(inside) <= limit
    assert not any(first < start + length < first + n
                   for first, n in pictures)


def test_unusable_pictures_are_counted_and_never_fatal(folder):
  good = (folder / "pictures" / "0.png").read_bytes()
  (folder / "cut.png").write_bytes(good[:len(good) // 2])
  (folder / "text.png").write_text("no picture")
  Image.new("1", (200, 200)).save(folder / "large.png")
  write(folder, [[{"text": "a"}, {"image": name}] for name in (
      "cut.png", "text.png", "large.png", "gone.png")] + [
          [{"image": "pictures/0.png"}], [{"text": "same"}],
          [{"text": "same"}]], "c.jsonl")
  documents = interleave.open_folder(str(folder), FORM)
  assert documents.skipped == {
      "picture corrupt": 1, "picture neither PNG nor JPEG": 1,
      "picture too large": 1, "picture missing": 1, "without text": 1,
      "copies": 1}
  assert len(documents) == 31


@pytest.mark.parametrize("line, message", [
    ('{"pieces": [{"image": "https://a.org/b.png"}]}', "never fetched"),
    ('{"pieces": [{"image": "../b.png"}]}', "leads out of"),
    ('{"pieces": [{"image": "/etc/b.png"}]}', "leads out of"),
    ('{"pieces": [{"image": "link/b.png"}]}', "leads out of"),
    ('{"pieces": [{"sound": "a"}]}', "a piece is"),
    ('{"pieces": [{"text": 3}]}', "a piece is"),
    ('{"pieces": [{"text": "a", "image": "b"}]}', "more than one thing"),
    ('{"text": "a"}', "not {"), ("[", "not {")])
def test_says_which_line_is_wrong(folder, line, message, tmp_path_factory):
  (folder / "link").symlink_to(tmp_path_factory.mktemp("outside"))
  (folder / "c.jsonl").write_text('{"pieces": [{"text": "a"}]}\n' + line)
  with pytest.raises(ValueError, match=message) as error:
    interleave.open_folder(str(folder), FORM)
  assert "c.jsonl:2" in str(error.value)


def test_a_file_that_changes_in_use_is_refused(folder):
  data = open_split(folder)
  for path in (folder / "pictures").iterdir():
    Image.new("L", (4, 4)).save(path)
  with pytest.raises(RuntimeError, match="was changed while it was in use"):
    [data.row(i) for i in range(data.rows_per_epoch)]


def test_a_folder_without_documents_says_what_it_wants(tmp_path):
  (tmp_path / "a.txt").write_text("text")
  with pytest.raises(ValueError, match='"relative/path.png"'):
    interleave.open_folder(str(tmp_path), FORM)
