"""Stages of a run: one config each, and where in them a run stands.

A stage is the run's config with the leaves that `stages.<name>` gives. It may
change what is read and how it is descended, but no parameter and no moment:
those are carried from stage to stage.
"""
import difflib
import re
from typing import NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from ultralong_jax import columns
from ultralong_jax import tree
from ultralong_jax.models import hybrid
from ultralong_jax.train import check as check_lib
from ultralong_jax.train import flops
from ultralong_jax.train import step as step_lib
from ultralong_jax.train import workdir as workdir_lib
from ultralong_jax.train.check import Refusal

# Leaves in which stages may differ.
MAY_DIFFER = (
    r"context|batch|accumulate|steps|batch_tokens|total_tokens|mtp_weight"
    r"|flat_(evaluations|fall)"
    r"|data\.(?!tokenizer$).+|balance\..+|evaluate\..+"
    r"|checkpoint\.every_steps"
    r"|optim\.(?!name$|muon$).+"
    r"|model\.(rope_.+|remat|router_noise|capacity_factor|implementation)")


class Stage(NamedTuple):
  """A stage of a run.

  Attributes:
    name: its key in `stages`; "" for a run that has none.
    config: the run's config as it is in this stage, without stages.
  """
  name: str
  config: ConfigDict


def resolve(config) -> list[Stage]:
  """Returns the stages of a run, in their order; at least one.

  Raises:
    Refusal: a stage is not in the order, or has a leaf that does not exist,
      may not differ or is of another type.
  """
  order = [name for name in config.stage_order.split(",") if name]
  errors = [f'stages.{name}: is not in stage_order="{config.stage_order}"; '
            "add it there or drop it"
            for name in config.stages if name not in order]
  errors += [f'stage_order: "{name}" is not in stages; known: '
             f'{", ".join(config.stages) or "none"}'
             for name in order if name not in config.stages]
  errors += [f'stage_order: "{name}" occurs twice; name its second time '
             "differently" for name in sorted(set(order))
             if order.count(name) > 1]
  base = ConfigDict(config.to_dict())
  base.stage_order, base.stages = "", ConfigDict()
  known = workdir_lib.leaves(base)
  result = []
  for name in order if not errors else ():
    leaves = workdir_lib.leaves(config.stages[name])
    own = ConfigDict(base.to_dict())
    for leaf, value in leaves.items():
      where = f"stages.{name}.{leaf}={value!r}"
      if leaf not in known:
        close = difflib.get_close_matches(leaf, known, 1)
        errors.append(f"{where}: no such leaf" + (
            f'; did you mean "{close[0]}"?' if close else ""))
      elif not re.fullmatch(MAY_DIFFER, leaf):
        errors.append(f"{where}: has to be the same in all stages; set {leaf} "
                      "itself")
      else:
        try:
          own.update_from_flattened_dict({leaf: value})
        except TypeError:
          errors.append(f"{where}: is of another type than {known[leaf]!r}")
    result.append(Stage(name, own))
  if not order and not errors:
    result = [Stage("", base)]
  for stage in result:
    errors += _sizes(stage)
  if errors:
    raise Refusal("these stages cannot run:\n  " + "\n  ".join(errors))
  return [Stage(name, own.lock()) for name, own in result]


