"""Tokens per second of whole training steps of our model on one GPU.

python -m experiments.0003_hopper_kda.step_ours FORM --out rows.jsonl

Random tokens, one document a row, AdamW, bfloat16 compute, float32 parameters
and moments; host dispatch included. FORMS says what each one is.
"""
import argparse
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from experiments import report
from ultralong_jax import optim, tree
from ultralong_jax.models import hybrid
from ultralong_jax.train import flops
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

# FLA's KDAConfig(hidden_size=1024, num_heads=8, head_dim=128,
# num_hidden_layers=24, vocab_size=32000): plain residuals and SwiGLU.
PEER = dict(
    vocab=32_000, width=1_024, layers=24, pattern="d", heads=8, key_width=128,
    value_width=128, gate_rank=128, dense_layers=24, dense_hidden=2_816,
    glu="swiglu", depth="residual", dtype="bfloat16")
LATENT = dict(latent_heads=8, latent_key_width=128, latent_shared_width=64,
              latent_value_width=128, latent_rank=512)
PUBLISHED = dict(PEER, glu="situ", depth="block_attention", block_layers=12)
# name -> (rows, tokens in one, leaves of `model`)
FORMS = {
    "peer": (4, 8_192, PEER),
    "peer, layers recomputed": (4, 8_192, dict(PEER, remat="layer")),
    "published forms": (4, 8_192, PUBLISHED),
    "dddm": (4, 8_192, dict(PEER, pattern="dddm", **LATENT)),
    "dddm 64K": (1, 65_536, dict(PEER, pattern="dddm", **LATENT)),
    "peer 64K": (1, 65_536, PEER),
}
WARM, TIMED = 3, 8


def batch_of(rows, time_, vocab):
  """Random tokens and their next ones, as the loader gives them."""
  tokens = np.random.default_rng(0).integers(
      0, vocab, (rows, time_ + 1), np.int32)
  ones = np.ones((rows, time_), np.int32)
  return jax.device_put(dict(
      tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ones,
      positions=np.tile(np.arange(time_, dtype=np.int32), (rows, 1)),
      weights=ones.astype(np.float32)))


def run(rows, time_, leaves):
  """Returns the metrics of one form."""
  c = common.get_config()
  c.model.update(leaves)
  c.optim.update(dict(name="adamw", lr=1e-4, schedule="constant"))
  model = hybrid.Hybrid(**c.model)

  def init(rng):
    return model.init(rng, jnp.zeros((1, 1), jnp.int32))

  rng = jax.random.PRNGKey(0)
  shapes = jax.eval_shape(init, rng)
  optimizer = optim.make(c.optim, shapes["params"], 1_000)
  state = jax.jit(lambda rng: state_lib.create(init(rng), optimizer, rng))(rng)
  batch = batch_of(rows, time_, c.model.vocab)
  step = jax.jit(step_lib.make_train_step(model, optimizer, 1),
                 donate_argnums=0)
  began = time.perf_counter()
  step = step.lower(state, batch).compile()
  compiled = time.perf_counter() - began
  memory = step.memory_analysis()
  seconds = []
  for _ in range(WARM + TIMED):
    began = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    seconds.append(time.perf_counter() - began)
  median = float(np.median(seconds[WARM:]))
  rate = rows * time_ / median
  count = tree.count(shapes["params"])
  peak = flops.peak(jax.devices()[0])
  out = {
      "parameters": count, "tokens_per_second": rate, "step_ms": 1e3 * median,
      # What is live at once, by XLA's own plan of the step.
      "peak_gib": (memory.temp_size_in_bytes + memory.argument_size_in_bytes
                   + memory.output_size_in_bytes
                   - memory.alias_size_in_bytes) / 2**30,
      "compile_seconds": compiled, "loss": float(metrics["loss"])}
  if peak:
    out["utilisation_6nd"] = 6 * count * rate / peak
    out["utilisation"] = rate / peak * flops.train_per_token(
        model, shapes["params"], time_, 0)
  if not math.isfinite(out["loss"]):
    raise FloatingPointError(f"loss {out['loss']}")
  return {name: float(f"{x:.5g}") for name, x in out.items()}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("form", choices=FORMS)
  report.add_flags(parser)
  args = parser.parse_args()
  rows, time_, leaves = FORMS[args.form]
  report.append(args, f"ours, {args.form}", run(*FORMS[args.form]),
                {"rows": rows, "context": time_, **leaves})


if __name__ == "__main__":
  main()
