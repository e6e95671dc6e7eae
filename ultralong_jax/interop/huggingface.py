"""Checkpoints of the Hugging Face hub: read into our parameters, and written.

  released = huggingface.read(folder)
  model = hybrid.Hybrid(**released.model)
  huggingface.write(other_folder, model, released.variables, released.hub)

Read a tensor at a time: beside the parameters themselves the host holds one
tensor of a shard. Written a shard at a time.
"""
import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from ultralong_jax import tree
from ultralong_jax.interop import kimi_linear, safetensors_file
from ultralong_jax.interop.safetensors_file import Refusal
from ultralong_jax.models import hybrid

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SHARD_BYTES = 5 * 10**9  # of what is written
FLOATS = (np.dtype("float32"), safetensors_file.DTYPES["BF16"])


class Released(NamedTuple):
  """A checkpoint in memory.

  Attributes:
    model: fields of models.hybrid.Hybrid.
    variables: collections params, in the checkpoint's dtypes unless another
      was asked for, and, with experts, router, in float32.
    hub: its config.json.
  """
  model: dict
  variables: dict
  hub: dict


def is_released(folder) -> bool:
  """Returns whether a folder's config.json is the hub's, not a run's."""
  path = pathlib.Path(folder) / "config.json"
  return path.is_file() and "model_type" in _json(path)


def read(folder, placed=None, dtype=None) -> Released:
  """Reads config.json and the safetensors beside it.

  Each tensor is written into its slice of the donated, stacked parameter,
  which lies in its target sharding from the start.

  Args:
    folder: of config.json and *.safetensors, as downloaded.
    placed: sharding of all arrays, or a tree of shardings like the variables;
      None: the first device.
    dtype: of the parameters; None keeps the checkpoint's.

  Raises:
    Refusal: names file, field, value and what to do.
  """
  folder = pathlib.Path(folder)
  file = folder / "config.json"
  if not file.is_file():
    raise Refusal(f"{file} does not exist: {folder} holds no checkpoint; give "
                  "the folder that was downloaded")
  hub = _json(file)
  fields = kimi_linear.to_model(hub, str(file))
  model = hybrid.Hybrid(**fields)
  found = _entries(folder)
  wanted = {t.name: t for t in kimi_linear.tensors(model)}
  dtypes = _match(folder, wanted, found)
  if dtype is not None:
    dtypes = dict.fromkeys(dtypes, np.dtype(dtype))
  shapes = _shapes(model)
  if not isinstance(placed, dict):
    everywhere = placed or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0])
    placed = jax.tree.map(lambda _: everywhere, shapes)
  return Released(fields, _fill(shapes, placed, dtypes, wanted, found), hub)


def _fill(shapes, placed, dtypes, wanted, found):
  """Returns the variables, filled tensor by tensor in the files' order."""
  shardings, arrays = tree.named_leaves(placed), {}
  forms = tree.named_leaves(shapes)
  for name, entry in found.items():
    x = _value(name, entry, wanted[name].shape)
    for piece in wanted[name].pieces:
      form, sharding = forms[piece.leaf], shardings[piece.leaf]
      if piece.leaf not in arrays:
        arrays[piece.leaf] = _zeros(form.shape, dtypes[piece.leaf], sharding)
      write = _writer(piece.heads, piece.start, piece.stop, piece.transpose,
                      form.shape[len(piece.index):], sharding)
      index = np.array(piece.index + (0,) * (
          len(form.shape) - len(piece.index)), np.int32)
      arrays[piece.leaf] = write(arrays[piece.leaf], x, index)
    # Else tensors would be read faster than they are written.
    jax.block_until_ready([arrays[p.leaf] for p in wanted[name].pieces])
    del x
  return jax.tree.unflatten(jax.tree.structure(shapes),
                            [arrays[name] for name in forms])


def _shapes(model):
  shapes = jax.eval_shape(model.init, jax.random.key(0),
                          np.zeros((1, 1), np.int32))
  return {name: shapes[name] for name in ("params", "router")
          if name in shapes}


def _value(name, entry, shape):
  """Reads a tensor; a padded A_log is cut to the heads that exist."""
  x = safetensors_file.load(entry)
  if x.shape != shape:
    x, heads = x.reshape(-1), shape[2]
    if x[heads:].astype(np.float32).any():
      raise Refusal(f"{entry.file}: {name}: {x.size} values for {heads} heads, "
                    "and those past them are not zero; the config's number of "
                    "heads is wrong")
    x = np.ascontiguousarray(x[:heads]).reshape(shape)
  return x


def _zeros(shape, dtype, sharding):
  return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.cache  # so that it is compiled once for all layers and experts
