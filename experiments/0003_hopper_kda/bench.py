r"""Kimi delta attention on one GPU: ours, plain JAX and two torch packages.

python -m experiments.0003_hopper_kda.bench --out rows.jsonl \
    fla cudnn ceilings stages ours packed xla decode conv accuracy

flash-linear-attention tunes its kernels in its first call, for a minute or two.

Same sizes and distributions for all, one process, medians. Ours is timed as a
JAX user sees it: jitted, back to back, host dispatch included. Each section
stands alone and a failing one is reported and passed over.
"""
import argparse
import concurrent.futures
import functools
import importlib
import os
import tempfile
import time
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments import report  # noqa: E402
from pallas_kernels.kda import (  # noqa: E402
    step, triton, triton_config, xla)

accuracy = importlib.import_module("experiments.0003_hopper_kda.accuracy")
peers = importlib.import_module("experiments.0003_hopper_kda.peers")

SHAPES = ((1, 8192, 32), (1, 32768, 32), (8, 4096, 32), (1, 131072, 16))
WIDTH = 128
FLOOR = -5.0


def options(heads, width=WIDTH, value=WIDTH, batch=1):
  return dict(floor=FLOOR, normalize_qk=True, sigmoid_beta=True,
              scale=width**-0.5, segment_ids=None)


def draw(seed, batch, time_, heads, key=WIDTH, value=WIDTH, groups=None,
         dtype=jnp.bfloat16):
  """Random inputs: tokens, gate, first state, cotangents."""
  groups = groups or heads
  shapes = dict(
      q=(batch, time_, heads, key), k=(batch, time_, heads, key),
      v=(batch, time_, groups, value), decay=(batch, time_, groups, key),
      beta=(batch, time_, groups), do=(batch, time_, groups, value))
  keys = jax.random.split(jax.random.key(seed), len(shapes) + 4)
  out = {name: jax.random.normal(key, shape, dtype)
         for key, (name, shape) in zip(keys, shapes.items())}
  out["a_log"] = 0.3 * jax.random.normal(keys[-1], (groups,))
  out["dt_bias"] = jax.random.normal(keys[-2], (groups, key))
  out["initial_state"] = jax.random.normal(keys[-3],
                                           (batch, groups, key, value))
  out["ds"] = jax.random.normal(keys[-4], (batch, groups, key, value))
  return out


ARRAYS = ("q", "k", "v", "decay", "beta", "a_log", "dt_bias", "initial_state")


def value_and_grads(function, x, static, names=ARRAYS):
  """Outputs and the gradients of sum(o do) + sum(s ds)."""
  def outputs(arrays):
    arrays = {**{n: None for n in ARRAYS}, **arrays}
    tokens = [arrays.pop(n) for n in ("q", "k", "v", "decay", "beta")]
    return function(*tokens, **arrays, **static)

  arrays = {n: x[n] for n in names}
  (o, s), pull = jax.vjp(outputs, arrays)
  return dict(o=o, s=s, **pull((x["do"].astype(o.dtype), x["ds"]))[0])


def documents(seed, batch, time_, count, padding):
  """Segment ids of `count` documents a row, with trailing padding."""
  rng = np.random.default_rng(seed)
  ids = np.zeros((batch, time_), np.int32)
  for row in ids:
    cuts = np.sort(rng.choice(np.arange(1, time_ - padding), count - 1, False))
    row[:] = 1 + np.searchsorted(cuts, np.arange(time_), side="right")
    row[time_ - padding:] = 0
  return jnp.asarray(ids)


def starts(count=25):
  """Where the documents of the packed row begin, and its end."""
  ids = np.asarray(documents(1, *SHAPES[0][:2], count, 0))[0]
  return [0, *(1 + np.flatnonzero(np.diff(ids))).tolist(), len(ids)]


def clock(function, *args, budget=0.6):
  """Median milliseconds of a call: batches of calls, back to back."""
  jax.block_until_ready(function(*args))
  start = time.perf_counter()
  jax.block_until_ready(function(*args))
  calls = max(3, min(50, int(budget / 5 / (time.perf_counter() - start))))
  times = []
  for _ in range(5):
    start = time.perf_counter()
    for _ in range(calls):
      out = function(*args)
    jax.block_until_ready(out)
    times.append((time.perf_counter() - start) / calls * 1e3)
  return float(np.median(times))


