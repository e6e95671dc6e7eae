"""Loss against tokens of variants of configs/tiny.py, many rates at a time.

python -m experiments.0001_tiny_text.lanes "w192 muon" --tokens 500000 \
    --rates 0.005,0.01 --adam 0.0025,0.005 --out lanes.jsonl

All pairs of rates train side by side under vmap on the same batches, so one
compile serves them all; meant for a GPU. Every lane has the schedule of a run
of just that many tokens.
"""
import argparse
import itertools
import json
import math
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np

from configs import tiny
from ultralong_jax import objectives, optim
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.layers import experts
from ultralong_jax.models import hybrid
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

NARROW = {"model.width": 192, "model.dense_hidden": 384, "model.experts": 16,
          "model.expert_latent": 96}
SLIM = {"model.width": 128, "model.dense_hidden": 384, "model.experts": 32,
        "model.expert_latent": 96, "model.expert_hidden": 96}
ADAMW = {"optim.name": "adamw", "batch": 2}
VARIANTS = {
    "w256 muon": {},
    "w256 adamw": ADAMW,
    "w192 muon": {**NARROW, "batch": 2},
    "w192 adamw": {**NARROW, **ADAMW},
    "w128 muon": {**SLIM, "batch": 2},
    "w128 adamw": {**SLIM, **ADAMW},
    "w128 adamw 1 row": {**SLIM, **ADAMW, "batch": 1},
}


def configure(name):
  """Returns the config of a variant."""
  c = tiny.get_config()
  for path, value in VARIANTS[name].items():
    c.update_from_flattened_dict({path: value})
  return c


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

  def optimizer(lane, params):
    config = types.SimpleNamespace(
        **{**c.optim, "lr": lane[0], "adam_lr": lane[1]})
    return optim.make(config, params, steps)

  def init(lane):
    variables = model.init(jax.random.PRNGKey(0), np.zeros((1, 1), np.int32))
    return state_lib.create(
        variables, optimizer(lane, variables["params"]), jax.random.PRNGKey(0))

  @jax.jit
  def advance(states, batches):
    def body(states, batch):
      def one(state, lane):
        step = step_lib.make_train_step(
            model, optimizer(lane, state.params), 1, "quantile")
        return step(state, batch)
      states, metrics = jax.vmap(one)(states, lanes)
      return states, metrics["loss"]
    return jax.lax.scan(body, states, batches)

  @jax.jit
  def nats_of(states, batch):
    def one(state):
      hidden_BTD, _ = model.apply(
          {"params": state.params, "router": state.router}, batch["tokens"],
          batch["segment_ids"], batch["positions"], None, method="features")
      return objectives.next_token_loss(
          hidden_BTD, state.params["w_unembed_DW"], batch["targets"],
          batch["weights"])[0]
    return jax.vmap(one)(states)

  states = jax.jit(jax.vmap(init))(lanes)
  source = data.batches(process_index=0, process_count=1)
  done = 0
  while done < steps:
    chunk = [next(source) for _ in range(min(report_every, steps - done))]
    states, _ = advance(states, jax.tree.map(lambda *x: np.stack(x), *chunk))
    done += len(chunk)
    if done % (4 * report_every) == 0 or done == steps:
      nats = sum(np.asarray(nats_of(states, batch)) for batch in held)
      counted = sum(np.sum(batch["weights"] > 0) for batch in held)
      yield done, nats / math.log(2) / counted


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("variant", choices=sorted(VARIANTS))
  parser.add_argument("--tokens", type=int, required=True)
  parser.add_argument("--rates", default="0.0025,0.005,0.01,0.02")
  parser.add_argument("--adam", default="0.0025")
  parser.add_argument("--commit", default="")
  parser.add_argument("--out", required=True, help="file to append rows to")
  args = parser.parse_args()
  commit = args.commit or subprocess.run(
      ["git", "rev-parse", "--short", "HEAD"], capture_output=True,
      text=True, check=True).stdout.strip()
  experts.resolve = lambda _: "blocks"  # a batch of ragged matmuls is slow
  c = configure(args.variant)
  lanes = [tuple(map(float, pair)) for pair in itertools.product(
      args.rates.split(","), args.adam.split(","))]
  steps = args.tokens // (c.batch * c.context)
  began = time.monotonic()
  for step, bits in train(c, jnp.asarray(lanes), steps, max(1, steps // 24)):
    print(args.variant, step, step * c.batch * c.context,
          f"{time.monotonic() - began:.0f}s",
          " ".join(f"{b:.3f}" for b in bits), flush=True)
  with open(args.out, "a", encoding="utf-8") as file:
    for (rate, adam), b in zip(lanes, bits):
      file.write(json.dumps({
          "name": f"lane {args.variant}, lr {rate:g}, adam {adam:g}, "
                  f"{steps} steps", "config": VARIANTS[args.variant],
          "commit": commit, "device": jax.devices()[0].device_kind, "seed": 0,
          "wall_seconds": None,
          "metrics": {"validation_bits_per_byte": round(float(b), 4)}}) + "\n")


if __name__ == "__main__":
  main()
