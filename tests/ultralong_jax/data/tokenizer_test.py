"""Text to ids and back, by bytes and by a trained BPE."""

import json
import os
import pathlib

import numpy as np
import pytest

from ultralong_jax.data import tokenizer

TEXT = "def naïve(x):\n  return x  # 日本語 🙂\n"


@pytest.fixture(params=["byte", "bpe"])
def either(request):
  return tokenizer.load("byte" if request.param == "byte"
                        else request.getfixturevalue("train_bpe")())


def test_text_comes_back(either):
  assert either.decode(either.encode(TEXT)) == TEXT
  assert either.encode(TEXT.encode()) == either.encode(TEXT)
  assert either.decode([]) == "" and either.encode("") == []


def test_ids_stand_for_exactly_the_bytes(either):
  ids = either.encode_array(TEXT)
  assert ids.dtype == np.int32 and either.byte_lengths.dtype == np.int32
  assert either.byte_lengths.shape == (either.vocab,)
  assert either.byte_lengths[ids].sum() == len(TEXT.encode())
  assert either.decode_bytes(ids) == TEXT.encode()


def test_specials_are_new_ids_without_bytes(either):
  specials = [either.bos, either.eos, either.pad]
  assert len(set(specials)) == 3 and max(specials) < either.vocab
  assert not either.byte_lengths[specials].any()
  ids = [either.bos, *either.encode("a"), either.eos, either.pad]
  assert either.decode(ids) == "a"
  assert either.vocab % 16 == 0


def test_a_cut_character_does_not_raise(either):
  ids = either.encode("🙂"[:1])
  for stop in range(len(ids)):
    assert "\ufffd" in either.decode(ids[:stop + 1]) or stop == len(ids) - 1
  assert tokenizer.load("byte").decode([0xF0, 0x9F, 65]) == "\ufffdA"


def test_every_id_decodes_and_others_are_named(either):
  either.decode(range(either.vocab))
  for wrong in (-1, either.vocab):
    with pytest.raises(ValueError, match=f"token id {wrong} "):
      either.decode([wrong])


def test_byte_ids_are_bytes():
  byte = tokenizer.load("byte")
  assert (byte.vocab, byte.bos, byte.eos, byte.pad) == (272, 256, 257, 258)
  assert byte.encode(bytes(range(256))) == list(range(256))


def test_bpe_merges(train_bpe):
  bpe = tokenizer.load(train_bpe())
  assert len(bpe.encode("return x")) < len("return x")
  assert bpe.byte_lengths.max() > 1


def test_text_of_a_special_token_stays_text(train_bpe):
  bpe = tokenizer.load(train_bpe())
  ids = bpe.encode_array("a<|end|>b")
  assert bpe.decode(ids) == "a<|end|>b"
  assert bpe.byte_lengths[ids].sum() == 9


def test_folder_of_a_tokenizer_is_enough(train_bpe):
  path = train_bpe()
  assert (tokenizer.load(os.path.dirname(path)).fingerprint
          == tokenizer.load(path).fingerprint)


def test_fingerprint_tells_tokenizers_apart(train_bpe):
  a = tokenizer.load(train_bpe()).fingerprint
  b = tokenizer.load(train_bpe(specials=["<|stop|>"])).fingerprint
  assert len({a, b, tokenizer.load("byte").fingerprint}) == 3


def test_says_which_file_is_missing(tmp_path):
  with pytest.raises(FileNotFoundError, match="no_such.*'byte'"):
    tokenizer.load(str(tmp_path / "no_such"))


def test_says_which_package_is_missing(tmp_path, monkeypatch):
  (tmp_path / "tokenizer.json").write_text("{}")
  monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda _: None)
  with pytest.raises(ModuleNotFoundError, match="pip install tokenizers"):
    tokenizer.load(str(tmp_path))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
  pytest.importorskip("tokenizers")
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="is not a tokenizer.json"):
    tokenizer.load(str(tmp_path))


def test_a_tokenizer_that_is_not_byte_level_is_refused(train_bpe):
  path = train_bpe()
  spec = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  spec["decoder"] = {"type": "Fuse"}
  pathlib.Path(path).write_text(json.dumps(spec), encoding="utf-8")
  with pytest.raises(ValueError, match="not byte-level.*Fuse"):
    tokenizer.load(path)
