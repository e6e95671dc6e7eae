"""Checkpoints of a run, by Orbax: whole, verified, or refused with a reason.

One save is three items: `model` (params and router), `rest` (everything else
of the TrainState) and `record` (JSON: data position, fingerprints, checksums).
Arrays are stored flat, under their names, so that a file depends on no class.
"""
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ultralong_jax import tree
from ultralong_jax.train.check import Refusal

MODEL = ("params", "router")  # fields of TrainState; the others are `rest`
SPARE_BYTES = 2**24  # for the record, Orbax's metadata and the file system


class Checkpoints:
  """The checkpoints of one WORKDIR.

  A save returns once the arrays are on the host; files are written in the
  background. What fails there is raised by the next save, wait or close.
  """

  def __init__(self, workdir, keep: int = 2, read_only: bool = False):
    self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
    if read_only and not self.folder.is_dir():
      raise Refusal(f"{self.folder} does not exist: nothing was saved in "
                    "this run yet")
    self._manager = ocp.CheckpointManager(
        self.folder,
        item_handlers={"model": ocp.StandardCheckpointHandler(),
                       "rest": ocp.StandardCheckpointHandler(),
                       "record": ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            create=not read_only,
            read_only=read_only,
            # A kill in a save leaves a folder that Orbax keeps for ever.
            cleanup_tmp_directories=not read_only))

  def steps(self) -> list[int]:
    """Returns the steps that are committed on disk, oldest first."""
    self._manager.reload()  # after a failed save its own list is wrong
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """Returns the newest committed step, or None."""
    return max(self.steps(), default=None)

  def prepare(self, state):
    """Compiles what save() computes, so that no step waits for it."""
    model, rest = _split(state)
    jax.block_until_ready(_verify({**model, **rest}))

  def save(self, state, record: dict):
    """Saves a TrainState and a JSON record beside it, in the background.

    Args:
      state: TrainState; state.step names the checkpoint.
      record: JSON values that restore() gives back.

    Raises:
      FloatingPointError: the state is not finite; nothing is written.
      OSError: the disk has no room; nothing is written.
    """
    # First the one before: Orbax would report its failure instead of saving.
    self.wait()
    step = int(state.step)
    model, rest = _split(state)
    finite, sums = jax.device_get(_verify({**model, **rest}))
    broken = [name for name in finite if not finite[name]]
    if broken:
      raise FloatingPointError(
          f"step {step} is not saved: {', '.join(broken[:5])} "
          f"{'is' if len(broken) == 1 else 'are'} not finite; the last good "
          f"checkpoint is of step {self.latest()}")
    self._check_room(step, sum(x.nbytes for x in (model | rest).values()))
    record = {**record, "step": step,
              "checksums": {name: int(x) for name, x in sums.items()}}
    saved = self._manager.save(step, args=ocp.args.Composite(
        model=ocp.args.StandardSave(model),
        rest=ocp.args.StandardSave(rest),
        record=ocp.args.JsonSave(record)))
    if not saved:
      raise RuntimeError(f"Orbax declined to save step {step} in "
                         f"{self.folder}, which holds {self.steps()}")

  def _check_room(self, step: int, size_bytes: int):
    free_bytes = shutil.disk_usage(self.folder).free
    if free_bytes < size_bytes + SPARE_BYTES:
      raise OSError(
          f"step {step} is not saved: it takes {size_bytes / 2**20:.0f} MiB "
          f"and {self.folder} has {free_bytes / 2**20:.0f} MiB free")

  def record(self, step: int) -> dict:
    """Returns the JSON record of a step."""
    return self._manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

  def restore(self, step: int, shapes):
    """Returns (state, record) of a step.

    Args:
      step: one of steps().
      shapes: the TrainState as ShapeDtypeStructs with shardings; what is
        saved has to have exactly its leaves, shapes and dtypes.
    """
    model, rest = _split(shapes)
    arrays, record = self._read(step, {"model": model, "rest": rest})
    return _join(shapes, arrays), record

  def restore_model(self, step: int, params, router):
    """Returns ((params, router), record) without reading the optimizer."""
    shapes = {"params": params, "router": router}
    arrays, record = self._read(step, {"model": _named(shapes)})
    both = _join(shapes, arrays)
    return (both["params"], both["router"]), record

  def _read(self, step: int, items: dict):
    where = f"checkpoint {self.folder / str(step)}"
    saved = self._manager.item_metadata(step)
    for item, shapes in items.items():
      _check_structure(where, saved[item], shapes)
    try:
      restored = self._manager.restore(step, args=ocp.args.Composite(
          record=ocp.args.JsonRestore(),
          **{item: ocp.args.StandardRestore(shapes)
             for item, shapes in items.items()}))
    except Exception as error:  # Orbax raises bare ones
      reason = str(error).partition("\n")[0][:300]
      raise Refusal(f"{where} cannot be read: {reason}") from error
    arrays = {k: v for item in items for k, v in restored[item].items()}
    record = restored["record"]
    _, sums = jax.device_get(_verify(arrays))
    damaged = [name for name in sums
               if int(sums[name]) != record["checksums"][name]]
    if damaged:
      raise Refusal(f"{where} is damaged: {', '.join(damaged[:5])} not as it "
                    "was saved; move this folder away to go on from the "
                    "checkpoint before")
    return arrays, record

  def wait(self):
    """Waits for the save under way and raises what went wrong in it."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()

  def close(self):
    self._manager.close()


def _named(values) -> dict:
  """Flattens to {name: array}."""
  # "/" would nest, and "." is what Orbax joins with.
  return {name.replace("/", ":"): leaf
          for name, leaf in tree.named_leaves(values).items()}


def _split(state):
  """Returns the named leaves of (model, rest)."""
  fields = {name: getattr(state, name) for name in state.__dataclass_fields__}
  model = {name: fields.pop(name) for name in MODEL}
  return _named(model), _named(fields)


def _join(shapes, arrays: dict):
  """Puts named arrays back into a tree of `shapes`' structure."""
  names = list(_named(shapes))
  return jax.tree.unflatten(jax.tree.structure(shapes),
                            [arrays[name] for name in names])


