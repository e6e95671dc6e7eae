"""Optimisers and schedules: what updates a parameter follows from its name."""

import math
import re
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ultralong_jax import columns
from ultralong_jax import tree

# Parameter names ending in these go to AdamW, first match wins; the second
# column says whether weight decay applies. A leading L (layers stacked by a
# scan) is not part of a name.
VECTORS = (
    (r"w_embed_WD|w_unembed_DW", True),  # rows are tokens: no spectral norm
    (r"w_position_[A-Z]+", True),  # rows are places, likewise
    (r"w_router_\w+", True),  # scores are read one by one (top-k)
    (r"w_fusion_\w+", True),  # two logits of which one would do: rank one
    (r"prototype_ER|temperature", False),  # centres: not drawn to the origin
    (r"(\w+_)?scale(_\w+)?_[A-Z]+", False),  # norms
    (r"a_log_[A-Z]+|dt_bias_[A-Z]+|(\w+_)?bias_[A-Z]+", False),  # gates
    (r"conv(_\w+)?_[A-Z]+", False),  # depthwise: not a matrix product
    (r"query(_\w+)?_[A-Z]+", False),  # depth residuals start at zero
)

# What `optim.muon` may be: is a projection into heads a matrix a head, or one?
FORMS = ("per_head", "full_matrix")

# Muon: shape suffix of a `w_*` -> forms, (reduction axes, output axes), counted
# from the end; first match wins. Axes not named are a batch, each
# orthogonalised alone: layers, experts, and the heads of [in, head, width].
MATRICES = (
    (r"[A-Z][HG][A-Z]", ("per_head",), (-3,), (-1,)),  # into heads
    (r"[A-Z][HG][A-Z]", ("full_matrix",), (-3,), (-2, -1)),
    (r"[HG][A-Z][A-Z]", FORMS, (-3, -2), (-1,)),  # out of all heads
    (r"E?[A-Z][A-Z]", FORMS, (-2,), (-1,)),
)

