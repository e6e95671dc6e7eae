"""A run's folder: config.json, and who may go on in it."""
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import textwrap

from ml_collections import ConfigDict

from ultralong_jax.data import synthetic
from ultralong_jax.evaluate import recall
from ultralong_jax.layers import balance
from ultralong_jax.models import hybrid
from ultralong_jax.train.check import Refusal

# What may differ between two halves of one run: none of it changes what is
# computed. (data.path may move; the data's own fingerprint is compared.)
HARMLESS = ("log", "checkpoint", "evaluate", "data.path", "model.remat",
            "model.implementation")
# What runs had before there were stages.
STAGELESS = {"batch_tokens": 0, "total_tokens": 0, "flat_evaluations": 0,
             "flat_fall": 0.0, "stage_order": "", "stages": {}}
NO_LEAVES = ("parent", "name", "training")  # fields of Hybrid that are none


def config_file(workdir) -> pathlib.Path:
  return pathlib.Path(workdir) / "config.json"


def write_config(workdir, config):
  """Writes WORKDIR/config.json, whole or not at all."""
  path = config_file(workdir)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, json.dumps(config.to_dict(), indent=2) + "\n")


def read_config(workdir) -> ConfigDict:
  """Returns the config that a run was started with, from its JSON alone.

  A leaf of `model` that did not exist then is set to Hybrid's default, which
  is what the run had.
  """
  path = config_file(workdir)
  if not path.exists():
    raise Refusal(
        f"{path} does not exist: {workdir} is not the folder of a run; start "
        "one with --config and --workdir")
  return ConfigDict(_as_now(json.loads(path.read_text()))).lock()


def _as_now(config: dict) -> dict:
  """Returns an earlier run's config with the leaves that there are now.

  What did not exist then is set to Hybrid's default, which is what the run had.
  """
  model = config["model"]
  if isinstance(model["latent_gate"], bool):
    model["latent_gate"] = "output" if model["latent_gate"] else "none"
  if isinstance(config["balance"], str):  # two forms, and no numbers
    model["balance"] = config["balance"]
    config["balance"] = balance.Settings()._asdict()
  for field in dataclasses.fields(hybrid.Hybrid):
    if (field.default is not dataclasses.MISSING
        and field.name not in NO_LEAVES):
      model.setdefault(field.name, field.default)
  config.setdefault("mtp_weight", 0.3)  # not read by those runs
  for name, default in STAGELESS.items():
    config.setdefault(name, default)
  config["optim"].setdefault("muon", "per_head")
  config["data"].setdefault("synthetic", synthetic.defaults())  # nor these
  evaluate = config["evaluate"] = {**recall.defaults(), **config["evaluate"]}
  for name in ("recall_lengths", "recall_depths"):
    evaluate[name] = tuple(evaluate[name])  # JSON has lists alone
  return config


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


def serious(config) -> dict:
  """Returns the leaves that decide what is computed."""
  return {name: value for name, value in leaves(config).items()
          if not any(name == h or name.startswith(h + ".") for h in HARMLESS)}


def differences(saved, current, parts=("",)) -> list[str]:
  """Returns one line for each leaf that decides and differs.

  Args:
    saved: the config that is there.
    current: the config that is wanted.
    parts: beginnings of the leaves to compare; "" compares all.
  """
  saved, current = serious(saved), serious(current)
  lines = []
  for name in saved | current:
    if not name.startswith(tuple(parts)):
      continue
    old, new = (repr(c[name]) if name in c else "absent"
                for c in (saved, current))
    if old != new:
      lines.append(f"{name}: {old} there, {new} here")
  return lines


def config_hash(config) -> str:
  """Returns a hash of the leaves that decide what is computed."""
  text = json.dumps(serious(config), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def summary(config) -> str:
  """Returns in a few lines what differs from the base of the configs."""
  # The config file has imported it; it is no part of the library.
  base = sys.modules.get("configs.common")
  if base is None:
    return "config: as the run was started with"
  base = leaves(base.get_config())
  items = [f"{name}={value}" for name, value in leaves(config).items()
           if name not in base or base[name] != value]
  return textwrap.fill("config: " + (" ".join(items) or "as in the base"),
                       80, subsequent_indent="  ", break_on_hyphens=False)


def adopt(workdir, config, allow_change: bool):
  """Refuses a folder of another config; otherwise leaves `config` in it."""
  if config_file(workdir).exists():
    lines = differences(read_config(workdir), config)
    if lines and not allow_change:
      raise Refusal(
          f"{workdir} belongs to a run of another config:\n  "
          + "\n  ".join(lines)
          + "\ntake another --workdir, or go on in this one with "
          "--allow_config_change")
  write_config(workdir, config)
