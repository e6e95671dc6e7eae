"""A run's folder: config.json, and who may go on in it."""
import hashlib
import json
import os
import pathlib

from ml_collections import ConfigDict

# What may differ between two halves of one run: none of it changes what is
# computed. (data.path may move; the data's own fingerprint is compared.)
HARMLESS = ("log", "checkpoint", "evaluate", "data.path", "model.remat",
            "model.implementation")


def config_file(workdir) -> pathlib.Path:
  return pathlib.Path(workdir) / "config.json"


def write_config(workdir, config):
  """Writes WORKDIR/config.json, whole or not at all."""
  path = config_file(workdir)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, json.dumps(config.to_dict(), indent=2) + "\n")


def read_config(workdir) -> ConfigDict:
  """Returns the config that a run was started with, from its JSON alone."""
  path = config_file(workdir)
  if not path.exists():
    raise FileNotFoundError(
        f"{path} does not exist: {workdir} is not the folder of a run; start "
        "one with --config and --workdir")
  return ConfigDict(json.loads(path.read_text())).lock()


def write_whole(path: pathlib.Path, text: str):
  """Replaces a file in one step: a kill leaves the old one or the new one."""
  half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  with open(half, "w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(half, path)


def leaves(config, prefix="") -> dict:
  """Returns {"model.heads": 4, ...} in the config's order."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      flat |= leaves(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat


def differences(saved, current, harmless=HARMLESS) -> list[str]:
  """Returns one line for each leaf that matters and differs."""
  saved, current = leaves(saved), leaves(current)
  lines = []
  for name in saved | current:
    if any(name == h or name.startswith(h + ".") for h in harmless):
      continue
    old, new = (repr(c[name]) if name in c else "absent"
                for c in (saved, current))
    if old != new:
      lines.append(f"{name}: {old} there, {new} here")
  return lines


def config_hash(config) -> str:
  """Returns a hash of the leaves that matter."""
  kept = [line for line in differences(ConfigDict(), config)]
  return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()


def adopt(workdir, config, allow_change: bool):
  """Refuses a folder of another config; otherwise leaves `config` in it."""
  if config_file(workdir).exists():
    lines = differences(read_config(workdir), config)
    if lines and not allow_change:
      raise ValueError(
          f"{workdir} belongs to a run of another config:\n  "
          + "\n  ".join(lines)
          + "\ntake another --workdir, or go on in this one with "
          "--allow_config_change")
  write_config(workdir, config)
