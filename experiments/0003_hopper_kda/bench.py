r"""Kimi delta attention on one GPU: ours, plain JAX and two torch packages.

python -m experiments.0003_hopper_kda.bench --out rows.jsonl \
    check golden stages ours xla cudnn fla

flash-linear-attention tunes its kernels in its first call, for minutes.

Same sizes and distributions for all, one process, medians. Ours is timed as a
JAX user sees it: jitted, back to back, host dispatch included. Each section
stands alone and a failing one is reported and passed over.
"""
import argparse
import dataclasses
import functools
import json
import os
import tempfile
import time
import traceback
import zlib

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_kernels.kda import (  # noqa: E402
    reference, triton, triton_config, xla)

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


def relative(a, b):
  a, b = (np.asarray(y, np.float64) for y in (a, b))
  return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-300))


def documents(seed, batch, time_, count, padding):
  """Segment ids of `count` documents a row, with trailing padding."""
  rng = np.random.default_rng(seed)
  ids = np.zeros((batch, time_), np.int32)
  for row in ids:
    cuts = np.sort(rng.choice(np.arange(1, time_ - padding), count - 1, False))
    row[:] = 1 + np.searchsorted(cuts, np.arange(time_), side="right")
    row[time_ - padding:] = 0
  return jnp.asarray(ids)


CHECKS = {
    # name: (batch, time, heads, value heads, key, value, dtype, options)
    "bf16": (2, 1000, 2, 2, 128, 128, "bfloat16", {}),
    "bf16 documents": (2, 1000, 2, 2, 128, 128, "bfloat16", {"documents": 25}),
    "bf16 4 value heads a key head": (1, 333, 1, 4, 64, 128, "bfloat16", {}),
    "bf16 K256 V64": (1, 200, 1, 1, 256, 64, "bfloat16", {}),
    "bf16 K128 V256": (1, 200, 1, 1, 128, 256, "bfloat16", {}),
    "bf16 at the floor": (1, 256, 1, 1, 128, 128, "bfloat16", {"z": 100.0}),
    "bf16 plain": (1, 300, 2, 2, 128, 128, "bfloat16", {"plain": True}),
    "bf16 one token": (1, 1, 1, 1, 128, 128, "bfloat16", {}),
    "f32": (1, 200, 2, 2, 64, 128, "float32", {}),
    "f32 K24 V40 documents": (2, 150, 1, 2, 24, 40, "float32",
                              {"documents": 5}),
    "f32 K256 V256": (1, 100, 1, 1, 256, 256, "float32", {}),
}


def check(record, slice_):
  """Against the token recurrence in float32 on the same inputs."""
  for name, case in list(CHECKS.items())[slice_]:
    b, t, h, g, key, value, dtype, extra = case
    x = draw(zlib.crc32(name.encode()) % 2**31, b, t, h, key, value, g,
             jnp.dtype(dtype))
    static = dict(options(h), scale=key**-0.5)
    names = ARRAYS
    if "z" in extra:
      x["decay"] = jnp.full_like(x["decay"], extra["z"])
    if "plain" in extra:
      static.update(normalize_qk=False, sigmoid_beta=False)
      unit = lambda y: y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True))
      x["q"], x["k"] = (unit(x[n].astype(jnp.float32)).astype(x[n].dtype)
                        for n in ("q", "k"))
      x["beta"] = jax.nn.sigmoid(x["beta"])
      x["decay"] = FLOOR * jax.nn.sigmoid(x["decay"])
      names = ("q", "k", "v", "decay", "beta", "initial_state")
    real = 1.0
    if "documents" in extra:
      static["segment_ids"] = documents(1, b, t, extra["documents"], 7)
      real = (static["segment_ids"] != 0)[..., None, None]
      x["do"] = jnp.where(real, x["do"], 0)
    # The recurrence in float32 on the very inputs that the kernel sees.
    wide = {n: y.astype(jnp.float32) for n, y in x.items()}
    with jax.default_matmul_precision("highest"):
      want = jax.jit(lambda a: value_and_grads(
          reference.kda, a, static, names))(wide)
    for tile in (32, 16) if name == "bf16" else (32,):
      config = triton_config.heuristic(
          triton._width(key), triton._width(value), dtype, FLOOR)
      config = dataclasses.replace(config, tile=tile)
      try:
        got = jax.jit(lambda a: value_and_grads(
            functools.partial(triton.kda, config=config), a, static, names))(x)
        errors = {n: relative(got[n] * (real if n == "o" else 1),
                              want[n] * (real if n == "o" else 1))
                  for n in want}
      except Exception as error:
        record(section="check", name=name, tile=tile,
               failed=str(error)[-300:])
        continue
      limit = 2e-2 if dtype == "bfloat16" else 1e-4
      worst = max(errors.values()) if all(
          np.isfinite(list(errors.values()))) else float("nan")
      record(section="check", name=name, tile=tile, ok=bool(worst < limit),
             **{n: float(f"{e:.2g}") for n, e in errors.items()})