def _sizes(stage: Stage):
  """Turns counts of tokens into rows and steps; yields what does not fit."""
  c, prefix = stage.config, f"stages.{stage.name}." if stage.name else ""
  if c.batch_tokens:
    if c.batch_tokens % c.context:
      yield (f"{prefix}batch_tokens={c.batch_tokens} is no multiple of context="
             f"{c.context}; set {-(-c.batch_tokens // c.context) * c.context}")
      return
    c.batch = c.batch_tokens // c.context
  if c.total_tokens:
    c.steps = -(-c.total_tokens // (c.batch * c.context))


def check(plan: list[Stage], vocab: int, devices: int, processes: int):
  """Raises one Refusal of all that is wrong in any stage."""
  errors = []
  for stage in plan:
    try:
      check_lib.check(stage.config, vocab, devices, processes)
    except Refusal as refusal:
      errors.append(f"stage {stage.name}: {refusal}" if stage.name
                    else str(refusal))
    c = stage.config
    if c.flat_evaluations and not c.evaluate.every_steps:
      errors.append(f"flat_evaluations={c.flat_evaluations} waits for "
                    "evaluations, and evaluate.every_steps=0 makes none; set "
                    "it")
  if errors:
    raise Refusal("\n".join(errors))


def start(plan: list[Stage]) -> dict:
  """Returns the record of a run that has not begun."""
  return {"train_seconds": 0., **_enter(plan[0])}


def _enter(stage: Stage) -> dict:
  return {"stage": stage.name, "stage_steps": 0, "position": 0, "skipped": [],
          "losses": [], "evaluated": None, "data": None}


def follow(plan: list[Stage], record: dict, step: int) -> dict:
  """Returns a checkpoint's record with what its run did not have yet.

  Args:
    plan: stages of the run as it is now.
    record: of `Checkpoints.restore`.
    step: of the checkpoint; a run of before there were stages is all in one.
  """
  record = {**_enter(plan[0]), "stage_steps": step, "evaluated": step,
            **record}
  names = [stage.name for stage in plan]
  if record["stage"] not in names:
    raise Refusal(
        f'the checkpoint is of stage "{record["stage"]}", step '
        f"{record['stage_steps']} in it, which is none of {names}; leave its "
        "stage in stage_order")
  return record


def remaining(plan: list[Stage], record: dict) -> list[tuple[Stage, dict]]:
  """Returns the stages to come, and with what record each begins.

  The first is the one that the record is in, unless it is over and there is
  another.
  """
  number = [stage.name for stage in plan].index(record["stage"])
  coming = [(stage, _enter(stage)) for stage in plan[number + 1:]]
  if is_over(plan[number], record) and coming:
    return coming
  return [(plan[number], record), *coming]


def is_over(stage: Stage, record: dict) -> bool:
  """Whether a stage has had its steps, or has flattened before."""
  return record["stage_steps"] >= stage.config.steps or is_flat(
      record["losses"], stage.config)


def is_flat(losses: list[float], c) -> bool:
  """Whether the latest validation losses have stopped to fall.

  Args:
    losses: nats a token, oldest first, of evaluations at equal distances.
    c: flat_evaluations, how many of them count; 0: never flat. flat_fall,
      nats an evaluation that a line through them has to fall by.
  """
  if not c.flat_evaluations or len(losses) < c.flat_evaluations:
    return False
  latest = np.asarray(losses[-c.flat_evaluations:])
  slope = np.polyfit(np.arange(len(latest)), latest, 1)[0]
  return bool(-slope < c.flat_fall)


def batch_shapes(data, rows: int, sharding=None) -> dict:
  """Returns the arrays of that many rows of data as ShapeDtypeStructs."""
  return {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype,
                                     sharding=sharding)
          for name, x in data.row(0).items()}


def table(plan: list[Stage], data: dict, shapes, devices: int) -> str:
  """Returns what each stage will take, a line each, before anything runs.

  Args:
    plan: the stages.
    data: name -> training data.
    shapes: TrainState as ShapeDtypeStructs.
    devices: among which the rows are split.
  """
  rows = [("stage", "context", "batch", "steps", "tokens", "PFLOP",
           "state MiB", "saved MiB")]
  # Gradients have the size of the parameters.
  held = tree.size_bytes(shapes) + tree.size_bytes(shapes.params)
  for name, c in plan:
    model = hybrid.Hybrid(**c.model)
    tokens = c.steps * c.batch * c.context
    each = flops.train_per_token(model, shapes.params, c.context,
                                 c.data.patches)
    part = batch_shapes(data[name], c.batch // c.accumulate // devices)
    saved = step_lib.saved_bytes(model, shapes.params, shapes.router, part,
                                 c.mtp_weight if model.mtp else 0.)
    rows.append((name, f"{c.context:,}", f"{c.batch:,}", f"{c.steps:,}",
                 f"{tokens:,}", f"{tokens * each / 1e15:,.2f}",
                 f"{held / 2**20:,.0f}", f"{saved / 2**20:,.0f}"))
  return columns.align(rows, right=range(len(rows[0]))) + (
      "\nstate: parameters, moments and gradients on a device; saved: what a "
      "forward pass leaves\nto the backward pass there")
