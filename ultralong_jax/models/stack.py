"""Layers in blocks and scans, and how outputs travel through depth."""
from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn
import jax.numpy as jnp

from ultralong_jax.models import depth_scan

COLLECTIONS = {"params": 0, "router": 0, "statistics": 0}


class Parts(NamedTuple):
  """Makes the modules of a layer, each called with its `name`.

  Attributes:
    delta: attention of kind d.
    latent: attention of kind m.
    dense: feed-forward "dense".
    experts: feed-forward "experts".
    norm: before attention and feed-forward.
    mix: over depth; None: plain residual sums.
    remat: recompute each layer in the backward pass.
    fused: attention of kind f; None where no layer is of that kind.
  """
  delta: Callable
  latent: Callable
  dense: Callable
  experts: Callable
  norm: Callable
  mix: Callable | None
  remat: bool
  fused: Callable | None = None


class Stack(nn.Module):
  """Blocks of layers, and the mix over depth that the output reads.

  Equal neighbours are one scan that carries all block sums, written one after
  another; blocks that have no equal neighbour stand outside.
  """
  parts: Parts
  blocks: tuple

  @nn.compact
  def __call__(self, x_BTD, tokens, state):
    after, mixes = {}, self.parts.mix is not None
    sources, partial_BTD = (x_BTD,), None if mixes else x_BTD
    for name, block, repeats in self.blocks:
      own = None if state is None else state[name]
      if mixes and partial_BTD is not None:
        sources, partial_BTD = (*sources, partial_BTD), None
      if repeats == 1:
        partial_BTD, after[name] = Block(self.parts, block, name=name)(
            sources, None, partial_BTD, tokens, own)
      else:
        sources, after[name] = self._scan(name, block, repeats, sources,
                                          tokens, own)
    if mixes:
      if partial_BTD is not None:
        sources = (*sources, partial_BTD)
      partial_BTD = self.parts.mix(name="output_mix")(sources)
    return partial_BTD, None if state is None else after

  def _scan(self, name, block, repeats, sources, tokens, state):
    """Not by `nn.scan`, which keeps a buffer a block: see `depth_scan`."""
    mutable = [c for c in COLLECTIONS if self.is_mutable_collection(c)]
    if self.is_initializing():
      # Makes the variables, whose names and shapes are those of `nn.scan`.
      scanned = nn.scan(
          ScannedBlock, variable_axes=COLLECTIONS,
          split_rngs={"params": True}, length=repeats,
          in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0))
      scanned(self.parts, block, name=name)(
          None, sources + sources[:1] * repeats, None, tokens, state)
      mutable = []
    variables = {c: self.variables[c][name] for c in COLLECTIONS
                 if name in self.variables.get(c, {})}

    def run(x, sources, valid, tokens):
      variables, state = x
      module = ScannedBlock(self.parts, block, parent=None)
      (_, (sum_BTD, state)), written = module.apply(
          variables, None, sources, valid, tokens, state, mutable=mutable)
      return sum_BTD, (state, written)

    sources, (state, written) = depth_scan.scan(
        run, repeats, sources, tokens, (variables, state))
    for collection, tree in written.items():
      self.put_variable(collection, name, tree)
    return sources, state


class ScannedBlock(nn.Module):
  """A block of `_scan`; `nn.scan` wants the carry, which is None."""
  parts: Parts
  block: tuple

  @nn.compact
  def __call__(self, carry, sources, valid, tokens, state):
    return carry, Block(self.parts, self.block, name="block")(
        sources, valid, None, tokens, state)


class Block(nn.Module):
  """Layers whose outputs are summed; groups that repeat are one scan."""
  parts: Parts
  block: tuple

  @nn.compact
  def __call__(self, sources, valid, partial_BTD, tokens, state):
    """Adds the layers' outputs to `partial_BTD`, None at a block's start."""
    after = {}
    for name, group, repeats in self.block:
      own = None if state is None else state[name]
      if repeats == 1:
        partial_BTD, after[name] = _layer(self.parts, group[0], name)(
            sources, valid, partial_BTD, None, tokens, own)
        continue
      started = jnp.bool_(partial_BTD is not None)
      if partial_BTD is None:
        partial_BTD = jnp.zeros_like(sources[0])
      scanned = nn.scan(
          Group, variable_axes=COLLECTIONS, split_rngs={"params": True},
          in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
          length=repeats)
      (partial_BTD, _), after[name] = scanned(self.parts, group, name=name)(
          (partial_BTD, started), sources, valid, tokens, own)
    return partial_BTD, None if state is None else after


class Group(nn.Module):
  """A few layers as a scan's step; only their running sum travels."""
  parts: Parts
  group: tuple

  @nn.compact
  def __call__(self, carry, sources, valid, tokens, state):
    partial_BTD, started = carry
    after = {}
    for name, *layer in self.group:
      own = None if state is None else state[name]
      partial_BTD, after[name] = _layer(self.parts, (name, *layer), name)(
          sources, valid, partial_BTD, started, tokens, own)
      started = None
    carry = partial_BTD, jnp.bool_(True)
    return carry, None if state is None else after


def _layer(parts, layer, name):
  make = nn.remat(Layer) if parts.remat else Layer
  return make(parts, *layer[1:], name=name)


class Layer(nn.Module):
  """Attention, then a feed-forward, each on a normed mix over depth.

  Attributes:
    parts: makes what a layer consists of.
    kind: d delta, m latent, f both fused.
    feed_forward: "dense" or "experts".
  """
  parts: Parts
  kind: str
  feed_forward: str

  @nn.compact
  def __call__(self, sources, valid, partial_BTD, started, tokens, state):
    """Adds this layer's two outputs to the running sum.

    Args:
      sources: embedding and block sums; not read with plain residuals.
      valid: which of them count, or None for all.
      partial_BTD: running sum, None at a block's start.
      started: a boolean scalar, whether `partial_BTD` holds anything; None
        where that is known from `partial_BTD` itself.
      tokens: documents_BT, positions_BT, continues_B.
      state: of the attention; None in training.
    """
    documents_BT, positions_BT, continues_B = tokens
    x_BTD = self._mix("attention_mix", sources, valid, partial_BTD, started)
    x_BTD = self.parts.norm(name="attention_norm")(x_BTD)
    attention = {"d": self.parts.delta, "m": self.parts.latent,
                 "f": self.parts.fused}[self.kind]
    y_BTD, state = attention(name="attention")(
        x_BTD, documents_BT, positions_BT, continues_B, state)
    partial_BTD = y_BTD if partial_BTD is None else partial_BTD + y_BTD
    x_BTD = self._mix("feed_forward_mix", sources, valid, partial_BTD, None)
    x_BTD = self.parts.norm(name="feed_forward_norm")(x_BTD)
    if self.feed_forward == "dense":
      y_BTD = self.parts.dense(name="dense")(x_BTD)
    else:
      y_BTD = self.parts.experts(name="experts")(x_BTD, documents_BT > 0)
    return partial_BTD + y_BTD, state

  def _mix(self, name, sources, valid, partial_BTD, started):
    if self.parts.mix is None:
      return partial_BTD
    if partial_BTD is not None:
      if valid is not None or started is not None:
        valid = (True,) * len(sources) if valid is None else valid
        valid = (*valid, True if started is None else started)
      sources = (*sources, partial_BTD)
    elif len(sources) == 1:
      return sources[0]  # a mix of one source is that source
    return self.parts.mix(name=name)(sources, valid)
