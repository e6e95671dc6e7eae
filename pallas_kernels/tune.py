"""Measures the block sizes of an op on this device and writes tuned/.

python -m pallas_kernels.tune kda [--shapes 1x8192x32x128x128,...]
"""
import argparse
import dataclasses
import datetime
import functools
import json
import subprocess
import time

import jax
import jax.numpy as jnp

from pallas_kernels.kda import triton, triton_config

DEFAULT = "1x8192x32x128x128,1x32768x32x128x128,8x4096x32x128x128"
FLOOR = -5.0


def milliseconds(function, *args, calls=10):
  """Median of five batches of calls, back to back."""
  jax.block_until_ready(function(*args))
  times = []
  for _ in range(5):
    start = time.perf_counter()
    for _ in range(calls):
      out = function(*args)
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / calls * 1e3)
  return sorted(times)[2]


def gradients(config, scale, tokens, gate, do):
  """Forward and backward pass of one call with given blocks."""
  def outputs(tokens, gate):
    return triton.kda(
        *tokens, a_log=gate[0], dt_bias=gate[1], floor=FLOOR,
        normalize_qk=True, sigmoid_beta=True, scale=scale, initial_state=None,
        segment_ids=None, config=config)[0]
  o, pull = jax.vjp(outputs, tokens, gate)
  return o, pull(do)


def tune_kda(batch, length, heads, key, value):
  """Returns the fastest config of a shape, and its milliseconds.

  One kernel after the other, each with the best blocks of those before it.
  """
  keys = jax.random.split(jax.random.key(0), 6)
  widths = (key, key, value, key)
  tokens = tuple(
      jax.random.normal(keys[i], (batch, length, heads, width), jnp.bfloat16)
      for i, width in enumerate(widths))
  tokens += (jax.random.normal(keys[4], (batch, length, heads), jnp.bfloat16),)
  gate = jnp.zeros(heads), jnp.zeros((heads, key))
  do = jax.random.normal(keys[5], tokens[2].shape, jnp.bfloat16)
  best, least = triton_config.heuristic(
      key, value, "bfloat16",
      triton_config.capability_of(jax.devices()[0])), None
  for stage in triton_config.candidates():
    for blocks in stage:
      config = dataclasses.replace(best, **blocks)
      run = jax.jit(functools.partial(gradients, config, key**-0.5))
      try:
        took = milliseconds(run, tokens, gate, do)
      except jax.errors.JaxRuntimeError as error:
        print(blocks, "does not fit:", str(error)[:100])
        continue
      print(blocks, f"{took:.3f} ms", flush=True)
      if least is None or took < least:
        chosen, least = config, took
    best = chosen
  return best, least


def main(argv=None):
  """Tunes the shapes asked for and keeps the other rows of the file."""
  parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune")
  parser.add_argument("op", choices=["kda"])
  parser.add_argument("--shapes", default=DEFAULT,
                      help="BxTxHxKxV, comma separated")
  flags = parser.parse_args(argv)
  device = jax.devices()[0].device_kind
  path = triton_config.path(device)
  rows = dict(triton_config.read(device))
  commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"],
                          capture_output=True, text=True).stdout.strip()
  for shape in flags.shapes.split(","):
    sizes = tuple(map(int, shape.split("x")))
    config, least = tune_kda(*sizes)
    rows[triton_config.key(*sizes, "bfloat16")] = dict(
        config=dataclasses.asdict(config),
        microseconds=round(least * 1e3, 1), commit=commit,
        date=datetime.date.today().isoformat())
    path.write_text(json.dumps({"kda": rows}, indent=1) + "\n")


if __name__ == "__main__":
  main()
