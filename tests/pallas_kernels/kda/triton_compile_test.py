"""The Triton kernels compile for each GPU and fit its shared memory."""
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
# Bytes a block may have, by compute capability.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_fits_shared_memory(capability):
  """In a process of its own: elsewhere Triton may be the interpreter."""
  pytest.importorskip("triton")
  environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
  done = subprocess.run(
      [sys.executable, __file__, str(capability)], cwd=ROOT, text=True,
      capture_output=True, env={**environment, "PYTHONPATH": os.pathsep.join(
          [str(ROOT), *sys.path])})
  assert done.returncode == 0, done.stderr[-2000:]


def launches(capability):
  """What the host side launches for bfloat16, K = V = 128, T = 8192."""
  import jax
  import jax.numpy as jnp
  from pallas_kernels.kda import step, triton, triton_config

  found = []

  def note(kernel, arrays, outputs, grid, *, warps, stages=1, alias=None,
           **constants):
    del grid, alias
    types = [str(x.dtype) for x in (*arrays, *outputs)]
    found.append((kernel, types, warps, stages, constants))
    return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

  triton.launch = note
  token = jax.ShapeDtypeStruct((1, 8192, 2, 128), jnp.bfloat16)
  major = (capability // 10, capability % 10)
  config = triton_config.heuristic(128, 128, "bfloat16", major)

  def both(q, k, v, z, beta, a_log, dt_bias):
    options = dict(floor=-5.0, normalize_qk=True, sigmoid_beta=True,
                   scale=128**-0.5, initial_state=None, segment_ids=None)
    o, pull = jax.vjp(lambda q: triton.kda(
        q, k, v, z, beta, a_log=a_log, dt_bias=dt_bias, config=config,
        **options)[0], q)
    return pull(o)

  gate = (jax.ShapeDtypeStruct((2,), jnp.float32),
          jax.ShapeDtypeStruct((2, 128), jnp.float32))
  jax.eval_shape(both, *4 * (token,),
                 jax.ShapeDtypeStruct(token.shape[:3], jnp.bfloat16), *gate)
  row = jax.ShapeDtypeStruct((4, 2, 128), jnp.bfloat16)
  jax.eval_shape(
      lambda *x: step.launch(x[:5], x[5], *x[6:], None, True, True, floor=-5.0,
                             scale=1.0), *4 * (row,),
      jax.ShapeDtypeStruct((4, 2), jnp.bfloat16),
      jax.ShapeDtypeStruct((4, 2, 128, 128), jnp.float32), *gate)
  return found


def main(capability):
  """Compiles them all, without a GPU."""
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  short = {"bfloat16": "*bf16", "float32": "*fp32", "float16": "*fp16",
           "int32": "*i32"}
  found = launches(capability)
  names = [kernel.__name__ for kernel, *_ in found]
  assert names == ["prepare", "forward", "reverse", "meet", "gradient",
                   "step"], names
  for kernel, types, warps, stages, constants in found:
    types = iter(types)
    signature = {n: "constexpr" if n in constants else short[next(types)]
                 for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]]
             for i, n in enumerate(kernel.arg_names)
             if signature[n] != "constexpr"}
    done = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants,
                  attrs=attrs), target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=warps, num_stages=stages))
    print(kernel.__name__, done.metadata.shared, "bytes")
    assert done.metadata.shared <= SHARED[capability], kernel.__name__


if __name__ == "__main__":
  main(int(sys.argv[1]))
