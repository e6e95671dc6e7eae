"""Which layers a model has, and which of them are one scan."""


def plan(pattern, layers, dense_layers, block_layers):
  """Cuts layers into blocks, blocks into groups, and finds what repeats.

  A layer is (name, kind, feed_forward). A group is a tuple of layers that is
  traced once: as long as the pattern where it repeats, else a single layer.
  A block is a tuple of (name, group, repeats), whose names say which layer of
  the model it is, or which is the first; inside a repeating group, layers
  count from its own start.

  Args:
    pattern: a letter a layer, repeated as often as needed.
    layers: how many.
    dense_layers: of them, the first ones whose feed-forward is dense.
    block_layers: layers a block; the last block may be short.

  Returns:
    A tuple of (name, block, repeats), in the model's order.
  """
  kinds = (pattern * layers)[:layers]
  specs = [(kind, "dense" if i < dense_layers else "experts")
           for i, kind in enumerate(kinds)]
  blocks = [specs[i:i + block_layers] for i in range(0, layers, block_layers)]
  out, at, i = [], 0, 0
  while i < len(blocks):
    repeats = 1
    while i + repeats < len(blocks) and blocks[i + repeats] == blocks[i]:
      repeats += 1
    name = f"blocks_{i}" if repeats > 1 else f"block_{i}"
    out.append((name, _groups(blocks[i], min(_period(pattern), layers), at),
                repeats))
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


def _groups(block, period, at):
  """Groups of a block whose first layer is number `at` of the model."""
  out, i = [], 0
  while i < len(block):
    size, repeats = _repeats(block[i:], period)
    group = tuple((f"layer_{j}", *block[i + j]) for j in range(size))
    name = f"layers_{at + i}" if repeats > 1 else f"layer_{at + i}"
    out.append((name, group, repeats))
    i += size * repeats
  return tuple(out)


def _repeats(specs, period):
  """Size and count of the repeating group that `specs` starts with."""
  for size in sorted({1, period}):
    repeats = 1
    while specs[repeats * size:(repeats + 1) * size] == specs[:size]:
      repeats += 1
    if repeats > 1:
      return size, repeats
  return 1, 1


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
          for layer, _, _ in group:
            path = [block_name] + ["block"] * (block_repeats > 1)
            path += [name] + [layer] * (repeats > 1)
            index = [b] * (block_repeats > 1) + [r] * (repeats > 1)
            paths.append((tuple(path), tuple(index)))
  return paths