def _check_structure(where: str, saved, shapes: dict):
  """Raises on a leaf that is missing, unknown or of another form.

  Orbax itself would cast to the target's dtype without a word.
  """
  saved = dict(saved.tree)
  lines = [f"{name}: not in the checkpoint"
           for name in shapes if name not in saved]
  lines += [f"{name}: in the checkpoint only"
            for name in saved if name not in shapes]
  for name in shapes.keys() & saved.keys():
    old, new = saved[name], shapes[name]
    if tuple(old.shape) != new.shape or np.dtype(old.dtype) != new.dtype:
      lines.append(f"{name}: {old.dtype}{list(old.shape)} in the checkpoint, "
                   f"{new.dtype}{list(new.shape)} here")
  if lines:
    more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
    raise Refusal(f"{where} does not fit this config:\n  "
                  + "\n  ".join(sorted(lines)[:10] + more))


def _verify(arrays: dict):
  """Returns [{name: finite}, {name: checksum}], computed where arrays are.

  The checksum is a sum modulo 2^32 of each element's bits times its odd
  position, so that it sees a flipped bit and a moved row, and depends on no
  sharding.
  """
  both = {name: _verify_leaf(x) for name, x in arrays.items()}
  return [{name: pair[i] for name, pair in both.items()} for i in range(2)]


@jax.jit  # a leaf at a time: leaves of one shape are compiled once
def _verify_leaf(x):
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  return jnp.all(jnp.isfinite(x)) if floating else True, _checksum(x)


def _checksum(x):
  if x.dtype == bool:
    x = x.astype(jnp.uint32)
  unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).ravel()
  return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1),
                 dtype=jnp.uint32)
