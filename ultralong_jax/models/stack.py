"""Layers in blocks and scans, and how outputs travel through depth."""
from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from ultralong_jax.models import depth_plan, depth_scan

COLLECTIONS = {"params": 0, "router": 0, "statistics": 0}
# A stream that is left out here does not reach the layers inside a scan.
RNGS = {"params": True, "noise": True}


class Parts(NamedTuple):
  """Makes the modules of a layer, each called with its `name`.

  Attributes:
    delta: attention of kind d.
    latent: attention of kind m.
    dense: feed-forward "dense".
    experts: feed-forward "experts".
    norm: before attention and feed-forward.
    mix: over depth; None: plain residual sums.
    injection: of an attention's output, for layers whose plan says so.
    remat: recompute each layer in the backward pass.
    fused: attention of kind f; None where no layer is of that kind.
  """
  delta: Callable
  latent: Callable
  dense: Callable
  experts: Callable
  norm: Callable
  mix: Callable | None
  injection: Callable | None
  remat: bool
  fused: Callable | None = None


class Stack(nn.Module):
  """Blocks of layers, and the mix over depth that the output reads.

  Equal neighbours are one scan that carries all block sums, written one after
  another, or the one sum of plain residuals; blocks that have no equal
  neighbour stand outside. What the last injecting layer gave to later ones
  travels along, None where no layer injects.
  """
  parts: Parts
  blocks: tuple

  @nn.compact
  def __call__(self, x_BTD, tokens, state):
    after, mixes = {}, self.parts.mix is not None
    sources, partial_BTD = (x_BTD,), None if mixes else x_BTD
    injects = any(x.injects for x in depth_plan.all_layers(self.blocks))
    injected_BTD = jnp.zeros_like(x_BTD) if injects else None
    for name, block, repeats in self.blocks:
      own = None if state is None else state[name]
      if mixes and partial_BTD is not None:
        sources, partial_BTD = (*sources, partial_BTD), None
      if repeats == 1:
        partial_BTD, injected_BTD, after[name] = Block(
            self.parts, block, name=name)(
                sources, None, partial_BTD, injected_BTD, tokens, own)
      elif mixes:
        sources, injected_BTD, after[name] = self._scan(
            name, block, repeats, sources, injected_BTD, tokens, own)
      else:
        (partial_BTD, injected_BTD), (_, after[name]) = _scanned(repeats)(
            self.parts, block, name=name)(
                (partial_BTD, injected_BTD), sources, None, tokens, own)
    if mixes:
      if partial_BTD is not None:
        sources = (*sources, partial_BTD)
      partial_BTD = self.parts.mix(name="output_mix")(sources)
    return partial_BTD, None if state is None else after

  def _scan(self, name, block, repeats, sources, injected_BTD, tokens, state):
    """Not by `nn.scan`, which keeps a buffer a block: see `depth_scan`."""
    mutable = [c for c in COLLECTIONS if self.is_mutable_collection(c)]
    if self.is_initializing():
      # Makes the variables, whose names and shapes are those of `nn.scan`.
      _scanned(repeats)(self.parts, block, name=name)(
          (None, injected_BTD), sources + sources[:1] * repeats, None, tokens,
          state)
      mutable = []
    variables = {c: self.variables[c][name] for c in COLLECTIONS
                 if name in self.variables.get(c, {})}

    rngs = {"noise": jax.random.split(self.make_rng("noise"), repeats)
            } if self.has_rng("noise") else {}

    def run(x, sources, valid, injected_BTD, tokens):
      variables, state, rngs = x
      module = ScannedBlock(self.parts, block, parent=None)
      ((_, injected_BTD), (sum_BTD, state)), written = module.apply(
          variables, (None, injected_BTD), sources, valid, tokens, state,
          mutable=mutable, rngs=rngs)
      return sum_BTD, injected_BTD, (state, written)

    sources, injected_BTD, (state, written) = depth_scan.scan(
        run, repeats, sources, injected_BTD, tokens, (variables, state, rngs))
    for collection, tree in written.items():
      self.put_variable(collection, name, tree)
    return sources, injected_BTD, state


def _scanned(repeats):
  return nn.scan(ScannedBlock, variable_axes=COLLECTIONS,
                 split_rngs=RNGS, length=repeats,
                 in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0))


class ScannedBlock(nn.Module):
  """A block as a scan's step.

  The carry has the running sum of plain residuals, else None; then the block's
  own sum is an output beside its state.
  """
  parts: Parts
  block: tuple

  @nn.compact
  def __call__(self, carry, sources, valid, tokens, state):
    before_BTD, injected_BTD = carry
    sum_BTD, injected_BTD, state = Block(self.parts, self.block, name="block")(
        sources, valid, before_BTD, injected_BTD, tokens, state)
    if before_BTD is None:
      return (None, injected_BTD), (sum_BTD, state)
    return (sum_BTD, injected_BTD), (None, state)


