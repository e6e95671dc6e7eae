"""What a run carries from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class TrainState:
  """Everything that a checkpoint has to bring back.

  Attributes:
    params: trained parameters, float32.
    opt_state: the optimizer's.
    router: thresholds of the experts; moved by balancing, not by gradients.
      Empty for a model without experts.
    step: int32, batches taken in, skipped ones included.
    rng: key of the run, untyped (uint32 [2]) so that it is saved like any
      array; whoever draws folds `step` into it.
  """
  params: Any
  opt_state: Any
  router: Any
  step: jax.Array
  rng: jax.Array


def create(variables, optimizer, rng) -> TrainState:
  """Returns the state before the first step.

  Args:
    variables: of `model.init`; collections params and, with experts, router.
    optimizer: of `optim.make`.
    rng: an untyped key, of `jax.random.PRNGKey`.
  """
  unknown = set(variables) - {"params", "router"}
  if unknown:
    raise ValueError(f"collections {sorted(unknown)} have no place in "
                     "TrainState")
  return TrainState(
      params=variables["params"],
      opt_state=optimizer.init(variables["params"]),
      router=variables["router"] if "router" in variables else {},
      step=jnp.zeros((), jnp.int32), rng=rng)
