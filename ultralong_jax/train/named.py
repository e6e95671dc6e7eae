"""A state as arrays under names, in two parts, and back: what files hold."""
import jax
import numpy as np

from ultralong_jax import tree
from ultralong_jax.train.check import Refusal

MODEL = ("params", "router")  # fields of TrainState; the others are `rest`


def flatten(values) -> dict:
  """Flattens to {name: array}."""
  # "/" would nest, and "." is what Orbax joins with.
  return {name.replace("/", ":"): leaf
          for name, leaf in tree.named_leaves(values).items()}


def split(state):
  """Returns the named leaves of (model, rest)."""
  fields = {name: getattr(state, name) for name in state.__dataclass_fields__}
  model = {name: fields.pop(name) for name in MODEL}
  return flatten(model), flatten(fields)


def join(shapes, arrays: dict):
  """Puts named arrays back into a tree of `shapes`' structure."""
  names = list(flatten(shapes))
  return jax.tree.unflatten(jax.tree.structure(shapes),
                            [arrays[name] for name in names])


def check_structure(where: str, saved, shapes: dict):
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