def timed(record, section, function, shapes, packed=0):
  """Times a function at some shapes, `packed` documents a row if not 0."""
  for b, t, h in shapes:
    x = draw(0, b, t, h)
    x["a_log"] = jnp.zeros(h)
    names = tuple(n for n in ARRAYS if n != "initial_state")
    tokens = {n: x[n] for n in names}
    static = options(h)
    if packed:
      static["segment_ids"] = documents(1, b, t, packed, 0)
    forward = jax.jit(lambda a: function(
        *[a[n] for n in ("q", "k", "v", "decay", "beta")], a_log=a["a_log"],
        dt_bias=a["dt_bias"], initial_state=None, **static))
    row = dict(section=section, B=b, T=t, H=h, K=WIDTH, V=WIDTH,
               **({"documents": packed} if packed else {}))
    try:
      row["forward_ms"] = clock(forward, tokens)
      both = jax.jit(lambda a, do: value_and_grads_no_state(
          function, a, do, static, names))
      row["both_ms"] = clock(both, tokens, x["do"])
      stats = both.lower(tokens, x["do"]).compile().memory_analysis()
      row["peak_gib"] = (
          stats.temp_size_in_bytes + stats.argument_size_in_bytes
          + stats.output_size_in_bytes) / 2**30
    except Exception as error:
      row["failed"] = str(error)[-300:]
    record(**row)


def value_and_grads_no_state(function, x, do, static, names):
  def outputs(arrays):
    tokens = [arrays[n] for n in ("q", "k", "v", "decay", "beta")]
    return function(*tokens, a_log=arrays["a_log"], dt_bias=arrays["dt_bias"],
                    initial_state=None, **static)[0]
  o, pull = jax.vjp(outputs, {n: x[n] for n in names})
  return o, pull(do)[0]


BLOCKS = {
    "prepare": [dict(keys=keys, stages=stages) for keys in (16, 32)
                for stages in (3, 4)],
    "pass": [dict(value=32, stages=stages) for stages in (2, 3)],
    "meet": [{}],
    "gradient": [dict(keys=keys, stages=stages) for keys in (16, 32)
                 for stages in (1, 2)],
}


def config(kernel, blocks):
  """The default config with other blocks for one kernel."""
  names = {"value": "value_block"}
  return triton_config.Config(**{
      names.get(x, f"{kernel}_{x}"): y for x, y in blocks.items()})


def stages(record, shapes=SHAPES[:1]):
  """Each kernel alone, over candidates of its blocks."""
  for b, t, h in shapes:
    x = draw(0, b, t, h)
    tokens = tuple(x[n] for n in ("q", "k", "v", "decay", "beta"))
    gate = x["a_log"], x["dt_bias"]
    code, s, do = jnp.zeros((1, 1), jnp.int32), x["initial_state"], x["do"]
    size = triton.size_of(tokens)
    static = triton.Static(FLOOR, WIDTH**-0.5, True, True, True, False,
                           triton_config.Config())

    def measure(kernel, of, function, *arrays, **extra):
      """Times all candidates; compiles them at the same time."""
      def build(blocks):
        now = static._replace(config=config(of, blocks))
        try:
          return jax.jit(functools.partial(function, now)).lower(
              *arrays).compile()
        except Exception as error:
          return str(error)[-150:]

      with concurrent.futures.ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, BLOCKS[of]))
      out = None
      for blocks, run in zip(BLOCKS[of], built):
        row = dict(section="stages", kernel=kernel, B=b, T=t, H=h, **blocks,
                   **extra)
        run = build(blocks) if isinstance(run, str) else run  # once more alone
        if isinstance(run, str):
          record(**row, failed=run)
          continue
        try:
          record(**row, ms=clock(run, *arrays, budget=0.2))
          out = run(*arrays) if out is None else out
        except Exception as error:
          record(**row, failed=str(error)[-150:])
      return out

    made = measure("prepare", "prepare", lambda now, x: triton.prepare(
        now, size, x, gate, code), tokens)
    made, (marks, scales) = made[:-2], made[-2:]
    measure("forward", "pass", lambda now, *x: triton.walk(
        now, size, *x), made, x["v"], s)
    o, _, states, writes = measure("forward saving", "pass", lambda now, *x:
                                   triton.walk(now, size, *x, save=True),
                                   made, x["v"], s)
    dv, d_states, _ = measure("reverse", "pass", lambda now, *x:
                              triton.walk_back(now, size, *x), made, do, s)
    _, *pairs = measure("meet", "meet", lambda now, x, *y: triton.meet(
        now, size, x, code, *y), tokens, o, do, dv, writes)
    measure("gradient", "gradient", lambda now, x, *y: triton.gradient(
        now, size, x, gate, code, *y), tokens, do, dv, states, d_states,
            writes, *pairs, marks, scales)


