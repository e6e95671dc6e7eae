"""Tokens/s of one optimiser step of our published form on this CPU.

python -m experiments.0002_cpu_speed.ours BATCH CONTEXT [--dtype bfloat16]
    [--checkpoint FOLDER]

The shape of transformers' kimi_linear in peer.py: bounded gate, depth mix,
experts at full width, AdamW, one document a row. Or, from a checkpoint that
peer.py saved, its very function: softplus gate, plain residual.
"""
import argparse
import json
import pathlib
import resource
import time

import jax
import numpy as np

import ultralong_jax
from configs import common
from ultralong_jax import optim, sharding, tree
from ultralong_jax.models import hybrid
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib


def same_function(folder, dtype):
  """Returns the checkpoint's model and variables; its logits are ours."""
  loaded = ultralong_jax.load(folder)
  with np.load(pathlib.Path(folder) / "logits.npz") as wanted:
    got_BTW = loaded.logits(wanted["tokens"])
    np.testing.assert_allclose(got_BTW, wanted["logits"], atol=1e-4)
    print("largest difference of logits",
          float(np.abs(got_BTW - wanted["logits"]).max()), flush=True)
  return loaded.model.clone(dtype=dtype), loaded.variables


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("batch", type=int)
  parser.add_argument("context", type=int)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--devices", type=int, default=1,
                      help="CPU devices that the rows are split over")
  parser.add_argument("--steps", type=int, default=7)
  parser.add_argument("--trace", default="", help="folder for an xprof trace")
  parser.add_argument("--checkpoint", default="",
                      help="of peer.py; its logits are compared first")
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = sharding.data_mesh()
  c = common.get_config()
  c.model.expert_latent = 0
  c.model.dtype = args.dtype
  c.optim.name, c.optim.lr = "adamw", 1e-3
  model, variables = hybrid.Hybrid(**c.model), None
  if args.checkpoint:
    model, variables = same_function(args.checkpoint, args.dtype)
  tokens = np.random.default_rng(0).integers(
      3, 256, (args.batch, args.context + 1), np.int32)
  ones = np.ones((args.batch, args.context), np.int32)
  batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ones,
               positions=np.cumsum(ones, axis=1) - 1,
               weights=ones.astype(np.float32))
  if variables is None:
    variables = jax.jit(model.init, compiler_options={
        "xla_backend_optimization_level": 0})(jax.random.key(0), ones[:1, :1])
  optimizer = optim.make(c.optim, variables["params"], c.steps)
  state = state_lib.create(variables, optimizer, jax.random.PRNGKey(0))
  state = jax.device_put(state, sharding.whole(mesh))
  batch = sharding.put(batch, mesh)
  step = jax.jit(step_lib.make_train_step(model, optimizer, 1),
                 donate_argnums=0, out_shardings=sharding.whole(mesh))
  began = time.perf_counter()
  step = step.lower(state, batch).compile()
  compile_seconds = time.perf_counter() - began
  times = []
  for i in range(args.steps):
    if args.trace and i == args.steps - 2:
      jax.profiler.start_trace(args.trace)
    began = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready(state)
    times.append(time.perf_counter() - began)
  if args.trace:
    jax.profiler.stop_trace()
  seconds = sorted(times[1:])[len(times[1:]) // 2]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(json.dumps({
      "batch": args.batch, "context": args.context, "dtype": args.dtype,
      "devices": args.devices, "checkpoint": bool(args.checkpoint),
      "params": tree.count(state.params), "step_seconds": round(seconds, 4),
      "tokens_per_second": round(args.batch * args.context / seconds, 1),
      "fastest_seconds": round(min(times), 4),
      "compile_seconds": round(compile_seconds, 1),
      "peak_gib": round(peak, 2), "loss": float(metrics["loss"])}))


if __name__ == "__main__":
  main()