def _writer(heads, start, stop, transpose, shape, sharding):
  def write(leaf, x, index):
    value = split(x, heads, start, stop, transpose, shape).astype(leaf.dtype)
    value = value.reshape((1,) * (leaf.ndim - value.ndim) + value.shape)
    return jax.lax.dynamic_update_slice(leaf, value, tuple(index))
  return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def split(x, heads, start, stop, transpose, shape):
  """Cuts one piece out of a hub's tensor, as our parameter wants it.

  Args:
    x: [heads * rows, ...]: of a hub's tensor; arrays of NumPy and JAX.
    heads: equal parts of its first axis.
    start: first row of the piece in each.
    stop: end of its rows.
    transpose: swap rows and what follows them.
    shape: of the result, same elements in the same order.
  """
  rows = x.shape[0] // heads
  x = x.reshape(heads, rows, -1)[:, start:stop]
  x = x.reshape(heads * (stop - start), -1)
  return (x.T if transpose else x).reshape(shape)


def join(values, tensor: kimi_linear.Tensor):
  """The inverse of `split`: returns a hub's tensor of its pieces' values."""
  parts = []
  for x, piece in zip(values, tensor.pieces):
    rows = piece.heads * (piece.stop - piece.start)
    x = x.reshape(-1, rows).T if piece.transpose else x.reshape(rows, -1)
    parts.append(x.reshape(piece.heads, piece.stop - piece.start, -1))
  return np.ascontiguousarray(np.concatenate(parts, 1).reshape(tensor.shape))


def _json(path):
  try:
    value = json.loads(path.read_text())
  except ValueError as error:
    raise Refusal(f"{path} is no JSON ({error}); download it again") from error
  if not isinstance(value, dict):
    raise Refusal(f"{path} holds a {type(value).__name__}, not an object; "
                  "download it again")
  return value


def _entries(folder) -> dict:
  """Returns {name: Entry} of all shards, names as released, by position."""
  index = folder / INDEX
  listed = None
  if index.is_file():
    listed = _weight_map(index)
    files = sorted(set(listed.values()))
  else:
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(files) > 1:
      raise Refusal(f"{folder} holds {len(files)} safetensors files but no "
                    f"{INDEX}, which says which belong together; download it")
  if not files:
    pickles = sorted(file.name for file in folder.iterdir()
                     if file.suffix in PICKLES)
    raise Refusal(f"{folder} holds no *.safetensors" + (
        f", and {pickles[0]} is a pickle, which can run any code and is not "
        "opened; convert it to safetensors" if pickles else
        "; download the whole checkpoint"))
  missing = [name for name in files if not (folder / name).is_file()]
  if missing:
    raise Refusal(f"{index}: {', '.join(missing)}: not in {folder}; download "
                  "the rest of the checkpoint")
  found, where, errors = {}, {}, []
  for file in files:
    for name, entry in safetensors_file.entries(folder / file).items():
      released = _released_name(name)
      if listed is not None and listed.pop(name, None) != file:
        errors.append(f"{name}: in {file}, but not according to the index")
      if released in found:
        errors.append(f"{name}: in {file} and, as {where[released]}, in "
                      f"{found[released].file.name}")
      found[released], where[released] = entry, name
  errors += [f"{name}: not in {file}, but according to the index"
             for name, file in (listed or {}).items()]
  if errors:
    raise Refusal(f"{folder}: shards and index do not fit:\n  "
                  + "\n  ".join(errors) + "\ndownload them again, together")
  return found


def _weight_map(index):
  listed = _json(index).get("weight_map")
  if not isinstance(listed, dict) or not listed:
    raise Refusal(f"{index}: weight_map={str(listed)[:80]}: has to name the "
                  "file of each tensor; download it again")
  for name, file in listed.items():
    plain = isinstance(file, str) and file == pathlib.PurePath(file).name
    if not plain or "\\" in file or "\0" in file or file in ("", ".", ".."):
      raise Refusal(f"{index}: weight_map: {name}: {file!r} is no plain file "
                    "name, so it could lead out of the folder; do not use "
                    "this checkpoint")
    if not file.endswith(".safetensors"):
      kind = ("a pickle, which can run any code" if
              file.endswith(PICKLES) else "no safetensors file")
      raise Refusal(f"{index}: weight_map: {name}: {file!r} is {kind}; "
                    "convert it to safetensors")
  return dict(listed)


def _released_name(name):
  """One spelling: dense units are `mlp`, experts `block_sparse_moe`."""
  unit = ".mlp." if ".mlp." in name else ".block_sparse_moe."
  before, found, after = name.partition(unit)
  if not found:
    return name
  dense = after.split(".")[0] in ("gate_proj", "up_proj", "down_proj")
  return before + (".mlp." if dense else ".block_sparse_moe.") + after