def ceilings(record):
  x = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
  ms = clock(jax.jit(lambda x: -x), x)
  record(section="ceilings", copy_tb_s=4 * x.size / ms / 1e9)


def decode(record, batch=256, heads=32):
  """One token a sequence; states in place. Reads and writes every state."""
  x = draw(0, batch, 1, heads)
  tokens = [x[n][:, 0] for n in ("q", "k", "v", "decay", "beta")]
  extra = dict(floor=FLOOR, scale=WIDTH**-0.5)
  ways = {f"columns {columns} warps {warps}": functools.partial(
      step.launch, real_B=None, normalize_qk=True, sigmoid_beta=True,
      columns=columns, warps=warps, **extra)
      for columns, warps in ((32, 4), (64, 4), (128, 4), (128, 8))}
  ways["reference"] = lambda tokens, s, a_log, dt_bias: step.step(
      *tokens, s, a_log=a_log, dt_bias=dt_bias, normalize_qk=True,
      sigmoid_beta=True, implementation="reference", **extra)
  for name, way in ways.items():
    run = jax.jit(lambda tokens, s: way(tokens, s, x["a_log"], x["dt_bias"]),
                  donate_argnums=1)
    s = x["initial_state"] + 0
    times = []
    for _ in range(8):
      start = time.perf_counter()
      for _ in range(20):
        _, s = run(tokens, s)
      jax.block_until_ready(s)
      times.append((time.perf_counter() - start) / 20 * 1e3)
    ms = float(np.median(times))
    record(section="decode", name=name, ms=ms, tb_s=2 * s.nbytes / ms / 1e9)


def conv(record, batch=1, time_=8192, heads=32):
  """XLA's short convolution with SiLU, beside its bytes."""
  import flax.linen as nn
  from ultralong_jax.layers import short_conv
  x = jax.random.normal(jax.random.key(0), (batch, time_, heads, WIDTH),
                        jnp.bfloat16)
  w = jax.random.normal(jax.random.key(1), (4, heads, WIDTH))
  ids = documents(1, batch, time_, 25, 0)

  def apply(x, w):
    return nn.silu(short_conv.short_conv(x, w, ids, None, None)[0])

  def both(x, w):
    y, pull = jax.vjp(apply, x, w)
    return y, pull(y)

  for name, function, arrays in (("forward", apply, 2), ("both", both, 5)):
    ms = clock(jax.jit(function), x, w)
    record(section="conv", name=f"conv {name}", ms=ms,
           tb_s=arrays * x.nbytes / ms / 1e9)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("sections", nargs="+")
  parser.add_argument("--out", default="results.jsonl")
  parser.add_argument("--shapes", default="0")
  parser.add_argument("--commit", default="")
  args = parser.parse_args()
  shapes = [SHAPES[int(i)] for i in args.shapes.split(",")]

  record = functools.partial(report.record, args)
  import jax_triton  # empties TRITON_CACHE_DIR, which torch's side needs
  del jax_triton
  os.environ["TRITON_CACHE_DIR"] = tempfile.gettempdir() + "/triton"
  print(jax.__version__, jax.devices()[0].device_kind, flush=True)
  functions = dict(
      accuracy=accuracy.accuracy, ceilings=ceilings, decode=decode, conv=conv,
      stages=lambda r: stages(r, shapes),
      ours=lambda r: timed(r, "ours", triton.kda, shapes),
      xla=lambda r: timed(r, "xla", xla.kda, shapes),
      packed=lambda r: timed(r, "ours", triton.kda, SHAPES[:1], packed=25),
      packed_xla=lambda r: timed(r, "xla", xla.kda, SHAPES[:1], packed=25),
      fla=lambda r: peers.fla(r, shapes),
      fla_packed=lambda r: peers.fla(r, (), [starts()]),
      cudnn=lambda r: peers.cudnn(r, shapes, [starts()]))
  for name in args.sections:
    began = time.perf_counter()
    try:
      functions[name](record)
    except Exception:
      traceback.print_exc(limit=4)
    print("SECTION", name, f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
  main()
