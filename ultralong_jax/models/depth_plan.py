"""Which layers a model has, and which of them are one scan."""
import math
from typing import NamedTuple

# What layers of a kind can take from an earlier one of their block.
SHAREABLE = {"d": ("gates",), "m": ("latent",), "f": ("gates", "latent")}


class Layer(NamedTuple):
  """A layer of a plan. Only equal layers can be steps of one scan.

  Attributes:
    name: inside its group.
    kind: its letter of the pattern.
    feed_forward: "dense" or "experts".
    injects: whether later layers add its attention's output to their inputs.
    reads: whether it adds that of an earlier layer.
    leads: what later layers of its block take from it.
    follows: what it takes from the first layer of its block that has it.
  """
  name: str
  kind: str
  feed_forward: str
  injects: bool = False
  reads: bool = False
  leads: tuple = ()
  follows: tuple = ()


def plan(pattern, layers, dense_layers, block_layers, injection=(0, 0),
         share=()):
  """Cuts layers into blocks, blocks into groups, and finds what repeats.

  A group is a tuple of `Layer`s that is traced once: as long as what repeats,
  else a single layer, as those that lead others always are.
  A block is a tuple of (name, group, repeats), whose names say which layer of
  the model it is, or which is the first; inside a repeating group, layers
  count from its own start.

  Args:
    pattern: a letter a layer, repeated as often as needed.
    layers: how many.
    dense_layers: of them, the first ones whose feed-forward is dense.
    block_layers: layers a block; the last block may be short.
    injection: (stride, span): layers 0, stride, 2 stride, ... inject into the
      next `span` <= stride layers each, across blocks; a stride of 0: none.
      Blocks stay equal, so one scan, where the stride divides `block_layers`.
    share: of "latent" and "gates", what layers of a block take from the first.

  Returns:
    A tuple of (name, block, repeats), in the model's order.
  """
  kinds = (pattern * layers)[:layers]
  specs = [Layer("", kind, "dense" if i < dense_layers else "experts",
                 *_injection(i, layers, *injection))
           for i, kind in enumerate(kinds)]
  blocks = [_share(specs[i:i + block_layers], share)
            for i in range(0, layers, block_layers)]
  period = _period(pattern)
  sizes = sorted({1, period, math.lcm(period, injection[0] or 1)})
  out, at, i = [], 0, 0
  while i < len(blocks):
    repeats = 1
    while i + repeats < len(blocks) and blocks[i + repeats] == blocks[i]:
      repeats += 1
    name = f"blocks_{i}" if repeats > 1 else f"block_{i}"
    out.append((name, _groups(blocks[i], sizes, at), repeats))
    at += repeats * len(blocks[i])
    i += repeats
  return tuple(out)


def _period(pattern):
  """Letters after which a pattern repeats.

  One that ends unlike it went on, "dddm" * 6 + "ddm", has to be spelled out;
  its period is 4 all the same.
  """
  for size in range(1, len(pattern) // 2 + 1):
    start, whole = pattern[:size], len(pattern) // size
    end = pattern[whole * size:]
    if (start * whole + end == pattern and set(start) == set(pattern)
        and not start.startswith(end)):
      return size
  return len(pattern)


def _injection(i, layers, stride, span):
  """Whether layer i injects, which the last one never does, and reads."""
  if not stride:
    return False, False
  # With span == stride, one that injects has read the one before it.
  return i % stride == 0 and i + 1 < layers, i > 0 and (i - 1) % stride < span


def _share(block, share):
  """The block's layers, with who takes what from whom."""
  has = [set(SHAREABLE[layer.kind]).intersection(share) for layer in block]
  out = []
  for i, layer in enumerate(block):
    before, after = set().union(*has[:i]), set().union(*has[i + 1:])
    out.append(layer._replace(leads=tuple(sorted(has[i] & after - before)),
                              follows=tuple(sorted(has[i] & before))))
  return out


def _groups(block, sizes, at):
  """Groups of a block whose first layer is number `at` of the model."""
  out, i = [], 0
  while i < len(block):
    size, repeats = _repeats(block[i:], sizes)
    group = tuple(block[i + j]._replace(name=f"layer_{j}")
                  for j in range(size))
    name = f"layers_{at + i}" if repeats > 1 else f"layer_{at + i}"
    out.append((name, group, repeats))
    i += size * repeats
  return tuple(out)


def _repeats(specs, sizes):
  """Size and count of the repeating group that `specs` starts with."""
  for size in sizes:
    repeats = 1
    while specs[repeats * size:(repeats + 1) * size] == specs[:size]:
      repeats += 1
    if repeats > 1:
      return size, repeats
  return 1, 1


def all_layers(model_plan):
  """Yields the `Layer` of each layer of the model, in order."""
  for _, block, block_repeats in model_plan:
    for _ in range(block_repeats):
      for _, group, repeats in block:
        for _ in range(repeats):
          yield from group


def layer_paths(model_plan):
  """Where each layer's parameters are.

  Returns:
    For each layer of the model, in order: the names on its path and the
    indices into the leading axes of its (stacked) parameters.
  """
  paths = []
  for block_name, block, block_repeats in model_plan:
    for b in range(block_repeats):
      for name, group, repeats in block:
        for r in range(repeats):
          for layer in group:
            path = [block_name] + ["block"] * (block_repeats > 1)
            path += [name] + [layer.name] * (repeats > 1)
            index = [b] * (block_repeats > 1) + [r] * (repeats > 1)
            paths.append((tuple(path), tuple(index)))
  return paths