def golden(record, folder="tests/golden"):
  """Outputs and gradients that another implementation made, float32."""
  for name in sorted(os.listdir(folder)):
    if not name.startswith("kda_bounded"):
      continue
    data = dict(np.load(f"{folder}/{name}"))
    width, value = data["q"].shape[-1], data["v"].shape[-1]
    batch, _, heads, _ = data["q"].shape
    x = dict(q=data["q"], k=data["k"], v=data["v"], decay=data["z"],
             beta=data["beta_logit"], a_log=data["A_log"],
             dt_bias=data["dt_bias"].reshape(heads, width), do=data["do"],
             ds=data["dfinal_state"])
    x["initial_state"] = data.get(
        "initial_state", np.zeros((batch, heads, width, value), np.float32))
    want = dict(o="o", s="final_state", q="grad_q", k="grad_k", v="grad_v",
                decay="grad_z", beta="grad_beta_logit", a_log="grad_A_log",
                dt_bias="grad_dt_bias", initial_state="grad_initial_state")
    want = {n: data[m].reshape(x[n].shape) if n in x else data[m]
            for n, m in want.items() if m in data}
    static = dict(options(heads), scale=width**-0.5)
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 2e-2)):
      tokens = {n: jnp.asarray(y).astype(dtype) if n in (
          "q", "k", "v", "decay", "beta", "do") else jnp.asarray(y)
          for n, y in x.items()}
      got = jax.jit(lambda a: value_and_grads(triton.kda, a, static))(tokens)
      errors = {n: relative(got[n], y) for n, y in want.items()}
      record(section="golden", name=name, dtype=dtype,
             ok=bool(max(errors.values()) < limit),
             **{n: float(f"{e:.2g}") for n, e in errors.items()})


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


def timed(record, section, function, shapes, memory=True, backward=True,
          **extra):
  for b, t, h in shapes:
    x = draw(0, b, t, h)
    x["a_log"] = jnp.zeros(h)
    names = tuple(n for n in ARRAYS if n != "initial_state")
    tokens = {n: x[n] for n in names}
    static = options(h)
    forward = jax.jit(lambda a: function(
        *[a[n] for n in ("q", "k", "v", "decay", "beta")], a_log=a["a_log"],
        dt_bias=a["dt_bias"], initial_state=None, **static))
    row = dict(section=section, B=b, T=t, H=h, K=WIDTH, V=WIDTH, **extra)
    try:
      row["forward_ms"] = clock(forward, tokens)
      if backward:
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


def once(record, shapes):
  """One forward and backward pass, for a profiler to look at."""
  del record
  b, t, h = shapes[0]
  x = draw(0, b, t, h)
  jax.block_until_ready(jax.jit(lambda a: value_and_grads(
      triton.kda, a, options(h)))(x))


