"""Images to embeddings in the token stream: a tower of patches, or a map.

All images of a row are one stream of patches; segment ids keep them apart, so
no patch is spent on padding one image to another's size. Patches stand in
blocks of merge x merge, because that many neighbours become one embedding:
embedding n is made of patches n merge^2 and the ones after it.

Still images only. The published tower also reads video (a fixed time
embedding, a mean over four frames before the merge), which this one does not.
"""
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from ultralong_jax.layers import attention, image_position, linear, norm


@flax.struct.dataclass
class Images:
  """The images of rows, in patches.

  Attributes:
    patches_BPI: uint8, or floats from -1 to 1; see `data.images.patchify`.
    segment_ids_BP: which image, rising along a row from 1 on; 0 is trailing
      padding, which changes nothing.
    places_BP4: row, column, and rows and columns of the image's grid.
  """
  patches_BPI: jax.Array
  segment_ids_BP: jax.Array
  places_BP4: jax.Array


def images_of(batch) -> Images | None:
  """Returns the images of a batch of `data.loader`, None without any."""
  if "patches" not in batch:
    return None
  return Images(batch["patches"], batch["patch_segment_ids"],
                batch["patch_places"])


def blank(model) -> Images:
  """Returns one embedding's patches of nothing, for a Hybrid's init."""
  count = model.vision_merge**2
  pixels = model.vision_channels * model.vision_patch**2
  return Images(jnp.zeros((1, count, pixels)), jnp.ones((1, count), jnp.int32),
                jnp.ones((1, count, 4), jnp.int32))


def look(model, batch) -> dict:
  """Returns the argument `seen` for a batch with images, else {}.

  Args:
    model: Hybrid, bound (inside of `apply`).
    batch: of `data.loader`.
  """
  images = images_of(batch)
  if images is None:
    return {}
  return {"seen": (model.see(images), batch["media_index"])}


def see(model, variables, batch) -> dict:
  """As `look`, outside of `apply`."""
  if images_of(batch) is None:
    return {}
  return model.apply(variables, batch, method=look)


def ahead(looked) -> dict:
  """Moves what `look` returned to the token before, for `Hybrid.draft`."""
  def shift(media_BND, index_BT):
    return media_BND, jnp.pad(index_BT[:, 1:], ((0, 0), (0, 1)),
                              constant_values=-1)
  return {name: shift(*seen) for name, seen in looked.items()}


def check(kind):
  """Raises if a model of this `vision` reads no images."""
  if kind == "none":
    raise ValueError('this model reads no images: its vision is "none"')


def encoder_of(model):
  """Returns the Encoder that a Hybrid's fields describe."""
  return Encoder(
      kind=model.vision, width=model.width, merge=model.vision_merge,
      grid=model.vision_grid, layers=model.vision_layers,
      inner=model.vision_width, heads=model.vision_heads,
      key_width=model.vision_key_width, hidden=model.vision_hidden,
      epsilon=model.norm_epsilon, dtype=model.dtype,
      remat=model.remat == "layer")


class Encoder(nn.Module):
  """Images to embeddings of the decoder's width.

  Attributes:
    kind: "tower" of attention layers and a projector; or "direct", a linear
      map of merged patches.
    width: of the decoder.
    merge: patches along a side that become one embedding.
    grid: cells along each side of the table of positions.
    layers, inner, heads, key_width, hidden: of the tower; `inner` is its
      width.
    epsilon: of all norms.
    dtype: of compute.
    remat: recompute each layer in the backward pass.
  """
  kind: str
  width: int
  merge: int
  grid: int
  layers: int
  inner: int
  heads: int
  key_width: int
  hidden: int
  epsilon: float
  dtype: str
  remat: bool

  @nn.compact
  def __call__(self, images):
    """Returns media_BND: an embedding for every merge^2 patches."""
    x_BPI = images.patches_BPI
    if x_BPI.dtype == jnp.uint8:
      x_BPI = x_BPI.astype(jnp.float32) / 127.5 - 1
    x_BPI = x_BPI.astype(self.dtype)
    if self.kind == "direct":
      return Direct(self.width, self.merge, self.grid, self.epsilon,
                    name="direct")(x_BPI, images.places_BP4)
    return Tower(
        self.width, self.merge, self.grid, self.layers, self.inner, self.heads,
        self.key_width, self.hidden, self.epsilon, self.remat, name="tower")(
            x_BPI, images.segment_ids_BP, images.places_BP4)


class Direct(nn.Module):
  """A linear map of merged patches, and a position; normed at the end."""
  width: int
  merge: int
  grid: int
  epsilon: float

  @nn.compact
  def __call__(self, x_BPI, places_BP4):
    x_BNF = concatenate(x_BPI, self.merge)
    places_BN4 = places_BP4[:, ::self.merge**2] // self.merge
    w_patch_FD = linear.weight(self, "w_patch_FD", x_BNF.shape[-1],
                               self.width)
    media_BND = linear.linear(x_BNF, w_patch_FD)
    media_BND += positions(self, self.grid, places_BN4, media_BND)
    return norm.RMSNorm(self.epsilon, name="final_norm")(media_BND)


