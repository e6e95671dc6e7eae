"""Text to token ids and back: bytes, or a trained byte-level BPE."""

import hashlib
import importlib.util
import json
import os

import numpy as np

# Names of the special tokens, in the order of their ids. They always follow
# the trained vocabulary, so no text can ever be read as one of them.
SPECIALS = ("bos", "eos", "pad", "media")
# The vocabulary is padded to a multiple of this: room for specials to come,
# and whole tiles for the unembedding.
VOCAB_MULTIPLE = 16


class Tokenizer:
  """Maps bytes to ids; every id stands for a fixed string of bytes.

  Attributes:
    vocab: number of ids, unused ones included.
    bos, eos, pad, media: ids of the special tokens; media stands where a
      picture is.
    bytewise: whether the id of a byte is the byte itself.
    byte_lengths: int32 [vocab], bytes that an id stands for; 0 for specials.
    fingerprint: says whether two tokenizers give the same ids.
  """

  def __init__(self, pieces, encode, fingerprint, bytewise=False):
    """Makes a tokenizer of a table and a function.

    Args:
      pieces: the bytes of each trained id.
      encode: function from str (or, if bytewise, from bytes) to ids.
      fingerprint: str.
      bytewise: whether id b stands for byte b.
    """
    self._encode = encode
    self.bytewise = bytewise
    self.fingerprint = fingerprint
    trained = len(pieces)
    self.bos, self.eos, self.pad, self.media = range(
        trained, trained + len(SPECIALS))
    self.vocab = _round_up(trained + len(SPECIALS), VOCAB_MULTIPLE)
    self.byte_lengths = np.zeros(self.vocab, np.int32)
    self.byte_lengths[:trained] = [len(piece) for piece in pieces]
    # The bytes of all ids, end to end, and where those of an id begin.
    self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
    self._begins = np.cumsum(self.byte_lengths, dtype=np.int64)
    self._begins -= self.byte_lengths

  def encode(self, text):
    """Returns the ids of `text` (str or UTF-8 bytes) without specials.

    A list, not an array: `[tokenizer.bos] + tokenizer.encode(text)` would add
    numbers if it were one.
    """
    return self.encode_array(text).tolist()

  def encode_array(self, text):
    """As `encode`, but an int32 array."""
    if self.bytewise:
      raw = text.encode("utf-8") if isinstance(text, str) else text
      return np.frombuffer(raw, np.uint8).astype(np.int32)
    if not isinstance(text, str):
      text = bytes(text).decode("utf-8")
    return np.asarray(self._encode(text), np.int32)

  def decode_bytes(self, ids):
    """Returns the bytes of `ids`; specials and unused ids have none."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= self.vocab)]
    if len(wrong):
      raise ValueError(f"token id {wrong[0]} is not in [0, {self.vocab})")
    lengths = self.byte_lengths[ids]
    # Byte b of the result is byte b - (bytes of earlier ids) of its own id.
    shift = self._begins[ids] - (np.cumsum(lengths) - lengths)
    return self._bytes[np.repeat(shift, lengths)
                       + np.arange(lengths.sum())].tobytes()

  def decode(self, ids):
    """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
    # A model may stop, or be asked, in the middle of a character.
    return self.decode_bytes(ids).decode("utf-8", errors="replace")


def load(name_or_path):
  """Returns the tokenizer that the leaf `data.tokenizer` names.

  Args:
    name_or_path: "byte", the path of a `tokenizer.json` as the `tokenizers`
      package saves it, or of a folder that holds one.
  """
  if name_or_path == "byte":
    return byte_tokenizer()
  path = os.path.expanduser(name_or_path)
  if os.path.isdir(path):
    path = os.path.join(path, "tokenizer.json")
  if not os.path.isfile(path):
    raise FileNotFoundError(
        f"data.tokenizer={name_or_path!r}: no such file; give 'byte' or the "
        "path of a tokenizer.json")
  return bpe_tokenizer(path)


def byte_tokenizer():
  """Returns the tokenizer whose ids 0 to 255 are the bytes."""
  return Tokenizer([bytes([b]) for b in range(256)], None, "byte-256",
                   bytewise=True)


def bpe_tokenizer(path):
  """Returns the trained byte-level BPE of a tokenizer.json."""
  if importlib.util.find_spec("tokenizers") is None:
    raise ModuleNotFoundError(
        f"data.tokenizer={path!r} is a trained tokenizer, which needs the "
        "package `tokenizers`: pip install tokenizers")
  import tokenizers  # Heavy, and only trained tokenizers need it.

  with open(path, encoding="utf-8") as file:
    text = file.read()
  try:
    trained = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # The package raises bare Exception.
    raise ValueError(
        f"data.tokenizer={path!r} is not a tokenizer.json: {error}") from error
  spec = json.loads(text)
  _check_exact(spec, path)
  # Text such as "<|endoftext|>" in a document stays text.
  trained.encode_special_tokens = True
  trained.no_truncation()
  trained.no_padding()
  # Of the meaning, not of the file: another layout is the same tokenizer.
  digest = hashlib.sha256(
      json.dumps(spec, sort_keys=True).encode("utf-8")).hexdigest()
  return Tokenizer(
      _pieces(trained),
      lambda text: trained.encode(text, add_special_tokens=False).ids,
      f"bpe-{digest[:32]}")


def _pieces(trained):
  """Returns the bytes of every id of a byte-level BPE."""
  to_byte = {char: byte for byte, char in enumerate(_byte_alphabet())}
  added = trained.get_added_tokens_decoder()
  pieces = [b""] * (1 + max(trained.get_vocab().values()))
  for token, index in trained.get_vocab().items():
    if index in added:
      # Special tokens are never read from text, so they stand for nothing.
      special = added[index].special
      pieces[index] = b"" if special else token.encode("utf-8")
    else:
      pieces[index] = bytes(to_byte[char] for char in token)
  return pieces


def _byte_alphabet():
  """Returns the 256 characters by which byte-level BPE writes bytes."""
  # Printable Latin-1 stands for itself; the others move up, beyond it.
  alphabet, moved = [], 0
  for byte in range(256):
    printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
    alphabet.append(chr(byte if printable else 256 + moved))
    moved += not printable
  return alphabet


def _check_exact(spec, path):
  """Raises unless decoding gives back every byte that was encoded."""
  decoder = spec["decoder"] or {"type": None}
  steps = decoder.get("decoders", [decoder])
  if [step["type"] for step in steps] != ["ByteLevel"]:
    raise ValueError(
        f"data.tokenizer={path!r} is not byte-level (its decoder is "
        f"{[step['type'] for step in steps]}), so bits per byte could not be "
        "exact; train it with the ByteLevel pre-tokenizer and decoder")


def _round_up(value, multiple):
  return -(-value // multiple) * multiple
