"""A linear map of patches, trained with the decoder, learns to read."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny_vision
from ultralong_jax import optim
from ultralong_jax.data import images
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.models import hybrid, vision
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

ROWS, DIGITS, STEPS = 4, 32, 120


def batch_of(pixels, labels, form):
  """Rows of documents "image, colon", whose next token is the digit."""
  media = tokenizer_lib.load("byte").media
  shape = ROWS, DIGITS

  def row_of(*document):
    return np.stack(document, -1).reshape(ROWS, -1).astype(np.int32)

  number = np.broadcast_to(np.arange(DIGITS)[None], shape)
  none, colon = np.zeros(shape), np.full(shape, ord(":"))
  pictures = [[images.load(x, form) for x in row]
              for row in pixels.reshape(*shape, 8, 8)]
  return {"tokens": row_of(np.full(shape, media), colon),
          "targets": row_of(colon, labels.reshape(shape) + ord("0")),
          "segment_ids": row_of(number + 1, number + 1),
          "positions": row_of(none, none + 1),
          "weights": row_of(none, none + 1).astype(np.float32),
          "media_index": row_of(number, none - 1),
          **images.pack(pictures, form)}


@pytest.mark.slow
def test_direct_embedding_learns_to_read_digits():
  """256 held-out ones, of which one in ten would be guessed right."""
  datasets = pytest.importorskip("sklearn.datasets")
  data = datasets.load_digits()
  pixels = 255 - np.round(data.images * (255 / 16)).astype(np.uint8)
  c = tiny_vision.get_config()
  c.model.update(dict(vision="direct", width=64, layers=2, pattern="m",
                      dense_layers=2, dense_hidden=128, depth="residual"))
  c.optim.update(dict(name="adamw", lr=0.004))
  form = images.form(c)
  model = hybrid.Hybrid(**c.model)
  variables = jax.jit(model.init)(jax.random.key(0),
                                  jnp.zeros((1, 1), jnp.int32))
  optimizer = optim.make(c.optim, variables["params"], STEPS)
  state = state_lib.create(variables, optimizer, jax.random.PRNGKey(0))
  step = jax.jit(step_lib.make_train_step(model, optimizer, 1))
  size = ROWS * DIGITS
  held_out, train = np.arange(2 * size), np.arange(2 * size, len(pixels))
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    chosen = rng.choice(train, size, replace=False)
    state, metrics = step(state, batch_of(pixels[chosen], data.target[chosen],
                                          form))
  assert metrics["skipped"] == 0

  @jax.jit
  def logits(params, batch):
    seen = vision.see(model, {"params": params}, batch)
    return model.apply({"params": params}, batch["tokens"],
                       batch["segment_ids"], batch["positions"], None,
                       **seen)[0]

  right = []
  for chosen in np.split(held_out, 2):
    batch = batch_of(pixels[chosen], data.target[chosen], form)
    guess_BT = jnp.argmax(logits(state.params, batch), -1)
    right.append((guess_BT == batch["targets"])[:, 1::2])
  assert np.mean(right) > 0.8