class Tower(nn.Module):
  """Attention over the patches of each image, then the merge.

    x = W patch + position;  x += attention(norm x);  x += mlp(norm x);  ...
    media = norm(W_out gelu(W_in [norm x of merge x merge patches]))

  No biases anywhere.
  """
  width: int
  merge: int
  grid: int
  layers: int
  inner: int
  heads: int
  key_width: int
  hidden: int
  epsilon: float
  remat: bool

  @nn.compact
  def __call__(self, x_BPI, segment_ids_BP, places_BP4):
    w_patch_ID = linear.weight(self, "w_patch_ID", x_BPI.shape[-1],
                               self.inner)
    x_BPD = linear.linear(x_BPI, w_patch_ID)
    x_BPD += positions(self, self.grid, places_BP4, x_BPD)
    turns = image_position.angles_2d(
        places_BP4[..., 0], places_BP4[..., 1], self.key_width)
    step = nn.remat(TowerLayer, prevent_cse=False) if self.remat else (
        TowerLayer)
    scanned = nn.scan(
        step, variable_axes={"params": 0}, split_rngs={"params": True},
        in_axes=nn.broadcast, length=self.layers)
    x_BPD, _ = scanned(
        self.heads, self.key_width, self.hidden, self.epsilon, name="layers")(
            x_BPD, (segment_ids_BP, last_patches(segment_ids_BP), turns))
    x_BPD = norm.RMSNorm(self.epsilon, name="final_norm")(x_BPD)
    x_BNF = concatenate(x_BPD, self.merge)
    merged = x_BNF.shape[-1]
    x_BNF = linear.linear(x_BNF, linear.weight(self, "w_in_FF", merged,
                                               merged))
    media_BND = linear.linear(
        gelu(x_BNF, approximate=False),
        linear.weight(self, "w_out_FD", merged, self.width))
    return norm.RMSNorm(self.epsilon, name="projector_norm")(media_BND)


class TowerLayer(nn.Module):
  """Attention inside images, without order, then an MLP; step of a scan."""
  heads: int
  key_width: int
  hidden: int
  epsilon: float

  @nn.compact
  def __call__(self, x_BPD, patches):
    segment_ids_BP, last_BP, (cos_BPK, sin_BPK) = patches
    width, inner = x_BPD.shape[-1], (self.heads, self.key_width)

    def project(x, name, *shape, axes=1):
      return linear.linear(x, linear.weight(self, name, *shape), axes)

    y_BPD = norm.RMSNorm(self.epsilon, name="attention_norm")(x_BPD)
    q_BPHK, k_BPHK = (
        image_position.rotate(project(y_BPD, name, width, *inner), cos_BPK,
                              sin_BPK) for name in ("w_q_DHK", "w_k_DHK"))
    v_BPHV = project(y_BPD, "w_v_DHV", width, *inner)
    # As if every patch stood at its image's last: nothing is the future.
    o_BPHV = attention.causal_attention(
        q_BPHK, k_BPHK, v_BPHV, segment_ids_BP, index_BT=last_BP)
    x_BPD += project(o_BPHV, "w_out_HVD", *inner, width, axes=2)
    y_BPD = norm.RMSNorm(self.epsilon, name="feed_forward_norm")(x_BPD)
    f_BPF = gelu(project(y_BPD, "w_up_DF", width, self.hidden),
                 approximate=True)
    return x_BPD + project(f_BPF, "w_down_FD", self.hidden, width), None


def gelu(x, approximate):
  """GELU in float32, by tanh if `approximate`; dtype of x."""
  return jax.nn.gelu(x.astype(jnp.float32), approximate).astype(x.dtype)


def positions(module, grid, places_BP4, x_BPD):
  """The learned table's value at each patch, in the dtype of `x_BPD`."""
  table_PD = module.param(
      "w_position_PD", nn.initializers.normal(0.02),
      (grid * grid, x_BPD.shape[-1]), jnp.float32)
  row_BP, column_BP, rows_BP, columns_BP = jnp.moveaxis(places_BP4, -1, 0)
  return image_position.interpolate(
      table_PD, grid, row_BP, column_BP, jnp.maximum(rows_BP, 1),
      jnp.maximum(columns_BP, 1)).astype(x_BPD.dtype)


def concatenate(x_BPD, merge):
  """[B, P, D] to [B, P / merge^2, merge^2 D], the patches of a block."""
  batch, patches, width = x_BPD.shape
  return x_BPD.reshape(batch, patches // merge**2, merge**2 * width)


def last_patches(segment_ids_BP):
  """Where the image of each patch ends in the stream."""
  count = segment_ids_BP.shape[1]
  index_P = jnp.arange(count, dtype=jnp.int32)
  ends_BP = jnp.pad(segment_ids_BP[:, 1:] != segment_ids_BP[:, :-1],
                    ((0, 0), (0, 1)), constant_values=True)
  return jax.lax.cummin(jnp.where(ends_BP, index_P[None], count), axis=1,
                        reverse=True)


def place(x_BTD, seen):
  """Puts the embeddings of images where the text has their tokens.

  Args:
    x_BTD: embeddings of tokens.
    seen: media_BND and index_BT, the embedding that each token shows; -1 for
      a token that is text.
  """
  media_BND, index_BT = seen
  media_BTD = jnp.take_along_axis(
      media_BND, jnp.maximum(index_BT, 0)[..., None], axis=1)
  return jnp.where(index_BT[..., None] >= 0, media_BTD.astype(x_BTD.dtype),
                   x_BTD)
