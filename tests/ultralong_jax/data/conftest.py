"""A small BPE, trained where it is needed."""

import pytest

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