# Coefficients of the Newton-Schulz polynomials c0 X + c1 (XX')X + c2 (XX')^2 X.
# The usual five equal steps leave singular values in 0.7 to 1.2; these four
# after a start scaled by the Schatten-4 norm come within 3 % of 1 (of a
# Gaussian matrix) for a fifth less work. They are the last four of optax's
# "dion" preset.
NEWTON_SCHULZ = (
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class Group(NamedTuple):
  """What updates a parameter.

  Attributes:
    optimizer: "muon" or "adamw".
    decay: whether weight decay applies.
    axes: muon's dimension numbers; None under adamw.
  """
  optimizer: str
  decay: bool
  axes: optax.contrib.MuonDimensionNumbers | None


class ScheduleState(NamedTuple):
  """Updates applied so far and the main learning rate of the last one."""
  count: jax.Array
  learning_rate: jax.Array


def group(name: str, muon: str = "per_head") -> Group:
  """Returns the group of a parameter.

  Args:
    name: such as "decoder/delta/w_q_DHK".
    muon: of `FORMS`.
  """
  leaf = name.rpartition("/")[2]
  for pattern, decay in VECTORS:
    if re.fullmatch(pattern, leaf):
      return Group("adamw", decay, None)
  stem, _, suffix = leaf.rpartition("_")
  if re.fullmatch(r"w(_[a-z0-9]+)+", stem):
    for pattern, forms, reduction, output in MATRICES:
      if muon in forms and re.fullmatch(pattern, suffix):
        axes = optax.contrib.MuonDimensionNumbers(reduction, output)
        return Group("muon", True, axes)
  raise ValueError(
      f"no optimizer group for parameter {name!r}: name a matrix w_<what>_"
      "<AXES> with axes such as DF, DHK, HVD or EDF, or add a row to "
      "optim.VECTORS (AdamW) or optim.MATRICES (Muon)")


def table(params, name: str = "muon", muon: str = "per_head") -> str:
  """Returns one line a parameter: name, shape, optimizer, decay."""
  rows = []
  for leaf_name, leaf in tree.named_leaves(params).items():
    optimizer, decay, axes = group(leaf_name, muon)
    optimizer = optimizer if name == "muon" else name
    blocks = f" {_blocks(leaf.shape, axes)}" if optimizer == "muon" else ""
    rows.append((leaf_name, "x".join(map(str, leaf.shape)),
                 optimizer + blocks, "decay" if decay else "no decay"))
  return columns.align(rows)


def _blocks(shape, axes) -> str:
  """"24 of 256x32": the matrices that are orthogonalised alone."""
  rows, columns = _matrix(shape, axes)
  return f"{math.prod(shape) // (rows * columns)} of {rows}x{columns}"


def _matrix(shape, axes) -> tuple[int, int]:
  """Size of the matrices that are orthogonalised alone."""
  return (math.prod(shape[axis] for axis in axes.reduction_axis),
          math.prod(shape[axis] for axis in axes.output_axis))


def schedule(config, steps: int) -> Callable:
  """Returns step -> learning rate of the main group.

  All start with a linear warm-up from 0. "cosine" falls to
  `final_fraction * lr` at `steps`; "wsd" stays at `lr` and falls linearly in
  the last `decay_steps`; "constant" stays.

  Args:
    config: `config.optim`.
    steps: optimiser steps of the whole run.
  """
  warmup = config.warmup_steps
  if not 0 <= warmup < steps:
    raise ValueError(f"optim.warmup_steps={warmup} must be in [0, steps), "
                     f"steps={steps}")
  final = config.lr * config.final_fraction
  stable = optax.constant_schedule(config.lr)
  pieces, borders = [], []
  if warmup:
    # Step 0 already moves: (step + 1) / warmup of the peak.
    pieces = [optax.linear_schedule(config.lr / warmup, config.lr,
                                    max(warmup - 1, 1))]
    borders = [warmup]
  if config.schedule == "cosine":
    pieces.append(optax.cosine_decay_schedule(
        config.lr, steps - warmup, alpha=config.final_fraction))
  elif config.schedule == "wsd":
    decay = config.decay_steps
    if not 0 < decay <= steps - warmup:
      raise ValueError(f"optim.decay_steps={decay} must be in (0, steps - "
                       f"warmup_steps={steps - warmup}]")
    pieces += [stable, optax.linear_schedule(config.lr, final, decay)]
    borders.append(steps - decay)
  elif config.schedule == "constant":
    pieces.append(stable)
  else:
    raise ValueError(f"optim.schedule={config.schedule!r} is none of "
                     "'cosine', 'wsd', 'constant'")
  return optax.join_schedules(pieces, borders)


def make(config, params, steps: int) -> optax.GradientTransformation:
  """Returns clip -> Muon and AdamW by parameter name -> schedule.

  Args:
    config: `config.optim`.
    params: parameters, or their shapes; every name must have a group.
    steps: optimiser steps of the whole run.
  """
  if config.name not in ("muon", "adamw"):
    raise ValueError(f"optim.name={config.name!r} is neither 'muon' nor "
                     "'adamw'")
  if config.muon not in FORMS:
    raise ValueError(f"optim.muon={config.muon!r} is neither 'per_head' nor "
                     "'full_matrix'")
  # Rates relative to the schedule's, which is the main group's.
  adam_rate = config.adam_lr / config.lr if config.name == "muon" else 1.0
  adamw = optax.chain(
      optax.scale_by_adam(config.b1, config.b2),
      optax.add_decayed_weights(config.weight_decay, _field("decay")),
      optax.scale(adam_rate))
  optimizers = _field("optimizer")(params)  # raises at an unknown name
  if config.name == "muon":
    update = optax.partition({"adamw": adamw, "muon": _muon(config)},
                             optimizers)
  else:
    update = adamw
  return optax.chain(
      optax.clip_by_global_norm(config.clip_norm), update,
      _scale_by_schedule(schedule(config, steps)))


def _field(field: str, muon: str = "per_head") -> Callable:
  """params -> that field of each one's group, whatever partition left out."""
  return lambda params: tree.map_named(
      lambda name, _: getattr(group(name, muon), field), params)


def _muon(config) -> optax.GradientTransformation:
  def scale_rms(updates, _):
    # An orthogonal m x n matrix has RMS 1 / sqrt(max(m, n)); 0.2 is the RMS
    # of AdamW's updates, so weight decay means the same to both (arXiv
    # 2502.16982).
    def scale(name, update):
      axes = group(name, config.muon).axes
      return 0.2 * max(_matrix(update.shape, axes))**0.5 * update
    return tree.map_named(scale, updates)

  return optax.chain(
      optax.contrib.scale_by_muon(
          ns_coeffs=NEWTON_SCHULZ, ns_steps=len(NEWTON_SCHULZ),
          preconditioning="schatten", beta=config.momentum,
          weight_dimension_numbers=_field("axes", config.muon)),
      optax.stateless(scale_rms),
      optax.add_decayed_weights(config.weight_decay))


def _scale_by_schedule(rate: Callable) -> optax.GradientTransformation:
  """optax's, but the rate used stays readable in the state (for logs)."""
  def init(params):
    del params
    return ScheduleState(jnp.zeros((), jnp.int32), jnp.zeros(()))

  def update(updates, state, params=None):
    del params
    learning_rate = jnp.asarray(rate(state.count), jnp.float32)
    updates = jax.tree.map(lambda u: -learning_rate * u, updates)
    return updates, ScheduleState(state.count + 1, learning_rate)

  return optax.GradientTransformation(init, update)


def restart_schedule(opt_state):
  """Returns the state with the schedule at its start, moments as they are."""
  *before, last = opt_state
  return (*before, last._replace(count=jnp.zeros_like(last.count)))


def learning_rate(opt_state):
  """Returns the main learning rate of the last update."""
  return opt_state[-1].learning_rate
