"""Our linear cross-entropy beside tokamax's: loss and both gradients.

python -m experiments.0005_loss.sweep --out results.jsonl
"""
import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import tokamax

from experiments import report
from ultralong_jax import objectives

# Rows, tokens a row, width, vocabulary.
SHAPES = {"cpu": [(4, 512, 256, 272), (2, 1024, 256, 32_000)],
          "gpu": [(4, 8_192, 1_024, 32_000), (1, 8_192, 2_304, 163_840)]}


def ours(hidden_BTD, w_DW, targets_BT, weights_BT):
  return objectives.next_token_loss(hidden_BTD, w_DW, targets_BT,
                                    weights_BT)[0]


def tokamax_loss(implementation):
  def loss(hidden_BTD, w_DW, targets_BT, weights_BT):
    nats_X = tokamax.linear_softmax_cross_entropy_loss(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), targets_BT.reshape(-1),
        w_DW.astype(hidden_BTD.dtype), reduction="none",
        implementation=implementation)
    return jnp.sum(nats_X * weights_BT.reshape(-1))
  return loss


LOSSES = {"ours": ours, "tokamax xla": tokamax_loss("xla"),
          "tokamax chunked_xla": tokamax_loss("chunked_xla")}


def measure(loss, arrays, calls):
  """Returns milliseconds a call, and MiB of temporary memory."""
  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  step = step.lower(*arrays).compile()
  jax.block_until_ready(step(*arrays))
  times = []
  for _ in range(calls):
    began = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    times.append(time.perf_counter() - began)
  memory = step.memory_analysis().temp_size_in_bytes
  return float(np.median(times)) * 1e3, memory / 2**20


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--calls", type=int, default=15)
  report.add_flags(parser)
  args = parser.parse_args()
  backend = jax.default_backend()
  dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
  for rows, tokens, width, vocabulary in SHAPES[backend]:
    rng = np.random.default_rng(0)
    arrays = (
        jnp.asarray(rng.normal(size=(rows, tokens, width)), dtype),
        jnp.asarray(rng.normal(size=(width, vocabulary)) * 0.02, jnp.float32),
        jnp.asarray(rng.integers(0, vocabulary, (rows, tokens)), jnp.int32),
        jnp.ones((rows, tokens), jnp.float32))
    for name, loss in LOSSES.items():
      ms, mib = measure(loss, arrays, args.calls)
      report.append(
          args, f"{name}, {rows}x{tokens}, width {width}, vocabulary "
          f"{vocabulary}, {jnp.dtype(dtype).name}",
          {"ms": round(ms, 3), "temporary_mib": round(mib, 1)})


if __name__ == "__main__":
  main()
