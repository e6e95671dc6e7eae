"""Milliseconds a decoded token after short and long texts.

python -m experiments.0006_decode_cost.sweep --out results.jsonl

The state's capacity is the same for all, so only what came before differs.
"""
import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from configs import tiny
from experiments import report
from ultralong_jax.models import hybrid
from ultralong_jax.serve import decode

CAPACITY = 16_384
BEFORE = (64, 1_024, 4_096, 16_000)
TOKENS = 64


def main():
  parser = argparse.ArgumentParser()
  report.add_flags(parser)
  args = parser.parse_args()
  for pattern in ("d", "m", "dddm"):
    c = tiny.get_config()
    c.model.pattern = pattern
    model = hybrid.Hybrid(**c.model)
    variables = jax.jit(model.init)(jax.random.key(0),
                                    np.zeros((1, 1), np.int32))
    for before in BEFORE:
      state = jax.tree.map(jnp.copy, hybrid.empty_state(model, 1, CAPACITY))
      text = np.random.default_rng(0).integers(3, 256, before).tolist()
      _, state = decode.prefill(model, variables, [text], state)
      times = []
      for _ in range(TOKENS):
        began = time.perf_counter()
        logits_BW, state = decode.step(
            model, variables, np.full(1, 65, np.int32), np.ones(1, bool),
            state)
        jax.block_until_ready(logits_BW)
        times.append(time.perf_counter() - began)
      report.append(
          args, f"pattern {pattern}, after {before} tokens",
          {"median_ms": round(float(np.median(times)) * 1e3, 3),
           "least_ms": round(min(times) * 1e3, 3)},
          {"model.pattern": pattern})


if __name__ == "__main__":
  main()