def value_and_grads_no_state(function, x, do, static, names):
  def outputs(arrays):
    tokens = [arrays[n] for n in ("q", "k", "v", "decay", "beta")]
    return function(*tokens, a_log=arrays["a_log"], dt_bias=arrays["dt_bias"],
                    initial_state=None, **static)[0]
  o, pull = jax.vjp(outputs, {n: x[n] for n in names})
  return o, pull(do)[0]


def stages(record, shapes=SHAPES[:1]):
  """Each kernel alone, over the candidates of its blocks."""
  tiles, passes = triton_config.candidates()
  for b, t, h in shapes:
    x = draw(0, b, t, h)
    tokens = tuple(x[n] for n in ("q", "k", "v", "decay", "beta"))
    gate = x["a_log"], x["dt_bias"]
    code, s, do = jnp.zeros((1, 1), jnp.int32), x["initial_state"], x["do"]
    size = triton.size_of(tokens)
    static = triton.Static(FLOOR, WIDTH**-0.5, True, True, True, False,
                           triton_config.Config())

    def measure(kernel, function, *arrays, **blocks):
      row = dict(section="stages", kernel=kernel, B=b, T=t, H=h, **blocks)
      try:
        function = jax.jit(function)
        row["ms"] = clock(function, *arrays, budget=0.2)
        record(**row)
        return function(*arrays)
      except Exception as error:
        record(**row, failed=str(error)[-150:])

    for blocks in tiles:
      now = static._replace(config=triton_config.Config(**blocks))
      solved = measure("solve", lambda x: triton.solve(
          now, size, x, gate, code), tokens, **blocks)
    made = measure("expand", lambda *x: triton.expand(
        static, size, x[0], gate, code, *x[1:]), tokens, tokens[2], solved)
    measure("expand backward", lambda *x: triton.expand(
        static, size, x[0], gate, code, *x[1:], backward=True), tokens,
        do, solved)
    saved = cotangents = None
    for blocks in passes:
      now = static._replace(config=triton_config.Config(**blocks))
      out = measure("forward", lambda *x: triton.walk(
          now, size, *x, jnp.bfloat16, save=True), made, solved[0], s, **blocks)
      saved = out[2:] if out else saved
      out = measure("reverse", lambda *x: triton.walk_back(
          now, size, *x), made, do, s, **blocks)
      cotangents = out[:2] if out else cotangents
    dv, _, *pairs = measure("meet", lambda *x: triton.meet(
        static, size, x[0], code, *x[1:]), tokens, do, do, saved[1],
        cotangents[1], solved[1])
    for blocks in tiles:
      now = static._replace(config=triton_config.Config(**blocks))
      measure("gradient", lambda *x: triton.gradient(
          now, size, x[0], gate, code, *x[1:]), tokens, do, dv, saved[0],
          cotangents[0], saved[1], solved[2], *pairs, **blocks)


def ceilings(record):
  x = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
  ms = clock(jax.jit(lambda x: -x), x)
  record(section="ceilings", copy_tb_s=4 * x.size / ms / 1e9)


def fla(record, shapes):
  for shape in shapes:
    _fla(record, *shape)


def _fla(record, b, t, h):
  import torch
  from triton.testing import do_bench
  from fla.ops.kda import chunk_kda
  torch.manual_seed(0)
  make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
  leaves = [make(b, t, h, WIDTH) for _ in range(4)] + [make(b, t, h)]
  do = make(b, t, h, WIDTH)
  extra = dict(
      A_log=torch.zeros(h, device="cuda"),
      dt_bias=torch.zeros(h * WIDTH, device="cuda"), safe_gate=True,
      lower_bound=FLOOR, use_qk_l2norm_in_kernel=True,
      use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
      output_final_state=True)
  row = dict(section="fla", B=b, T=t, H=h, K=WIDTH, V=WIDTH)
  with torch.inference_mode():
    row["forward_ms"] = do_bench(lambda: chunk_kda(*leaves, **extra),
                                 return_mode="median")
  for y in leaves:
    y.requires_grad_(True)

  def both():
    chunk_kda(*leaves, **extra)[0].backward(do)
    for y in leaves:
      y.grad = None

  both()
  torch.cuda.synchronize()
  torch.cuda.reset_peak_memory_stats()
  both()
  row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
  row["both_ms"] = do_bench(both, return_mode="median")
  record(**row)
  torch.cuda.empty_cache()


