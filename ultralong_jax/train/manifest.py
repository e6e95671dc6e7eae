"""What makes a folder of files a checkpoint: a manifest, and a marker last.

The manifest holds the size and SHA-256 of every file and the form and
checksum of every array; the marker holds the SHA-256 of the manifest. Each is
on the disk before the next is written, so a marker that fits says that all of
it is there. Files only: nothing here knows what writes or reads the arrays.
"""
import hashlib
import json
import os
import pathlib

FORMAT = 2  # also in the record, since format 1 has neither of these files:
MANIFEST = "manifest.json"
MARKER = "COMMITTED"
RECORD = "record/metadata"  # JSON; the one file that format 1 is known by


class Damaged(Exception):
  """A folder is no whole checkpoint; the text names a file and says why."""


def arrays(values: dict, checksums: dict) -> dict:
  """Returns what a manifest says of each array.

  Args:
    values: {name: array}.
    checksums: {name: int}.
  """
  return {name: {"dtype": str(x.dtype), "shape": list(x.shape),
                 "checksum": int(checksums[name])}
          for name, x in values.items()}


def fingerprints(record: dict) -> dict:
  """Returns hashes of the config, the data and the tokenizer of a record."""
  data = dict(record.get("data") or {})
  tokenizer = data.pop("tokenizer", None)
  return {"config": record.get("config"),
          "data": _sha256(_json(data)) if data else None,
          "tokenizer": tokenizer}


def commit(folder: pathlib.Path, manifest: dict):
  """Makes the files of `folder` a checkpoint; returns once the disk has it.

  Args:
    folder: holds all files of the checkpoint, and nothing writes to it.
    manifest: JSON values; `files` and `format` are added.
  """
  manifest = {"format": FORMAT, **manifest, "files": _files(folder)}
  text = _json(manifest, indent=1)
  # What the marker vouches for has to be on the disk before the marker is.
  for path in manifest["files"]:
    sync(folder / path)
  _write(folder / MANIFEST, text)
  for inner in [*(path for path in folder.rglob("*") if path.is_dir()),
                folder]:
    sync(inner)
  _write(folder / MARKER, f"{_sha256(text)}\n".encode())
  sync(folder)


def verify(folder: pathlib.Path, contents: bool = True) -> dict | None:
  """Returns the manifest of a whole checkpoint, None of one of format 1.

  Args:
    folder: of the checkpoint.
    contents: read and hash every file; otherwise sizes alone are compared.

  Raises:
    Damaged: this is no whole checkpoint. Files that no manifest lists are
      not looked at: a file system leaves some of its own.
  """
  if not os.path.lexists(folder / MARKER) and not os.path.lexists(
      folder / MANIFEST):
    return _format_1(folder)
  marker = _read(folder, MARKER, "the save did not finish")
  text = _read(folder, MANIFEST)
  if marker.decode(errors="replace").strip() != _sha256(text):
    raise Damaged(f"{MANIFEST}: not what {MARKER} vouches for")
  manifest = json.loads(text)
  for name, wanted in manifest["files"].items():
    path = folder / name
    try:
      size = path.stat().st_size
      if size != wanted["bytes"]:
        raise Damaged(f"{name}: {size:,} bytes instead of "
                      f"{wanted['bytes']:,}")
      if contents and _file_sha256(path) != wanted["sha256"]:
        raise Damaged(f"{name}: other contents than were written")
    except OSError as error:
      raise Damaged(f"{name}: {_reason(error)}") from error
  return manifest


def sync(path: pathlib.Path):
  """Returns once a file, or the names in a folder, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _format_1(folder):
  """Returns None if the folder can be one from before there were manifests."""
  text = _read(folder, RECORD)
  try:
    later = "format" in json.loads(text)
  except ValueError as error:
    raise Damaged(f"{RECORD}: no JSON") from error
  if later:
    raise Damaged(f"{MARKER}: missing, and {MANIFEST} too: the save did not "
                  "finish")


def _files(folder) -> dict:
  return {path.relative_to(folder).as_posix():
          {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
          for path in sorted(folder.rglob("*")) if path.is_file()}


def _file_sha256(path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder, name: str, otherwise: str = "") -> bytes:
  try:
    return (folder / name).read_bytes()
  except OSError as error:
    more = f": {otherwise}" if otherwise else ""
    raise Damaged(f"{name}: {_reason(error)}{more}") from error


def _write(path, data: bytes):
  with open(path, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _reason(error: OSError) -> str:
  return ("missing" if isinstance(error, FileNotFoundError)
          else error.strerror or str(error))


def _json(values, indent=None) -> bytes:
  return json.dumps(values, sort_keys=True, indent=indent).encode()


def _sha256(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
