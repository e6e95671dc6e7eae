"""What counts as a document, and which split it falls to."""

import os
import sys

import numpy as np
import pytest

from ultralong_jax.data import sources


def write(folder, **files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes)
                     else content.encode())
  return str(folder)


def texts(documents):
  return [documents.read(i).decode() for i in range(len(documents))]


def many(folder, count):
  return write(folder, **{f"{i:03}.txt": f"text {i}\n" * (1 + i)
                          for i in range(count)})


def test_standard_library_is_whole_and_without_tests():
  documents = sources.open_documents("")
  names = set(documents.names)
  assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
  parts = {part for name in names for part in name.split(os.sep)}
  assert not parts & {"test", "tests", "idle_test", "site-packages",
                      "__pycache__"}
  assert documents.names == sorted(names)
  assert documents.bytes > 5_000_000
  index = documents.names.index("os.py")
  with open(os.__file__, "rb") as file:
    assert documents.read(index) == file.read()


def test_folders_are_read_recursively_in_order(tmp_path):
  path = write(tmp_path, **{"b.txt": "b", "a/z.md": "z", "a/a.c": "é"})
  documents = sources.open_documents(path)
  assert documents.names == ["a/a.c", "a/z.md", "b.txt"]
  assert texts(documents) == ["é", "z", "b"]


def test_bad_files_are_counted_and_not_fatal(tmp_path):
  path = write(tmp_path, good="good", latin=b"caf\xe9", cut=b"\xf0\x9f",
               empty="", copy="good")
  os.symlink(tmp_path / "nothing", tmp_path / "dangling")
  os.symlink(tmp_path / "itself", tmp_path / "itself")
  os.mkfifo(tmp_path / "pipe")  # To open it would block for ever.
  documents = sources.open_documents(path)
  assert texts(documents) == ["good"]
  assert documents.skipped == {"undecodable": 2, "empty": 1, "copies": 1,
                               "unreadable": 3}


def test_hidden_and_version_control_folders_are_left_out(tmp_path):
  path = write(tmp_path, **{".git/config": "1", "CVS/Root": "2",
                            "__pycache__/x": "3", ".env": "4", "kept": "5"})
  assert sources.open_documents(path).names == ["kept"]


def test_links_are_followed_but_not_in_circles(tmp_path):
  path = write(tmp_path, **{"in/a/x": "x", "out/y": "y"})
  os.symlink(tmp_path / "in", tmp_path / "in" / "a" / "loop")
  os.symlink(tmp_path / "out", tmp_path / "in" / "linked")
  documents = sources.open_documents(path + "/in")
  assert documents.names == ["a/x", "linked/y"]


@pytest.mark.parametrize("pattern, names", [
    ("*.txt", ["a.txt"]),
    ("**/*.txt", ["a.txt", "d/b.txt"]),
    ("d*", ["b.txt", "c.md"]),  # a folder that matches is read whole
    ("a.txt", ["a.txt"]),
    ("odd[1].txt", ["odd[1].txt"]),
])
def test_globs_and_single_files(tmp_path, pattern, names):
  path = write(tmp_path, **{"a.txt": "a", "d/b.txt": "b", "d/c.md": "c"})
  if "[" in pattern:
    write(tmp_path, **{pattern: "odd"})
  assert sources.open_documents(f"{path}/{pattern}").names == names


def test_says_what_is_wrong_with_a_path(tmp_path):
  with pytest.raises(FileNotFoundError, match="data.path=.*no such folder"):
    sources.open_documents(str(tmp_path / "absent"))
  path = write(tmp_path, bad=b"\xff", empty="")
  with pytest.raises(ValueError, match="2 files.*1 undecodable.*UTF-8"):
    sources.open_documents(path)


def test_reading_on_demand_equals_reading_held(tmp_path, monkeypatch):
  path = many(tmp_path, 20)
  held = sources.open_documents(path)
  sources._scan.cache_clear()
  monkeypatch.setattr(sources, "HELD_BYTES", 100)
  monkeypatch.setattr(sources, "READ_BYTES", 7)
  lazy = sources.open_documents(path)
  assert any(h is None for h in lazy.held) and lazy.digest == held.digest
  assert texts(lazy) == texts(held)
  assert lazy.read(19, 3, 9) == held.read(19, 3, 9)
  sources._scan.cache_clear()


def test_characters_may_lie_across_reads(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "READ_BYTES", 3)
  path = write(tmp_path, emoji="a🙂é日" * 5, cut="🙂".encode()[:3])
  assert sources.open_documents(path).names == ["emoji"]


