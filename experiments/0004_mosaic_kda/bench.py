r"""The forward pass of bounded kda on one GPU: Mosaic GPU and Triton kernels.

python -m experiments.0004_mosaic_kda.bench --out rows.jsonl \
    check golden stages mosaic triton

Random inputs, gate, unit norm and sigmoid fused, medians; jitted, back to
back, host dispatch included. A failing section is reported and passed over.
"""
import argparse
import functools
import importlib
import os
import time
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments import report  # noqa: E402
from pallas_kernels.kda import reference  # noqa: E402

bench = importlib.import_module("experiments.0003_hopper_kda.bench")
SHAPES, WIDTH, FLOOR = bench.SHAPES, bench.WIDTH, bench.FLOOR
clock = bench.clock


def options(key=WIDTH, segment_ids=None):
  return {**bench.options(0, key), "segment_ids": segment_ids}


def draw(seed, batch, time_, heads, groups=None, key=WIDTH, value=WIDTH):
  """Random tokens, gate and first state."""
  x = bench.draw(seed, batch, time_, heads, key, value, groups)
  return (tuple(x[name] for name in bench.ARRAYS[:5]),
          {name: x[name] for name in bench.ARRAYS[5:]})


def relative(a, b):
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def poison(gib=8):
  """Leaves NaN in memory that the next outputs will lie in."""
  arrays = [jnp.full(2**28, jnp.nan, jnp.float32) for _ in range(gib)]
  jax.block_until_ready(arrays)


CASES = {
    # name: (batch, time, heads, value heads, key, value, documents, gate)
    "plain": (2, 1024, 2, 2, 128, 128, 0, None),
    "25 documents": (2, 1000, 2, 2, 128, 128, 25, None),
    "4 value heads a key head": (1, 333, 1, 4, 64, 128, 0, None),
    "K128 V64": (1, 200, 1, 1, 128, 64, 0, None),
    "at the floor": (1, 256, 1, 1, 128, 128, 0, 100.0),
    "almost no decay": (1, 1024, 1, 1, 128, 128, 0, -9.0),
    "one token": (1, 1, 1, 1, 128, 128, 0, None),
    "many programs": (1, 2048, 64, 64, 128, 128, 3, None),
}


def check(record, cases):
  """Against the token recurrence in float32, twice: a race would differ."""
  from pallas_kernels.kda import mosaic
  for name, case in list(CASES.items())[cases]:
    b, t, h, g, key, value, documents, z = case
    (q, k, v, decay, beta), gate = draw(len(name), b, t, h, g, key, value)
    if z is not None:
      decay = jnp.full_like(decay, z)
    real, ids = 1.0, None
    if documents:
      ids = np.cumsum(np.random.default_rng(0).random((b, t)) < documents / t,
                      axis=1).astype(np.int32) + 1
      ids[:, -7:] = 0
      real = (ids != 0)[..., None, None]
    static = options(key, None if ids is None else jnp.asarray(ids))
    tokens = q, k, v, decay, beta
    wide = tuple(x.astype(jnp.float32) for x in tokens)
    with jax.default_matmul_precision("highest"):
      o_want, s_want = jax.jit(lambda x, y: reference.kda(
          *x, **y, **static))(wide, gate)
    run = jax.jit(lambda x, y: mosaic.kda(*x, **y, **static))
    try:
      poison()
      o, s = run(tokens, gate)
      again = run(tokens, gate)
      errors = dict(o=relative(o * real, o_want * real), s=relative(s, s_want))
      record(section="check", name=name,
             ok=bool(max(errors.values()) < 1e-2),
             same=bool(jnp.array_equal(o, again[0], equal_nan=True)
                       & jnp.array_equal(s, again[1], equal_nan=True)),
             **{n: float(f"{e:.3g}") for n, e in errors.items()})
    except Exception as error:
      record(section="check", name=name, failed=str(error)[-400:])


def golden(record, shapes, folder="tests/golden"):
  """Outputs that another implementation made, in float32."""
  del shapes
  from pallas_kernels.kda import mosaic
  for name in sorted(os.listdir(folder)):
    if not name.startswith("kda_bounded"):
      continue
    data = dict(np.load(f"{folder}/{name}"))
    batch, _, heads, width = data["q"].shape
    tokens = [jnp.asarray(data[x], jnp.bfloat16)
              for x in ("q", "k", "v", "z", "beta_logit")]
    first = data.get("initial_state", np.zeros(
        (batch, heads, width, data["v"].shape[-1]), np.float32))
    o, s = jax.jit(lambda *x: mosaic.kda(
        *x, a_log=data["A_log"], initial_state=first,
        dt_bias=data["dt_bias"].reshape(heads, width),
        **options(width)))(*tokens)
    record(section="golden", name=name,
           **{n: float(f"{relative(x, data[y]):.3g}")
              for n, x, y in (("o", o, "o"), ("s", s, "final_state"))})


def stages(record, shapes):
  """Each Mosaic GPU kernel alone."""
  from pallas_kernels.kda import mosaic
  for b, t, h in shapes:
    (q, k, v, decay, beta), gate = draw(0, b, t, h)
    static = mosaic.Static(FLOOR, WIDTH**-0.5, True, True, True, False, None)
    size = dict(B=b, T=t, H=h, G=h, N=t // mosaic.CHUNK)
    gate_in = mosaic._slopes(static, size, gate["a_log"], gate["dt_bias"])
    rows = mosaic._rows(static, size, beta, None)
    intra, walk = (jax.jit(x) for x in mosaic.kernels(static, size))
    arrays = (q, k, v, decay, gate_in, *rows)
    record(section="stages", kernel="intra", B=b, T=t, H=h,
           ms=clock(intra, *arrays))
    made = intra(*arrays)
    record(section="stages", kernel="walk", B=b, T=t, H=h,
           ms=clock(walk, *made, jnp.swapaxes(gate["initial_state"], 2, 3)))


def whole(record, shapes, section):
  """The forward pass as a user calls it."""
  if section == "triton":
    from pallas_kernels.kda import triton as backend
  else:
    from pallas_kernels.kda import mosaic as backend
  for b, t, h in shapes:
    tokens, gate = draw(0, b, t, h)
    gate["initial_state"] = None
    function = jax.jit(lambda x, y: backend.kda(*x, **y, **options()))
    row = dict(section=section, B=b, T=t, H=h)
    row["forward_ms"] = clock(function, tokens, gate)
    stats = function.lower(tokens, gate).compile().memory_analysis()
    row["peak_gib"] = (
        stats.temp_size_in_bytes + stats.argument_size_in_bytes
        + stats.output_size_in_bytes) / 2**30
    record(**row)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("sections", nargs="+")
  parser.add_argument("--out", default="rows.jsonl")
  parser.add_argument("--shapes", default="0")
  parser.add_argument("--cases", default="0:1", help="start:step of check")
  parser.add_argument("--commit", default="")
  args = parser.parse_args()
  shapes = [SHAPES[int(i)] for i in args.shapes.split(",")]

  record = functools.partial(report.record, args)
  start, step = map(int, args.cases.split(":"))
  functions = dict(
      check=lambda r, _: check(r, slice(start, None, step)),
      golden=golden, stages=stages,
      mosaic=lambda r, s: whole(r, s, "mosaic"),
      triton=lambda r, s: whole(r, s, "triton"))
  print(jax.__version__, jax.devices()[0].device_kind, flush=True)
  for name in args.sections:
    began = time.perf_counter()
    try:
      functions[name](record, shapes)
    except Exception:
      traceback.print_exc(limit=4)
    print("SECTION", name, f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
  main()
