"""Loss against tokens of variants of configs/tiny.py, many rates at a time.

python -m experiments.0001_tiny_text.lanes tiny --tokens 500000 \
    --grid lr=0.002,0.004 momentum=0.9,0.95 --out lanes.jsonl

All combinations of the grid's leaves of `config.optim` train side by side under
vmap on the same batches, so one compile serves them all; meant for a GPU. Every
lane has the schedule of a run of just that many tokens.
"""
import argparse
import itertools
import time
import types

import jax
import jax.numpy as jnp
import numpy as np

from configs import tiny
from experiments import held_out, report
from ultralong_jax import optim
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.layers import experts
from ultralong_jax.models import hybrid
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

VARIANTS = {
    "tiny": {},
    "tiny, 1 row of 1024": {"batch": 1, "context": 1_024},
    "tiny, 1 row": {"batch": 1},
    "tiny, 2 heads of 64": {
        "model.heads": 2, "model.key_width": 64, "model.value_width": 64,
        "model.latent_heads": 2, "model.latent_key_width": 64,
        "model.latent_value_width": 64},
}


def configure(name):
  """Returns the config of a variant."""
  c = tiny.get_config()
  c.update_from_flattened_dict(VARIANTS[name])
  return c


def lanes_of(grid):
  """["lr=1,2", "b1=3"] -> [{"lr": 1., "b1": 3.}, {"lr": 2., "b1": 3.}]."""
  names, values = zip(*(leaf.split("=") for leaf in grid))
  values = [map(float, value.split(",")) for value in values]
  return [dict(zip(names, lane)) for lane in itertools.product(*values)]


def train(c, lanes, steps, report_every):
  """Trains all lanes; yields (step, validation bits per byte of each)."""
  tokenizer = tokenizer_lib.load("byte")
  data = loader.open_data(c.data, tokenizer, context=c.context, batch=c.batch,
                          seed=c.seed)
  held = loader.open_data(
      c.data, tokenizer, context=c.data.validation_context, batch=4,
      seed=c.seed, split="validation")
  held = list(held.batches(process_index=0, process_count=1))
  model = hybrid.Hybrid(**c.model)
  lanes = {name: jnp.asarray([lane[name] for lane in lanes])
           for name in lanes[0]}

  def optimizer(lane, params):
    return optim.make(types.SimpleNamespace(**{**c.optim, **lane}), params,
                      steps)

  def init(lane):
    variables = model.init(jax.random.PRNGKey(0), np.zeros((1, 1), np.int32))
    return state_lib.create(
        variables, optimizer(lane, variables["params"]), jax.random.PRNGKey(0))

  @jax.jit
  def advance(states, batches):
    def body(states, batch):
      def one(state, lane):
        step = step_lib.make_train_step(
            model, optimizer(lane, state.params), 1)
        return step(state, batch)
      states, metrics = jax.vmap(one)(states, lanes)
      return states, metrics["loss"]
    return jax.lax.scan(body, states, batches)

  bits_per_byte = held_out.evaluator(model)
  states = jax.jit(jax.vmap(init))(lanes)
  source = data.batches(process_index=0, process_count=1)
  done = 0
  while done < steps:
    chunk = [next(source) for _ in range(min(report_every, steps - done))]
    states, _ = advance(states, jax.tree.map(lambda *x: np.stack(x), *chunk))
    done += len(chunk)
    if done % (4 * report_every) == 0 or done == steps:
      yield done, bits_per_byte(states, held)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("variant", choices=sorted(VARIANTS))
  parser.add_argument("--tokens", type=int, required=True)
  parser.add_argument("--grid", nargs="+", required=True)
  report.add_flags(parser)
  args = parser.parse_args()
  experts.resolve = lambda _: "blocks"  # a batch of ragged matmuls is slow
  c, lanes = configure(args.variant), lanes_of(args.grid)
  steps = args.tokens // (c.batch * c.context)
  began = time.monotonic()
  for step, bits in train(c, lanes, steps, max(1, steps // 12)):
    print(args.variant, step, step * c.batch * c.context,
          f"{time.monotonic() - began:.0f}s",
          " ".join(f"{b:.3f}" for b in bits), flush=True)
  for lane, b in zip(lanes, bits):
    what = ", ".join(f"{name} {value:g}" for name, value in lane.items())
    report.append(args, f"lane {args.variant}, {what}, {steps} steps",
                  {"validation_bits_per_byte": round(float(b), 4)},
                  {**VARIANTS[args.variant],
                   **{f"optim.{name}": value for name, value in lane.items()}})


if __name__ == "__main__":
  main()