def test_a_file_edited_during_a_run_is_noticed(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "HELD_BYTES", 0)
  path = many(tmp_path, 2)
  documents = sources.open_documents(path)
  write(tmp_path, **{"001.txt": "other"})
  with pytest.raises(RuntimeError, match="001.txt was changed"):
    documents.read(1)
  assert texts(sources.open_documents(path))[1] == "other"


def test_splits_are_disjoint_and_complete(tmp_path):
  documents = sources.open_documents(many(tmp_path, 200))
  train, validation = sources.split(documents, 0.2)
  assert not set(texts(train)) & set(texts(validation))
  assert set(texts(train)) | set(texts(validation)) == set(texts(documents))
  assert 0.1 < len(validation) / 200 < 0.3


def test_split_of_a_file_depends_on_its_content_alone(tmp_path):
  documents = sources.open_documents(many(tmp_path / "a", 50))
  before = set(texts(sources.split(documents, 0.3)[1]))
  for i in range(50):  # Half as many files, all with other names.
    if i % 2:
      (tmp_path / "a" / f"{i:03}.txt").rename(tmp_path / "a" / f"x{i}.md")
    else:
      (tmp_path / "a" / f"{i:03}.txt").unlink()
  documents = sources.open_documents(str(tmp_path / "a"))
  after = set(texts(sources.split(documents, 0.3)[1]))
  assert after == before & set(texts(documents)) and after


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_few_documents_leave_no_split_empty(tmp_path, count, fraction):
  documents = sources.open_documents(many(tmp_path, count))
  train, validation = sources.split(documents, fraction)
  assert len(train) and len(validation)
  assert len(train) + len(validation) == count


def test_a_single_document_is_cut(tmp_path):
  book = "ein Stück Text 🙂 " * 50
  documents = sources.open_documents(write(tmp_path, book=book))
  train, validation = sources.split(documents, 0.1)
  assert texts(train)[0] + texts(validation)[0] == book
  assert validation.bytes / documents.bytes == pytest.approx(0.1, abs=0.01)
  assert not train.whole[0] and validation.whole[0]
  assert train.digest != validation.digest


def test_wrong_fractions_and_tiny_books_are_refused(tmp_path):
  documents = sources.open_documents(write(tmp_path, book="x"))
  with pytest.raises(ValueError, match="validation_fraction=1"):
    sources.split(documents, 1)
  with pytest.raises(ValueError, match="too few"):
    sources.split(documents, 0.5)
  assert len(sources.split(documents, 0)[1]) == 0


def test_first_bytes_end_at_a_character(tmp_path):
  documents = sources.open_documents(write(tmp_path, a="abc", b="é🙂x"))
  for limit, expected in [(0, []), (2, ["ab"]), (3, ["abc"]), (4, ["abc"]),
                          (5, ["abc", "é"]), (8, ["abc", "é"]),
                          (9, ["abc", "é🙂"]), (10, ["abc", "é🙂x"]),
                          (99, ["abc", "é🙂x"])]:
    assert texts(documents.first(limit)) == expected
  assert list(documents.first(9).whole) == [True, False]


def test_sample_takes_equal_beginnings(tmp_path):
  documents = sources.open_documents(
      write(tmp_path, a="a" * 1000, b="b" * 10, c="c" * 50, d="d" * 60))
  sample = sources.sample(documents, 130, 1)
  assert sample.sizes.tolist() == [40, 10, 40, 40]
  assert sources.sample(documents, 129, 1).sizes.tolist() == [40, 10, 40, 39]
  assert sources.sample(documents, 9999, 1).bytes == documents.bytes
  assert sources.sample(documents, 1120, 1).bytes == 1120
  # A long validation context asks for long beginnings.
  assert sources.sample(documents, 130, 120).sizes.tolist() == [120, 10]


def test_one_big_file_does_not_fill_the_sample():
  documents = sources.open_documents("")
  _, validation = sources.split(documents, 0.05)
  sample = sources.sample(validation, 2**18, 2048)
  assert sample.bytes == 2**18
  assert sample.sizes.max() < 0.2 * sample.bytes


def test_names_need_not_be_text(tmp_path):
  if sys.platform != "linux":
    pytest.skip("file names are Unicode here")
  with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
    file.write(b"text")
  documents = sources.open_documents(str(tmp_path))
  assert texts(documents) == ["text"] and len(documents.digest) == 32


def test_digest_sees_content_and_order_not_names(tmp_path):
  one = sources.open_documents(write(tmp_path / "1", a="a", b="b"))
  renamed = sources.open_documents(write(tmp_path / "2", c="a", d="b"))
  swapped = sources.open_documents(write(tmp_path / "3", a="b", b="a"))
  assert one.digest == renamed.digest != swapped.digest
  assert np.all(one.sizes == 1)