def _match(folder, wanted, found) -> dict:
  """Returns {leaf: dtype}; refuses names, shapes or dtypes that do not fit."""
  lines = [f"{name}: missing, {list(tensor.shape)}"
           for name, tensor in wanted.items() if name not in found]
  dtypes, first = {}, {}
  for name, entry in found.items():
    here = f"{name}: {entry.dtype}{list(entry.shape)} in {entry.file.name}"
    if name not in wanted:
      lines.append(f"{here}: unexpected")
      continue
    if not _fits(name, entry.shape, wanted[name].shape):
      lines.append(f"{here}: has to be {list(wanted[name].shape)}")
    if entry.dtype not in FLOATS:
      lines.append(f"{here}: has to be float32 or bfloat16")
    for piece in wanted[name].pieces:
      dtype = dtypes.setdefault(piece.leaf, entry.dtype)
      if dtype != entry.dtype:
        lines.append(f"{here}: {first[piece.leaf]} is {dtype}, and they "
                     "become one array")
      first.setdefault(piece.leaf, name)
  if lines:
    raise Refusal(f"{folder} does not fit its config.json:\n  "
                  + "\n  ".join(lines) + "\nconfig.json and shards have to be "
                  "of one checkpoint")
  # Balancing moves thresholds by less than bfloat16 resolves.
  return {leaf: np.dtype("float32") if leaf.startswith("router/") else dtype
          for leaf, dtype in dtypes.items()}


def _fits(name, shape, wanted):
  """A_log comes as [H], as [1, 1, H, 1], and with zeros up to 128."""
  if name.endswith(".A_log"):
    return (shape in ((n := max(shape, default=0),), (1, 1, n, 1))
            and n >= wanted[2])
  return shape == wanted


def write(folder, model, variables, hub=None, dtype=None,
          shard_bytes: int = SHARD_BYTES):
  """Writes config.json and safetensors that transformers loads.

  Args:
    folder: where to; may exist, but not hold a checkpoint.
    model: Hybrid.
    variables: collections params and, with experts, router.
    hub: a config.json whose other fields are kept, such as token ids.
    dtype: of what has two axes or more; the rest keeps its own. None: all do.
    shard_bytes: size at which the next file begins.

  Raises:
    Refusal: names what the hub's format has no place for.
  """
  folder = pathlib.Path(folder)
  config = kimi_linear.to_hub(model, hub)
  if dtype is not None:
    config["dtype"] = np.dtype(dtype).name
  leaves = tree.named_leaves({name: variables[name] for name in variables})
  tensors = kimi_linear.tensors(model)
  taken = {piece.leaf for tensor in tensors for piece in tensor.pieces}
  lost = [name for name in leaves
          if name.startswith("params/") and name not in taken]
  if lost:
    raise Refusal("these parameters have no tensor in the hub's format, so "
                  f"{folder} would lack them: {', '.join(lost)}; export a "
                  "model without them")
  folder.mkdir(parents=True, exist_ok=True)
  there = sorted(x.name for x in folder.iterdir()
                 if x.suffix == ".safetensors" or x.name == "config.json")
  if there:
    raise Refusal(f"{folder} holds {there[0]} already; give a new folder")
  shards = _shards(tensors, leaves, dtype, shard_bytes)
  weight_map, total = {}, 0
  for i, shard in enumerate(shards):
    file = ("model.safetensors" if len(shards) == 1 else
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors")
    values = {tensor.name: _gather(tensor, leaves, dtype) for tensor in shard}
    save_file(values, folder / file, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(values, file)
    total += sum(x.nbytes for x in values.values())
  if len(shards) > 1:
    (folder / INDEX).write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": weight_map},
        indent=2) + "\n")
  # Last: without it the folder is no checkpoint.
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _dtype(tensor, leaves, dtype):
  kept = leaves[tensor.pieces[0].leaf].dtype
  matrix = len([n for n in tensor.shape if n > 1]) > 1
  return np.dtype(dtype) if dtype is not None and matrix else kept


def _gather(tensor, leaves, dtype):
  values = [np.asarray(_take(leaves[piece.leaf], piece.index))
            for piece in tensor.pieces]
  return join(values, tensor).astype(_dtype(tensor, leaves, dtype), copy=False)


def _take(leaf, index):
  if isinstance(leaf, np.ndarray) or not index:
    return leaf[index]
  return _take_traced(leaf, tuple(np.int32(i) for i in index))


@jax.jit  # else each index would be compiled
def _take_traced(leaf, index):
  for i in index:
    leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
  return leaf


def _shards(tensors, leaves, dtype, shard_bytes) -> list[list[Any]]:
  """Cuts the tensors, in order, into files of about `shard_bytes`."""
  shards, size = [[]], 0
  for tensor in tensors:
    own = int(np.prod(tensor.shape)) * _dtype(tensor, leaves, dtype).itemsize
    if shards[-1] and size + own > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size += own
  return shards
