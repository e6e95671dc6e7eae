"""Checkpoints of a run: whole, verified, or refused with a reason.

Orbax writes three items: `model` (params and router), `rest` (everything else
of the TrainState) and `record` (JSON: data position, fingerprints, checksums).
Arrays are stored flat, under their names, so that a file depends on no class.
What is a checkpoint is decided above Orbax: manifest.py says when a folder is
whole, shelf.py which ones there are.
"""
from concurrent import futures
import pathlib
import shutil
import sys
import time
from typing import Callable

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from ultralong_jax.train import checksum
from ultralong_jax.train import manifest as manifest_lib
from ultralong_jax.train import named
from ultralong_jax.train import shelf as shelf_lib
from ultralong_jax.train.check import Refusal

SPARE_BYTES = 2**24  # for the record, Orbax's metadata and the file system


def _say(text: str):
  print(text, file=sys.stderr, flush=True)


class NotSaved(OSError):
  """A save did not come to be; what was committed before is untouched."""


class Checkpoints:
  """The checkpoints of one WORKDIR.

  A save returns once the arrays are on the host. A thread then waits for
  Orbax's files, hashes and commits them; what fails there is raised by the
  next poll, save, wait or close.

  Several processes have to share the folder and to call save, latest and
  quarantine alike: each writes its part, Orbax's barrier waits for all, and
  process 0 commits and decides which step is the newest.
  """

  def __init__(self, workdir, keep: int = 2, read_only: bool = False,
               say: Callable[[str], None] = _say):
    """Opens a run's checkpoints.

    Args:
      workdir: folder of the run.
      keep: newest committed checkpoints that stay; older ones are deleted
        once there is a newer one, and never before.
      read_only: change nothing; the folder has to be there.
      say: is told which checkpoints were passed over, and why.
    """
    self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
    if read_only and not self.folder.is_dir():
      raise Refusal(f"{self.folder} does not exist: nothing was saved in "
                    "this run yet")
    self._say = say
    self._keep = keep
    self._shelf = shelf_lib.Shelf(self.folder)
    self._thread = futures.ThreadPoolExecutor(1, "commit")
    self._commit = None  # future of the save under way
    if not read_only:
      try:
        self._first(self._shelf.open)
      except OSError as error:
        raise Refusal(f"{self.folder} cannot be written: {error.strerror}; "
                      "give a --workdir that can") from error
    # Were folders made in a thread, one that cannot be made would leave
    # others waiting for it, and the process could not exit.
    self._orbax = ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            model=ocp.StandardCheckpointHandler(),
            rest=ocp.StandardCheckpointHandler(),
            record=ocp.JsonCheckpointHandler()),
        async_options=ocp.AsyncOptions(
            create_directories_asynchronously=False))

  def steps(self) -> list[int]:
    """Returns the steps that are committed on disk, oldest first."""
    return self._shelf.steps()

  def latest(self) -> int | None:
    """Returns the newest step whose marker and hashes verify, or None.

    Every file is read. What is passed over is said, with its reason.
    """
    step = self._first(lambda: self._shelf.newest(self._say))
    if jax.process_count() > 1:
      step = int(multihost_utils.broadcast_one_to_all(
          np.int32(-1 if step is None else step)))
      step = None if step < 0 else step
    return step

  def folders(self) -> list[int]:
    """Returns the steps that have a folder, whole or not, oldest first."""
    return self._shelf.numbers()

  def prepare(self, state):
    """Compiles what save() computes, so that no step waits for it."""
    model, rest = named.split(state)
    jax.block_until_ready(checksum.verify({**model, **rest}))

  def save(self, state, record: dict):
    """Saves a TrainState and a JSON record beside it, in the background.

    Args:
      state: TrainState; state.step names the checkpoint.
      record: JSON values that restore() gives back.

    Raises:
      FloatingPointError: the state is not finite; nothing is written.
      NotSaved: the one before failed, or the disk has no room.
      Refusal: this step or a later one is there already.
    """
    self.wait()  # raises what the one before failed of
    step = int(state.step)
    model, rest = named.split(state)
    finite, sums = jax.device_get(checksum.verify({**model, **rest}))
    broken = [name for name in finite if not finite[name]]
    if broken:
      raise FloatingPointError(
          f"step {step} is not saved: {', '.join(broken[:5])} "
          f"{'is' if len(broken) == 1 else 'are'} not finite; the last good "
          f"checkpoint is of step {self.latest()}")
    self._make_way(step)
    self._check_room(step, sum(x.nbytes for x in (model | rest).values()))
    sums = {name: int(x) for name, x in sums.items()}
    record = {**record, "step": step, "checksums": sums,
              "format": manifest_lib.FORMAT}
    manifest = {
        "step": step, "tier": "full", "branch": self._shelf.branch(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprints": manifest_lib.fingerprints(record),
        "arrays": manifest_lib.arrays({**model, **rest}, sums)}
    try:
      self._orbax.save(self._shelf.saving(step), args=ocp.args.Composite(
          model=ocp.args.StandardSave(model),
          rest=ocp.args.StandardSave(rest),
          record=ocp.args.JsonSave(record)))
    except Exception as error:  # Orbax raises bare ones
      raise self._not_saved(step, error) from error
    self._commit = self._thread.submit(self._finish, step, manifest)

  def _finish(self, step: int, manifest: dict):
    """Commits what Orbax writes, and deletes what it replaces."""
    try:
      self._orbax.wait_until_finished()  # all processes have written
      self._first(lambda: self._shelf.commit(step, manifest))
    except Exception as error:
      raise self._not_saved(step, error) from error
    try:
      self._first(lambda: self._shelf.prune(self._keep))
    except OSError as error:  # the save is whole, so the run goes on
      self._say(f"old checkpoints in {self.folder} are not deleted: {error}")

  def _not_saved(self, step: int, error: Exception) -> NotSaved:
    self._first(lambda: self._shelf.discard(step))
    steps = self.steps()
    last = f"is of step {steps[-1]}" if steps else "does not exist"
    return NotSaved(
        f"step {step} is not saved in {self.folder}: {_first_line(error)}; "
        f"the last checkpoint {last}")

  def _make_way(self, step: int):
    """Raises if a save could not become the newest; moves damaged ones."""
    newer = self._shelf.newer(step)
    if newer:
      raise Refusal(
          f"step {step} is not saved: {self.folder} holds {newer}, which a "
          f"resume would take instead; quarantine({step - 1}) moves them away")
    self._first(lambda: self._shelf.set_aside(step))

  def _check_room(self, step: int, size_bytes: int):
    free_bytes = shutil.disk_usage(self.folder).free
    if free_bytes < size_bytes + SPARE_BYTES:
      raise NotSaved(
          f"step {step} is not saved: it takes {size_bytes / 2**20:.0f} MiB "
          f"and {self.folder} has {free_bytes / 2**20:.0f} MiB free")

  def quarantine(self, after_step: int) -> list[pathlib.Path]:
    """Moves the checkpoints after a step away, after a rollback to it.

    Nothing is deleted: they go to checkpoints/abandoned/<branch>, and what is
    saved from here on is of the next branch.

    Returns:
      where they are now; empty on processes other than 0.
    """
    self.wait()
    moved = self._first(lambda: self._shelf.quarantine(after_step))
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("quarantine")
    return moved or []

  def record(self, step: int) -> dict:
    """Returns the JSON record of a step."""
    return self._orbax.restore(
        self._shelf.path(step),
        args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

  def restore(self, step: int, shapes):
    """Returns (state, record) of a step.

    Args:
      step: one of steps().
      shapes: the TrainState as ShapeDtypeStructs with shardings; what is
        saved has to have exactly its leaves, shapes and dtypes.
    """
    model, rest = named.split(shapes)
    arrays, record = self._read(step, {"model": model, "rest": rest})
    return named.join(shapes, arrays), record

  def restore_model(self, step: int, params, router):
    """Returns ((params, router), record) without reading the optimizer."""
    shapes = {"params": params, "router": router}
    arrays, record = self._read(step, {"model": named.flatten(shapes)})
    both = named.join(shapes, arrays)
    return (both["params"], both["router"]), record

  def _read(self, step: int, items: dict):
    self.wait()
    folder = self._shelf.path(step)
    where = f"checkpoint {folder}"
    remedy = "move this folder away to go on from the checkpoint before"
    try:
      self._shelf.verify(step, contents=False)
      saved = self._orbax.metadata(folder).item_metadata
      for item, shapes in items.items():
        named.check_structure(where, saved[item], shapes)
      restored = self._orbax.restore(folder, args=ocp.args.Composite(
          record=ocp.args.JsonRestore(),
          **{item: ocp.args.StandardRestore(shapes)
             for item, shapes in items.items()}))
    except Refusal:
      raise
    except manifest_lib.Damaged as damaged:
      raise Refusal(f"{where} is damaged: {damaged}; {remedy}") from damaged
    except Exception as error:  # Orbax raises bare ones
      raise Refusal(f"{where} cannot be read: {_first_line(error)}; "
                    f"{remedy}") from error
    arrays = {k: v for item in items for k, v in restored[item].items()}
    record = restored["record"]
    _, sums = jax.device_get(checksum.verify(arrays))
    damaged = [name for name in sums
               if int(sums[name]) != record["checksums"][name]]
    if damaged:
      raise Refusal(f"{where} is damaged: {', '.join(damaged[:5])} not as it "
                    f"was saved; {remedy}")
    return arrays, record

  def poll(self):
    """Raises what the save under way failed of, if it has; waits for none."""
    if self._commit is not None and self._commit.done():
      self.wait()

  def wait(self):
    """Waits for the save under way and raises what went wrong in it."""
    commit, self._commit = self._commit, None
    if commit is not None:
      commit.result()

  def close(self):
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()

  def _first(self, do):
    """Calls `do` on process 0 and returns what it returns."""
    return do() if jax.process_index() == 0 else None


def _first_line(error: Exception) -> str:
  return str(error).partition("\n")[0][:300] or type(error).__name__