def cudnn(record, shapes):
  for shape in shapes:
    _cudnn(record, *shape)


def _cudnn(record, b, t, h):
  import torch
  from triton.testing import do_bench
  from cudnn.linear_attention.ops.kda import kimi_delta_attention
  torch.manual_seed(0)
  make = lambda *s: torch.randn(*s, device="cuda")
  half = lambda *s: make(*s).to(torch.bfloat16)
  starts = torch.arange(0, (b + 1) * t, t, dtype=torch.int32, device="cuda")
  q, k, v = (half(b * t, h, WIDTH) for _ in range(3))
  z, beta = make(b * t, h, WIDTH), make(b * t, h)
  row = dict(section="cudnn", B=b, T=t, H=h, K=WIDTH, V=WIDTH)
  fused = dict(
      use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
      safe_gate=True, gate_lower_bound=FLOOR,
      a_log=torch.zeros(h, device="cuda"),
      dt_bias=torch.zeros(h, WIDTH, device="cuda"), output_final_state=True)
  call = lambda: kimi_delta_attention(q, k, v, z, beta, starts, **fused)
  with torch.inference_mode():
    call()
    row["dispatched_ms"] = do_bench(call, return_mode="median")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
      call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
      call()
    row["forward_ms"] = do_bench(graph.replay, return_mode="median")
  unit = lambda y: torch.nn.functional.normalize(y.float(), dim=-1).to(
      torch.bfloat16)
  leaves = [y.detach().clone().requires_grad_(True) for y in (
      unit(q), unit(k), v, FLOOR * torch.sigmoid(z), torch.sigmoid(beta))]
  do = half(b * t, h, WIDTH)

  def both():
    kimi_delta_attention(*leaves, starts)[0].backward(do)
    for y in leaves:
      y.grad = None

  both()
  torch.cuda.synchronize()
  torch.cuda.reset_peak_memory_stats()
  both()
  row["both_nothing_fused_peak_gib"] = (
      torch.cuda.max_memory_allocated() / 2**30)
  row["both_nothing_fused_ms"] = do_bench(both, return_mode="median")
  record(**row)
  torch.cuda.empty_cache()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("sections", nargs="+")
  parser.add_argument("--out", default="results.jsonl")
  parser.add_argument("--shapes", default="0")
  parser.add_argument("--checks", default="0:1", help="start:step")
  parser.add_argument("--commit", default="")
  args = parser.parse_args()
  shapes = [SHAPES[int(i)] for i in args.shapes.split(",")]

  def record(**row):
    print("ROW", json.dumps(row), flush=True)
    with open(args.out, "a") as out:
      out.write(json.dumps(dict(row, commit=args.commit)) + "\n")

  import jax_triton  # empties TRITON_CACHE_DIR, which torch's side needs
  del jax_triton
  os.environ["TRITON_CACHE_DIR"] = tempfile.gettempdir() + "/triton"
  print(jax.__version__, jax.devices()[0].device_kind, flush=True)
  start, step = map(int, args.checks.split(":"))
  functions = dict(
      check=lambda r: check(r, slice(start, None, step)), golden=golden,
      ceilings=ceilings,
      stages=lambda r: stages(r, shapes), once=lambda r: once(r, shapes),
      ours=lambda r: timed(r, "ours", triton.kda, shapes),
      xla=lambda r: timed(r, "xla", xla.kda, shapes),
      fla=lambda r: fla(r, shapes), cudnn=lambda r: cudnn(r, shapes))
  for name in args.sections:
    began = time.perf_counter()
    try:
      functions[name](record)
    except Exception:
      traceback.print_exc(limit=4)
    print("SECTION", name, f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
  main()
