"""What --mode inspect prints: a run's checkpoints, and which are whole."""
import dataclasses
import pathlib
import time

from ultralong_jax import columns
from ultralong_jax.train import manifest as manifest_lib
from ultralong_jax.train import shelf as shelf_lib
from ultralong_jax.train.check import Refusal

UNKNOWN = "-"


@dataclasses.dataclass(frozen=True)
class Row:
  """A checkpoint, as far as it can be read.

  Attributes:
    name: of its folder, below checkpoints/.
    step, tier, branch: as its manifest says, or "-".
    bytes: of all its files.
    time: UTC; of its commit, or of its folder's last change.
    state: "verified", or why not.
    verified: every file holds what was written.
    current: a resume would look at it; it is not abandoned, nor half done.
  """
  name: str
  step: str
  tier: str
  bytes: int
  time: str
  branch: str
  state: str
  verified: bool
  current: bool


def inspect(workdir) -> list[Row]:
  """Returns a row for each checkpoint of a run, the newest last.

  Reads every file and changes none; what cannot be read is a row that says
  so.
  """
  folder = pathlib.Path(workdir) / "checkpoints"
  if not folder.is_dir():
    raise Refusal(f"{folder} does not exist: nothing was saved in this run "
                  "yet")
  shelf = shelf_lib.Shelf(folder)
  away = [_row(path, folder, lambda path=path: manifest_lib.verify(path),
               "abandoned: ") for path in _away(folder)]
  half = [_row(path, folder, None, "") for path in _listed(folder)
          if path.name.startswith(tuple("0123456789"))
          and not path.name.isdecimal()]
  return [*away, *half, *(
      _row(shelf.path(step), folder, lambda step=step: shelf.verify(step), "")
      for step in shelf.numbers())]


def newest_verifies(rows: list[Row]) -> bool:
  """Does the newest checkpoint that a resume would look at verify?"""
  return next((row.verified for row in reversed(rows) if row.current), False)


def table(rows: list[Row]) -> str:
  """Returns the rows as text in columns."""
  lines = [("checkpoint", "step", "tier", "MiB", "saved", "branch", "state")]
  lines += [(row.name, row.step, row.tier, f"{row.bytes / 2**20:,.1f}",
             row.time, row.branch, row.state) for row in rows]
  return columns.align(lines, right=(1, 3))


def _row(path, folder, verify, beginning) -> Row:
  manifest, verified = {}, False
  try:
    if verify is None:
      state = "not committed"
    else:
      manifest = verify() or {}
      verified = bool(manifest)
      state = ("verified" if verified else "no manifest, of an earlier "
               "format: its checksums are compared when it is restored")
  except (manifest_lib.Damaged, OSError, ValueError, KeyError) as error:
    state = f"damaged: {error}"
  step = path.name.partition(".")[0]
  return Row(
      name=path.relative_to(folder).as_posix(),
      step=str(manifest.get("step", step)),
      tier=manifest.get("tier", UNKNOWN),
      bytes=_bytes(path), time=manifest.get("time") or _changed(path),
      branch=str(manifest.get("branch", UNKNOWN)), state=beginning + state,
      verified=verified, current=path.parent == folder and verify is not None)


def _away(folder):
  """Yields what was moved to checkpoints/abandoned/*/."""
  for branch in _listed(folder / shelf_lib.ABANDONED):
    yield from (path for path in _listed(branch) if path.is_dir())


def _listed(folder) -> list[pathlib.Path]:
  """Returns what is in a folder, by number; nothing if it cannot be read."""
  try:
    return sorted(folder.iterdir(), key=lambda path: (len(path.name),
                                                      path.name))
  except OSError:
    return []


def _bytes(path) -> int:
  total = 0
  for inner in path.rglob("*"):
    try:
      if inner.is_file():
        total += inner.stat().st_size
    except OSError:  # it is going away, or cannot be read: the state says so
      pass
  return total


def _changed(path) -> str:
  try:
    seconds = path.stat().st_mtime
  except OSError:
    return UNKNOWN
  return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
