"""Milliseconds a decoded token after short and long texts.

python -m experiments.0006_decode_cost.sweep --out results.jsonl

The state's capacity is the same for all, so only what came before differs.
"""
import argparse
import json
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from configs import tiny
from ultralong_jax.models import hybrid
from ultralong_jax.serve import decode

CAPACITY = 16_384
BEFORE = (64, 1_024, 4_096, 16_000)
TOKENS = 64


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--commit", default="")
  parser.add_argument("--out", required=True, help="file to append rows to")
  args = parser.parse_args()
  commit = args.commit or subprocess.run(
      ["git", "rev-parse", "--short", "HEAD"], capture_output=True,
      text=True, check=True).stdout.strip()
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
      row = {"name": f"pattern {pattern}, after {before} tokens",
             "config": {"model.pattern": pattern}, "commit": commit, "seed": 0,
             "device": jax.devices()[0].device_kind, "wall_seconds": None,
             "metrics": {"median_ms": round(float(np.median(times)) * 1e3, 3),
                         "least_ms": round(min(times) * 1e3, 3)}}
      print(json.dumps(row), flush=True)
      with open(args.out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main()
