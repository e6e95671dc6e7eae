"""Floating-point operations of the model, and what a device could do.

Counts what the mathematics needs, whatever the implementation recomputes, so
that figures of two implementations can be compared.
"""
import math
import re

from ultralong_jax import tree

# bfloat16 matmul rate of one device, operations a second, dense, as its maker
# states it. The key is jax.Device.device_kind.
PEAK = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def train_per_token(model, params, context: int, patches: int = 0) -> float:
  """Returns operations of a forward and a backward pass, per token.

  Args:
    model: Hybrid, for the sizes that no parameter shows.
    params: the tree of parameters; shapes are enough.
    context: tokens in a row; causal attention reads half of it on average.
    patches: of images in a row. Attention among them is left out: it depends
      on their sizes, which differ.
  """
  letters = (model.pattern * model.layers)[:model.layers]
  # A delta layer decays, reads, writes and reads again a K x V state a head.
  delta = 6 * model.heads * model.key_width * model.value_width
  latent_width = model.latent_shared_width + (
      # A gate of the query on the latents leaves no key to share: each head
      # reads the latent itself, as key and as value.
      2 * model.latent_rank if model.latent_gate == "latent" else
      model.latent_key_width + model.latent_value_width)
  latent = 2 * model.latent_heads * latent_width * context / 2
  text = {name: params[name] for name in params if name != "images"}
  of = {"d": delta, "m": latent, "f": delta + latent}
  forward = (2 * active(text, model.experts, model.experts_per_token)
             + sum(of[letter] for letter in letters))
  if model.mtp:  # its parameters are counted, not the second unembedding
    forward += of[letters[-1]] + 2 * model.width * model.vocab
  if "images" in params:
    forward += 2 * patches / context * per_patch(params["images"],
                                                 model.vision_merge)
  return 3 * forward  # the backward pass multiplies twice


def active(params, experts: int, experts_per_token: int) -> int:
  """Returns how many parameters one token is multiplied with.

  The embedding is a lookup, unless it is the unembedding too. Of a leaf whose
  shape suffix begins with E, the experts, a token meets a few.
  """
  total = 0
  leaves = tree.named_leaves(params)
  for name, leaf in leaves.items():
    suffix = name.rpartition("_")[2]
    if name == "w_embed_WD" and "w_unembed_DW" in leaves:
      continue
    if suffix.startswith("E") and len(suffix) > 2:
      total += math.prod(leaf.shape) * experts_per_token // experts
    else:
      total += math.prod(leaf.shape)
  return total


def per_patch(params, merge: int) -> float:
  """Returns how many parameters of the encoder one patch is multiplied with.

  The table of positions is a lookup; what comes after the merge meets
  merge^2 patches at once.
  """
  total = 0.
  for name, leaf in tree.named_leaves(params).items():
    if re.search(r"w_in_FF|w_out_FD|w_patch_FD|projector_norm", name):
      total += math.prod(leaf.shape) / merge**2
    elif not name.endswith("w_position_PD"):
      total += math.prod(leaf.shape)
  return total


def peak(device) -> float | None:
  """Returns the device's bfloat16 rate, or None where it is not known."""
  return PEAK.get(device.device_kind)
