"""Counting models, against a count by hand."""

import math

import pytest

from ultralong_jax.data import baseline
from ultralong_jax.data import sources


def documents(folder, *texts):
  folder.mkdir()
  for i, text in enumerate(texts):
    (folder / f"{i}").write_text(text, encoding="utf-8")
  return sources.open_documents(str(folder))


def by_hand(train, validation, cut=False):
  """The same models with dicts, one symbol at a time."""
  pairs, single = {}, {}
  for text in train:
    symbols = [256, *text.encode(), 256]
    for before, after in zip(symbols, symbols[1:]):
      pairs[before, after] = pairs.get((before, after), 0) + 1
      single[after] = single.get(after, 0) + 1
  bits = {"unigram": 0., "bigram": 0.}
  for text in validation:
    symbols = [256, *text.encode()] + ([] if cut else [256])
    for before, after in zip(symbols, symbols[1:]):
      known = sum(n for (b, _), n in pairs.items() if b == before)
      bits["bigram"] -= math.log2(
          (pairs.get((before, after), 0) + 1) / (known + 257))
      bits["unigram"] -= math.log2(
          (single.get(after, 0) + 1) / (sum(single.values()) + 257))
  count = sum(len(text.encode()) for text in validation)
  return {name: value / count for name, value in bits.items()}


@pytest.mark.parametrize("part", [1, 3, 2**20])
def test_equals_a_count_by_hand(tmp_path, monkeypatch, part):
  monkeypatch.setattr(baseline, "PART_BYTES", part)
  train = ["abcabc", "é", "abd" * 5, "x"]
  validation = ["abc", "zé"]
  got = baseline.bits_per_byte(documents(tmp_path / "t", *train),
                               documents(tmp_path / "v", *validation))
  assert got == pytest.approx(by_hand(train, validation))


def test_a_cut_document_pays_for_no_end(tmp_path):
  train = documents(tmp_path / "t", "abcabc")
  validation = documents(tmp_path / "v", "abcabc").first(4)
  got = baseline.bits_per_byte(train, validation)
  assert got == pytest.approx(by_hand(["abcabc"], ["abca"], cut=True))


def test_on_the_library_bigrams_beat_unigrams():
  train, validation = sources.split(sources.open_documents(""), 0.05)
  bits = baseline.bits_per_byte(train, sources.sample(validation, 2**18, 2048))
  assert 3 < bits["bigram"] < bits["unigram"] < 5