class Block(nn.Module):
  """Layers whose outputs are summed; groups that repeat are one scan."""
  parts: Parts
  block: tuple

  @nn.compact
  def __call__(self, sources, valid, partial_BTD, injected_BTD, tokens, state):
    """Adds the layers' outputs to `partial_BTD`, None at a block's start."""
    after, shared = {}, {}
    for name, group, repeats in self.block:
      own = None if state is None else state[name]
      if repeats == 1:
        partial_BTD, injected_BTD, shared, after[name] = _layer(
            self.parts, group[0], name)(
                sources, valid, partial_BTD, None, injected_BTD, shared,
                tokens, own)
        continue
      started = jnp.bool_(partial_BTD is not None)
      if partial_BTD is None:
        partial_BTD = jnp.zeros_like(sources[0])
      scanned = nn.scan(
          Group, variable_axes=COLLECTIONS, split_rngs=RNGS,
          in_axes=(nn.broadcast,) * 4 + (0,), length=repeats)
      # No layer of a group that repeats leads, so `shared` stays as it is and
      # is kept once, not in the carry of every step.
      (partial_BTD, _, injected_BTD), after[name] = scanned(
          self.parts, group, name=name)(
              (partial_BTD, started, injected_BTD), sources, valid, shared,
              tokens, own)
    return partial_BTD, injected_BTD, None if state is None else after


class Group(nn.Module):
  """A few layers as a scan's step; their running sum and injection travel."""
  parts: Parts
  group: tuple

  @nn.compact
  def __call__(self, carry, sources, valid, shared, tokens, state):
    partial_BTD, started, injected_BTD = carry
    after = {}
    for layer in self.group:
      own = None if state is None else state[layer.name]
      partial_BTD, injected_BTD, _, after[layer.name] = _layer(
          self.parts, layer, layer.name)(
              sources, valid, partial_BTD, started, injected_BTD, shared,
              tokens, own)
      started = None
    carry = partial_BTD, jnp.bool_(True), injected_BTD
    return carry, None if state is None else after


def _layer(parts, plan, name):
  make = nn.remat(Layer) if parts.remat else Layer
  return make(parts, plan, name=name)


class Layer(nn.Module):
  """Attention, then a feed-forward, each on a normed mix over depth.

  Attributes:
    parts: makes what a layer consists of.
    plan: which of them, and what other layers have to do with it.
  """
  parts: Parts
  plan: depth_plan.Layer

  @nn.compact
  def __call__(self, sources, valid, partial_BTD, started, injected_BTD,
               shared, tokens, state):
    """Adds this layer's two outputs to the running sum.

    Args:
      sources: embedding and block sums; not read with plain residuals.
      valid: which of them count, or None for all.
      partial_BTD: running sum, None at a block's start.
      started: a boolean scalar, whether `partial_BTD` holds anything; None
        where that is known from `partial_BTD` itself.
      injected_BTD: from the last layer that injects; None without such layers.
      shared: latents or gates that earlier layers of the block lead with.
      tokens: documents_BT, positions_BT, continues_B.
      state: of the attention; None in training.

    Returns:
      partial_BTD, injected_BTD, shared, state: for the next layer.
    """
    documents_BT, positions_BT, continues_B = tokens
    x_BTD = self._mix("attention_mix", sources, valid, partial_BTD, started)
    x_BTD = self.parts.norm(name="attention_norm")(x_BTD)
    if self.plan.reads:
      x_BTD += injected_BTD
    attention = {"d": self.parts.delta, "m": self.parts.latent,
                 "f": self.parts.fused}[self.plan.kind]
    y_BTD, state, own = attention(name="attention")(
        x_BTD, documents_BT, positions_BT, continues_B, state,
        {name: shared[name] for name in self.plan.follows})
    shared = {**shared, **{name: own[name] for name in self.plan.leads}}
    if self.plan.injects:
      injected_BTD = self.parts.injection(name="injection")(y_BTD)
    partial_BTD = y_BTD if partial_BTD is None else partial_BTD + y_BTD
    x_BTD = self._mix("feed_forward_mix", sources, valid, partial_BTD, None)
    x_BTD = self.parts.norm(name="feed_forward_norm")(x_BTD)
    if self.plan.feed_forward == "dense":
      y_BTD = self.parts.dense(name="dense")(x_BTD)
    else:
      y_BTD = self.parts.experts(name="experts")(x_BTD, documents_BT > 0)
    return partial_BTD + y_BTD, injected_BTD, shared, state

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
