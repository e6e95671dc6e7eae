"""A trained model from its folder: what `ultralong_jax.load` returns."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
from PIL import Image

from ultralong_jax.data import images
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.interop import huggingface
from ultralong_jax.models import hybrid
from ultralong_jax.models import vision
from ultralong_jax.serve import decode
from ultralong_jax.train import validate
from ultralong_jax.train import workdir as workdir_lib

# What a prompt that is not token ids consists of.
PIECES = (str, Image.Image, np.ndarray, pathlib.Path)


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A trained model, ready to be asked.

  Attributes:
    config: the run's, every leaf, as in the checkpoint's stage; of a released
      checkpoint, `model` and, as `hub`, its config.json.
    params: parameters of the newest checkpoint.
    router: thresholds of its experts; empty without experts.
    tokenizer: text to ids and back; None where a released checkpoint has no
      tokenizer.json.
    model: Hybrid; `model.apply(m.variables, tokens_BT)`.
    step: of the checkpoint.
  """
  config: Any
  params: Any
  router: Any
  tokenizer: tokenizer_lib.Tokenizer | None
  model: hybrid.Hybrid
  step: int

  @property
  def variables(self) -> dict:
    """Collections as `model.apply` takes them."""
    return {"params": self.params, "router": self.router}

  def logits(self, tokens_BT):
    """Returns logits [B, T, W], float32; each row is one document."""
    tokens_BT = jnp.asarray(tokens_BT, jnp.int32)
    if tokens_BT.ndim != 2:
      raise ValueError(f"tokens must be [B, T], not {tokens_BT.shape}; one "
                       "document is tokens[None]")
    return _logits(self.model, self.variables, tokens_BT)

  def generate(self, prompt: str | list, max_new_tokens: int = 64,
               temperature: float = 0., seed: int = 0) -> str | list[int]:
    """Returns what follows `prompt`, without it: text for text, ids for ids.

    Args:
      prompt: beginning of a document, may be empty; or its token ids, bos
        included if there is one; or texts and images in their order, such as
        ["What is this? ", PIL.Image.open("a.png"), " It is "]. An image is
        one of PIL, a uint8 array [H, W] or [H, W, 3], or a pathlib.Path.
      max_new_tokens: most tokens that are added; ends early at a document's
        end.
      temperature: of sampling; 0 takes the likeliest token.
      seed: of sampling.
    """
    pieces = [prompt] if isinstance(prompt, str) else prompt
    is_ids = not any(isinstance(x, PIECES) for x in pieces)
    ids, seen = (pieces, {}) if is_ids else self._read(pieces)
    new, = decode.generate(
        self.model, self.variables, [ids], max_new_tokens, temperature,
        jax.random.key(seed), eos=self._eos(), **seen)
    return new if is_ids else self.tokenizer.decode(new)

  def _read(self, pieces):
    """Returns the ids of texts and images, and what decode has of these."""
    tokenizer, form = self.tokenizer, images.form(self.config)
    if tokenizer is None:
      raise huggingface.Refusal(
          "this checkpoint has no tokenizer.json, so it reads no text; put "
          "one into its folder, or give token ids")
    ids = [] if tokenizer.bos is None else [tokenizer.bos]
    index, pictures, shown = [-1] * len(ids), [], 0
    for piece in pieces:
      if isinstance(piece, str):
        part = tokenizer.encode(piece)
        index += [-1] * len(part)
      elif form is None:
        raise ValueError('this model reads no images: model.vision is "none"')
      else:
        pictures.append(images.load(piece, form))
        tokens = pictures[-1].size // (form.unit**2 * form.channels)
        part = [tokenizer.media] * tokens
        index += range(shown, shown + tokens)
        shown += tokens
      ids += part
    if not pictures:
      return ids, {}
    packed = vision.images_of(images.pack([pictures], form))
    return ids, {"images": packed, "index": [index]}

  def _eos(self):
    if "hub" not in self.config:
      return self.tokenizer.eos
    return self.config.hub.get("eos_token_id")


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, variables, tokens_BT):
  return model.apply(variables, tokens_BT, None, None, None)[0]


def load(workdir) -> Loaded:
  """See `ultralong_jax.load`."""
  if huggingface.is_released(workdir):
    return _load_released(workdir)
  config = workdir_lib.read_config(workdir)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  saved = validate.restore(config, workdir, device)
  return Loaded(saved.config, saved.params, saved.router, tokenizer,
                saved.model, saved.step)


def _load_released(folder) -> Loaded:
  released = huggingface.read(folder)
  tokenizer = None
  if (pathlib.Path(folder) / "tokenizer.json").is_file():
    tokenizer = tokenizer_lib.load(str(folder))
    tokenizer.bos = released.hub.get("bos_token_id")
  config = ConfigDict({"model": released.model, "hub": released.hub}).lock()
  return Loaded(config, released.variables["params"],
                released.variables.get("router", {}), tokenizer,
                hybrid.Hybrid(**released.model), 0)
