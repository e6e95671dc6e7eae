"""Images in the token stream: walls, states, steps, the front door."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax import frontdoor
from ultralong_jax import optim
from ultralong_jax.data import images
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.models import hybrid, vision
from ultralong_jax.serve import decode
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

BYTE = tokenizer_lib.load("byte")


def tiny_config(**leaves):
  c = common.get_config()
  c.model.update(dict(
      width=16, layers=2, pattern="dm", heads=2, key_width=8, value_width=8,
      latent_heads=2, latent_key_width=8, latent_shared_width=4,
      latent_value_width=8, latent_rank=8, dense_hidden=16, experts=4,
      expert_hidden=8, expert_latent=8, vision="tower", vision_patch=2,
      vision_grid=3, vision_layers=1, vision_width=8, vision_heads=2,
      vision_key_width=4, vision_hidden=8))
  c.model.update(leaves)
  c.data.image_pixels, c.data.patches = 256, 32
  return c


FORM = images.form(tiny_config())


@functools.cache
def model_and_variables(kind="tower"):
  model = hybrid.Hybrid(**tiny_config(vision=kind).model)
  shapes = jax.eval_shape(model.init, jax.random.key(1),
                          jnp.zeros((1, 1), jnp.int32))
  rng = np.random.default_rng(1)
  return model, jax.tree.map(
      lambda x: jnp.asarray((x.ndim == 1) + 0.2 * rng.normal(size=x.shape),
                            jnp.float32), shapes)


def picture(rows, columns, seed):
  return np.random.default_rng(seed).integers(
      0, 256, (4 * rows, 4 * columns, 1), np.uint8)


# Three documents, an image in each of the last two; padding at the end.
SEGMENTS = [1] * 6 + [2] * 10 + [3] * 6 + [0] * 2
INDEX = [-1] * 9 + [0, 1, 2, 3] + [-1] * 4 + [4, 5] + [-1] * 5
PICTURES = [picture(2, 2, 0), picture(1, 2, 1)]


def make_batch(rows=1):
  tokens = np.random.default_rng(0).integers(0, 256, 24).astype(np.int32)
  tokens = np.where(np.array(INDEX) >= 0, BYTE.media, tokens)
  targets = np.roll(tokens, -1)
  row = {"tokens": tokens, "targets": targets,
         "segment_ids": np.array(SEGMENTS, np.int32),
         "positions": np.zeros(24, np.int32),
         "weights": ((np.array(SEGMENTS) > 0) & (targets != BYTE.media)
                     ).astype(np.float32),
         "media_index": np.array(INDEX, np.int32)}
  batch = {name: np.stack([x] * rows) for name, x in row.items()}
  return batch | images.pack([PICTURES] * rows, FORM)


@pytest.mark.parametrize("kind", ["tower", "direct"])
def test_documents_are_walls_and_the_past_is_the_past(kind):
  """Through the pixels of images and through the text around them."""
  model, variables = model_and_variables(kind)
  batch = make_batch()

  def value(patches_BPI, w_WD, part_T):
    """Each token of the row has an id, so a row of `w_WD`, of its own."""
    looked = vision.images_of(batch).replace(patches_BPI=patches_BPI)
    params = {**variables["params"], "w_embed_WD": w_WD}
    logits_BTW, _ = model.apply(
        {**variables, "params": params}, np.arange(24)[None],
        batch["segment_ids"], None, None,
        (model.apply(variables, looked, method="see"), batch["media_index"]))
    logits_BTW *= jax.random.normal(jax.random.key(0), logits_BTW.shape)
    return jnp.sum(jnp.where(part_T[None, :, None], logits_BTW, 0))

  gradient = jax.jit(jax.grad(value, (0, 1)))
  patches_BPI = vision.images_of(batch).patches_BPI / np.float32(127.5) - 1

  def reach(part_T):
    """Which images and which places of text some logits depend on."""
    pixels_BPI, text_WD = gradient(patches_BPI, variables["params"][
        "w_embed_WD"], part_T)
    size_P = np.abs(pixels_BPI[0]).sum(-1)
    images_ = set(batch["patch_segment_ids"][0][size_P > 0].tolist())
    text = np.flatnonzero(np.abs(text_WD).sum(-1))
    return sorted(images_), text.tolist()

  index = np.arange(24)
  before, after = [6, 7, 8], [13, 14, 15]  # of the image in the second one
  for part, *sees in (
      (index < 6, [], [0, 1, 2, 3, 4, 5]),
      ((index >= 6) & (index < 9), [], before),
      ((index >= 9) & (index < 13), [1], before),
      ((index >= 6) & (index < 16), [1], before + after),
      (index == 16, [], [16]),
      ((index >= 17) & (index < 22), [2], [16, 19, 20, 21])):
    assert reach(part) == tuple(sees)


def test_prompt_with_images_can_be_cut_anywhere(monkeypatch):
  model, variables = model_and_variables()
  packed = images.pack([PICTURES], FORM)
  tokens, index = make_batch()["tokens"][0].tolist()[6:22], INDEX[6:22]
  media_BND = decode._see(model, variables, vision.images_of(packed))

  def taken(cuts):
    state = jax.tree.map(jnp.copy, hybrid.empty_state(model, 1, 64))
    for start, stop in zip([0, *cuts], [*cuts, 16]):
      logits_BW, state = decode.prefill(
          model, variables, [tokens[start:stop]], state,
          (media_BND, [index[start:stop]]))
    return logits_BW, state

  whole = taken([])
  monkeypatch.setattr(decode, "SEGMENT_MIN_TOKENS", 1)
  for cuts in ([5], range(1, 16)):  # 5: inside of the first image
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, rtol=2e-4, atol=2e-4), taken(cuts), whole)


def test_front_door_reads_images_between_text():
  model, variables = model_and_variables()
  m = frontdoor.Loaded(tiny_config(), variables["params"],
                       variables["router"], BYTE, model, 0)
  prompt = ["ab", PICTURES[0][..., 0], "c", PICTURES[1][..., 0], "d"]
  text = m.generate(prompt, max_new_tokens=5)

  ids = [BYTE.bos, *b"ab", *[BYTE.media] * 4, *b"c", *[BYTE.media] * 2, *b"d"]
  index = [-1] * 3 + [0, 1, 2, 3] + [-1] + [4, 5] + [-1]
  media_BND = decode._see(model, variables, vision.images_of(
      images.pack([PICTURES], FORM)))
  new = []
  for _ in range(5):
    # The prefix again for each token, in one segment.
    logits_BW, _ = decode.prefill(
        model, variables, [ids + new], jax.tree.map(
            jnp.copy, hybrid.empty_state(model, 1, 64)),
        (media_BND, [index + [-1] * len(new)]))
    new.append(int(jnp.argmax(logits_BW[0])))
  assert text == BYTE.decode(new)
  assert len(set(new)) > 1
  swapped = m.generate([prompt[i] for i in (0, 3, 2, 1, 4)], 5)
  assert swapped != text


def test_front_door_without_vision_says_so():
  c = tiny_config(vision="none")
  m = frontdoor.Loaded(c, {}, {}, BYTE, hybrid.Hybrid(**c.model), 0)
  with pytest.raises(ValueError, match="reads no images"):
    m.generate(["a", PICTURES[0]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tower", "direct"])
def test_a_step_trains_the_encoder(kind):
  c = tiny_config(vision=kind)
  model = hybrid.Hybrid(**c.model)
  variables = jax.jit(model.init)(jax.random.key(1),
                                  jnp.zeros((1, 1), jnp.int32))
  c.optim.update(dict(lr=0.01, adam_lr=0.01, warmup_steps=0))
  optimizer = optim.make(c.optim, variables["params"], steps=100)
  state = state_lib.create(variables, optimizer, jax.random.PRNGKey(0))
  step = jax.jit(step_lib.make_train_step(model, optimizer, 2))
  batch, losses = make_batch(rows=2), []
  before = state.params["images"]
  for _ in range(4):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  assert losses[-1] < losses[0] - 0.1
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()),
                       state.params["images"], before)
  assert all(x > 0 for x in jax.tree.leaves(moved))
