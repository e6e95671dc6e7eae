"""A folder of documents, its splits and their rows; a small BPE."""

import itertools
import types

import chex
import jax
import numpy as np
import pytest

from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer

TEXT = "def naïve(x):\n  return x  # 日本語 🙂\n"


@pytest.fixture
def train_bpe(tmp_path_factory):
  """Function that trains a byte-level BPE and returns the path of its file."""
  tokenizers = pytest.importorskip("tokenizers")

  def train(specials=("<|end|>",), **settings):
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    for name, value in settings.items():
      setattr(trained, name, value)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(specials), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator([TEXT, "return x return x naïve"] * 9, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    trained.save(str(path))
    return str(path)

  return train


@pytest.fixture(params=["byte", "bpe"])
def ids(request):
  if request.param == "byte":
    return tokenizer.load("byte")
  return tokenizer.load(request.getfixturevalue("train_bpe")())


@pytest.fixture
def folder(tmp_path):
  """Forty documents of 1 to 2000 bytes, some with wide characters."""
  rng = np.random.default_rng(0)
  alphabet = list("abcdefg \né🙂日")
  for i in range(40):
    size = int(1 + 700 * rng.random()**3)
    text = "".join(rng.choice(alphabet, size))
    (tmp_path / f"{i:02}.txt").write_text(text, encoding="utf-8")
  (tmp_path / "bad").write_bytes(b"\xff\xfe\x00")
  return tmp_path


@pytest.fixture
def open_train(folder):
  """Function that opens the folder's training split."""

  def open_split(split="train", ids=None, context=64, batch=4, seed=0,
                 **changes):
    leaves = types.SimpleNamespace(**{
        "source": "text", "path": str(folder), "validation_fraction": 0.2,
        "validation_bytes": 1000, "validation_context": 64, **changes})
    return loader.open_data(leaves, ids or tokenizer.load("byte"), split=split,
                            context=context, batch=batch, seed=seed)

  return open_split


@pytest.fixture
def open_validation(open_train):
  """Function that opens its validation split."""
  return lambda **changes: open_train("validation", **changes)


@pytest.fixture
def take():
  """Function of some data that returns its next `count` batches, or all."""

  def batches_of(data, count=None, **where):
    batches = data.batches(**where)
    result = list(itertools.islice(batches, count))
    batches.close()
    return result

  return batches_of


@pytest.fixture
def rows_of(take):
  """Function like `take` that returns the rows as one dict of arrays."""
  return lambda *args, **where: jax.tree.map(
      lambda *parts: np.concatenate(parts), *take(*args, **where))


@pytest.fixture
def goes_on(take):
  """Function that compares data with itself, opened again four batches on."""

  def compare(data, again):
    rest = take(again, 2, position=4 * data.batch)
    chex.assert_trees_all_equal(rest, take(data, 6)[4:], strict=True)

  return compare
