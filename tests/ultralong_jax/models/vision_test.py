"""Packed images are images alone, and the tower is what it says it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax import tree
from ultralong_jax.data import images
from ultralong_jax.models import hybrid, vision

FORM = images.Form(patch=2, merge=2, channels=1, pixels=4096,
                   decoded_pixels=10**6, patches=64)
KINDS = ("tower", "direct")


def encoder(kind, **leaves):
  return vision.Encoder(**{**dict(
      kind=kind, width=8, merge=2, grid=3, layers=2, inner=6, heads=2,
      key_width=4, hidden=12, epsilon=1e-5, dtype="float32", remat=False),
      **leaves})


def pack(pictures, count):
  row = images.blank(count, FORM)
  at = 0
  for segment, picture in enumerate(pictures, 1):
    _, stop = images.put(row, at, picture, segment, FORM)
    at = stop * FORM.merge**2
  images_ = vision.images_of(jax.tree.map(lambda x: x[None], row))
  return images_.replace(patches_BPI=images_.patches_BPI / 127.5 - 1)


def pictures():
  random = np.random.default_rng(0)
  return [random.integers(0, 256, (4 * h, 4 * w, 1), np.uint8)
          for h, w in ((1, 1), (2, 3), (3, 1))]


@functools.cache
def parts(kind):
  model = encoder(kind)
  params = jax.jit(model.init)(jax.random.key(0), pack(pictures(), 48))
  # Larger weights: at the initial ones the residual hides the layers.
  params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
  return jax.jit(model.apply), params


def slow(params, picture):
  """The tower for one picture [H, W, 1]: loops, no packing, no blocks."""
  p = jax.tree.map(np.float64, params["params"]["tower"])
  height, width = picture.shape[0] // 2, picture.shape[1] // 2
  order = [(2 * i + a, 2 * j + b) for i in range(height // 2)
           for j in range(width // 2) for a in range(2) for b in range(2)]
  pixels = picture[..., 0] / 127.5 - 1
  x = np.stack([pixels[2 * r:2 * r + 2, 2 * c:2 * c + 2].ravel()
                for r, c in order]) @ p["w_patch_ID"]
  table = jax.image.resize(p["w_position_PD"].reshape(3, 3, 6),
                           (height, width, 6), "bilinear", antialias=False)
  x += np.stack([table[r, c] for r, c in order])

  def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

  def turn(x):
    # One speed each at four channels: 1.
    out = np.zeros_like(x)
    for i, (r, c) in enumerate(order):
      for pair, angle in enumerate((c, r)):
        z = complex(x[i, 2 * pair], x[i, 2 * pair + 1]) * np.exp(1j * angle)
        out[i, 2 * pair:2 * pair + 2] = z.real, z.imag
    return out

  def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

  for layer in range(2):
    w = jax.tree.map(lambda leaf: leaf[layer], p["layers"])
    y = rms(x, w["attention_norm"]["scale_D"])
    for h in range(2):
      q, k, v = (y @ w[f"w_{n}"][:, h] for n in ("q_DHK", "k_DHK", "v_DHV"))
      x = x + softmax(turn(q) @ turn(k).T / 2) @ v @ w["w_out_HVD"][h]
    y = rms(x, w["feed_forward_norm"]["scale_D"]) @ w["w_up_DF"]
    y = np.asarray(jax.nn.gelu(y, approximate=True))
    x = x + y @ w["w_down_FD"]
  x = rms(x, p["final_norm"]["scale_D"]).reshape(-1, 24)
  x = np.asarray(jax.nn.gelu(x @ p["w_in_FF"], approximate=False))
  return rms(x @ p["w_out_FD"], p["projector_norm"]["scale_D"])


def test_tower_equals_pictures_one_by_one():
  apply, params = parts("tower")
  media_BND = apply(params, pack(pictures(), 48))
  expected = np.concatenate([slow(params, x) for x in pictures()])
  np.testing.assert_allclose(media_BND[0, :10], expected, atol=2e-4)
  # Other neighbours, other company, other padding: the same.
  wrong = np.concatenate([slow(params, x[::-1]) for x in pictures()])
  assert np.abs(wrong - expected).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_packed_images_are_images_alone(kind):
  apply, params = parts(kind)
  weights_ND = np.random.default_rng(1).normal(size=(10, 8)).astype("f4")

  def value(params, images_, part):
    media_BND = apply(params, images_)[:, :part.stop - part.start]
    return jnp.sum(media_BND[0] * weights_ND[part]), media_BND

  grad = jax.jit(jax.value_and_grad(value, argnums=0, has_aux=True),
                 static_argnums=2)
  (_, packed_BND), packed = grad(params, pack(pictures(), 48), slice(0, 10))
  alone, at = [], 0
  for picture in pictures():
    tokens = picture.size // 16
    (_, media_BND), gradient = grad(params, pack([picture], 48),
                                    slice(at, at + tokens))
    np.testing.assert_allclose(media_BND[0], packed_BND[0, at:at + tokens],
                               atol=1e-5)
    alone.append(gradient)
    at += tokens
  total = jax.tree.map(lambda *leaves: sum(leaves), *alone)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
               packed, total)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_does_not_see_the_others(kind):
  apply, params = parts(kind)
  images_ = pack(pictures(), 48)

  def middle(patches_BPI):
    media_BND = apply(params, images_.replace(patches_BPI=patches_BPI))
    return jnp.sum(media_BND[:, 1:7] * jnp.arange(8)[None, None])

  gradient = np.abs(jax.grad(middle)(images_.patches_BPI))[0].sum(-1)
  own = np.asarray(images_.segment_ids_BP[0] == 2)
  assert np.all(gradient[own] > 0) and np.all(gradient[~own] == 0)


def test_attention_goes_both_ways_inside_an_image():
  apply, params = parts("tower")
  images_ = pack(pictures()[1:2], 48)

  def first(patches_BPI):
    return jnp.sum(apply(params, images_.replace(patches_BPI=patches_BPI))[
        0, 0] * jnp.arange(8))

  gradient = np.abs(jax.grad(first)(images_.patches_BPI))[0, :24].sum(-1)
  assert np.all(gradient > 0)


def test_published_tower_has_its_parameters():
  leaves = common.published_tower()
  model = encoder(
      "tower", width=7168, **{name: leaves[f"vision_{old}"] for name, old in (
          ("merge", "merge"), ("grid", "grid"), ("layers", "layers"),
          ("inner", "width"), ("heads", "heads"), ("key_width", "key_width"),
          ("hidden", "hidden"))})
  pixels = leaves["vision_patch"]**2 * leaves["vision_channels"]
  images_ = vision.Images(np.zeros((1, 4, pixels)), np.ones((1, 4), np.int32),
                          np.ones((1, 4, 4), np.int32))
  params = jax.eval_shape(model.init, jax.random.key(0), images_)["params"]
  sizes = {name: leaf.size for name, leaf in tree.named_leaves(params).items()}
  projector = sum(size for name, size in sizes.items()
                  if "w_in_FF" in name or "w_out_FD" in name)
  assert projector == 46_137_344
  assert sum(sizes.values()) - projector - 7168 == 401_214_464
  assert not any("bias" in name for name in sizes)


def test_a_model_without_vision_says_so():
  model = hybrid.Hybrid(**common.get_config().model)
  with pytest.raises(ValueError, match='vision is "none"'):
    jax.eval_shape(functools.partial(model.init, method="see"),
                   jax.random.key(0), pack(pictures(), 48))
