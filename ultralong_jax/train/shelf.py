"""The folder of a run's checkpoints: which there are, and which may go.

  checkpoints/<step>              committed, see manifest.py
  checkpoints/<step>.saving       being written; renamed when committed
  checkpoints/<step>.deleting     being deleted
  checkpoints/abandoned/<branch>  what a rollback left behind, by step
  checkpoints/abandoned/damaged   what the run had to save once more, by step
"""
import json
import os
import pathlib
import shutil
from typing import Callable

from ultralong_jax.train import manifest as manifest_lib
from ultralong_jax.train import workdir as workdir_lib
from ultralong_jax.train.manifest import Damaged

SAVING, DELETING = ".saving", ".deleting"
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax adds it to what it writes to
ABANDONED, DAMAGED, ROLLBACK = "abandoned", "damaged", "rollback.json"


class Shelf:
  """The checkpoints in one folder, by their files alone.

  Reading never changes anything. With several processes, process 0 alone may
  call what does: open, commit, discard, set_aside, quarantine and prune.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder

  def numbers(self) -> list[int]:
    """Returns the steps that have a folder, whole or not, oldest first."""
    try:
      names = os.listdir(self.folder)
    except FileNotFoundError:
      return []
    return sorted(int(name) for name in names if name.isdecimal())

  def path(self, step: int) -> pathlib.Path:
    return self.folder / str(step)

  def saving(self, step: int) -> pathlib.Path:
    """Returns the folder that a save is written to."""
    return self.folder / f"{step}{SAVING}"

  def verify(self, step: int, contents: bool = True) -> dict | None:
    """Returns a step's manifest, or None of one of format 1.

    Raises:
      Damaged: it is no whole checkpoint, or one that a rollback abandoned.
    """
    manifest = manifest_lib.verify(self.path(step), contents)
    if manifest and manifest["step"] != step:
      raise Damaged(f"{manifest_lib.MANIFEST}: of step {manifest['step']}, "
                    f"in the folder of step {step}")
    branch = manifest["branch"] if manifest else 0
    for later, after_step in self._rollbacks().items():
      if branch <= later and step > after_step:
        raise Damaged(f"abandoned by the rollback to step {after_step}, "
                      "which a kill cut short")
    return manifest

  def steps(self) -> list[int]:
    """Returns the committed steps, oldest first; contents are not read."""
    return [step for step in self.numbers() if self._whole(step, False)]

  def newest(self, say: Callable[[str], None]) -> int | None:
    """Returns the newest step that verifies, or None; says what does not."""
    for step in reversed(self.numbers()):
      try:
        self.verify(step)
        return step
      except Damaged as damaged:
        say(f"passed over checkpoint {self.path(step)}: {damaged}")
    return None

  def branch(self) -> int:
    """Returns the number of rollbacks so far, the branch of what is saved."""
    return max(self._rollbacks(), default=-1) + 1

  def open(self):
    """Makes the folder; ends what a kill left unfinished in it."""
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in list(self.folder.iterdir()):
      if path.name.endswith(SAVING) and path.is_dir():
        self._finish(path)
      if TEMPORARY in path.name or path.name.endswith((SAVING, DELETING)):
        shutil.rmtree(path, ignore_errors=True)
    for branch, after_step in self._rollbacks().items():
      for step in self.numbers():
        if step > after_step and self._on(step, branch):
          self._move(self.path(step), self._abandoned(branch))

  def commit(self, step: int, manifest: dict):
    """Commits what is in saving(step), and gives it its name."""
    folder = self.saving(step)
    manifest_lib.commit(folder, manifest)
    os.rename(folder, self.path(step))
    manifest_lib.sync(self.folder)

  def discard(self, step: int):
    """Removes what a failed save left, which may fill the disk."""
    for path in self.folder.glob(f"{step}{SAVING}*"):
      shutil.rmtree(path, ignore_errors=True)

  def newer(self, step: int) -> list[int]:
    """Returns the whole checkpoints at `step` or after it."""
    return [n for n in self.numbers() if n >= step and self._whole(n, True)]

  def set_aside(self, step: int):
    """Moves what is damaged at `step` or after it out of the way."""
    for n in self.numbers():
      if n >= step:
        self._move(self.path(n), self.folder / ABANDONED / DAMAGED)

  def quarantine(self, after_step: int) -> list[pathlib.Path]:
    """Moves every checkpoint after a step away, and begins a branch.

    Returns:
      where they are now, oldest first.
    """
    away = self._abandoned(self.branch())
    away.mkdir(parents=True, exist_ok=True)
    # First: a kill between two moves must not bring one of them back.
    workdir_lib.write_whole(away / ROLLBACK,
                            json.dumps({"after_step": after_step}))
    for path in (away, away.parent, self.folder):
      manifest_lib.sync(path)
    return [self._move(self.path(step), away)
            for step in self.numbers() if step > after_step]

  def prune(self, keep: int):
    """Deletes what is older than the newest `keep` committed checkpoints."""
    kept = self.steps()[-keep:]
    if len(kept) == keep:
      for step in self.numbers():
        if step < kept[0]:
          # Under another name first: half of one would look damaged.
          away = self.folder / f"{step}{DELETING}"
          os.rename(self.path(step), away)
          shutil.rmtree(away)

  def _whole(self, step, contents) -> bool:
    try:
      self.verify(step, contents)
      return True
    except Damaged:
      return False

  def _finish(self, path):
    """Gives a committed save its name, if a kill came between the two."""
    name = path.name.removesuffix(SAVING)
    try:
      if manifest_lib.verify(path) and not self.path(name).exists():
        os.rename(path, self.path(name))
        manifest_lib.sync(self.folder)
    except Damaged:
      pass

  def _on(self, step, branch) -> bool:
    """Is a checkpoint of this branch or of one before it?"""
    try:
      manifest = manifest_lib.verify(self.path(step), contents=False)
      return (manifest["branch"] if manifest else 0) <= branch
    except Damaged:  # passed over where it is
      return False

  def _abandoned(self, branch: int) -> pathlib.Path:
    return self.folder / ABANDONED / str(branch)

  def _rollbacks(self) -> dict[int, int]:
    """Returns {branch: the step after which it was abandoned}."""
    found = {}
    for path in (self.folder / ABANDONED).glob(f"*/{ROLLBACK}"):
      if path.parent.name.isdecimal():
        try:
          found[int(path.parent.name)] = json.loads(
              path.read_text())["after_step"]
        except (OSError, ValueError, KeyError, TypeError):
          # Its branch is over in any case; what it held was moved already.
          found[int(path.parent.name)] = max(self.numbers(), default=0)
    return found

  def _move(self, path, folder) -> pathlib.Path:
    """Moves a checkpoint into `folder`, beside others of its step."""
    folder.mkdir(parents=True, exist_ok=True)
    target, count = folder / path.name, 1
    while target.exists():
      count += 1
      target = folder / f"{path.name}.{count}"
    os.rename(path, target)
    for changed in (folder, self.folder):
      manifest_lib.sync(changed)
    return target
