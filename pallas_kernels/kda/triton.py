"""KDA with a bounded decay on NVIDIA GPUs through jax-triton: the host side.

Keeps, for the backward pass, the inputs, the outputs, and of each chunk what
`prepare` made, the state before it and its writes, in the inputs' dtype.
"""
import functools
import importlib.util
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs, triton_config

CHUNK = triton_config.CHUNK
WIDTHS = (64, 128, 256)


class Static(NamedTuple):
  """What is fixed when a kernel is compiled."""
  floor: float
  scale: float
  gate: bool
  normalize: bool
  sigmoid: bool
  documents: bool
  config: triton_config.Config


def unsupported(q, v, *, floor):
  """Why these kernels cannot run, or None."""
  return unsupported_device() or unsupported_shape(q, v, floor)


def unsupported_device():
  """Why no Triton kernel can run here, or None."""
  for package in ("triton", "jax_triton"):
    if importlib.util.find_spec(package) is None:
      return f"{package} is not installed"
  device = jax.devices()[0]
  if device.platform != "gpu":
    return f"the device is {device.platform}, not an NVIDIA GPU"
  if jax.device_count() > 1 and not _local():
    return (f"{jax.device_count()} devices: the compiler cannot partition a "
            "kernel; call kda.sharded.kda_sharded, or under shard_map")
  capability = triton_config.capability_of(device)
  if capability < (8, 0):
    return f"compute capability {capability} is below 8"
  return None


def _local():
  """Whether this is traced for one device, inside shard_map."""
  types = jax.sharding.get_abstract_mesh().axis_types
  return bool(types) and all(x == jax.sharding.AxisType.Manual for x in types)


def unsupported_shape(q, v, floor):
  """Why no device could run this call, or None."""
  if floor is None:
    return "the decay is unbounded: floor is None"
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f"q is {q.dtype}, neither bfloat16 nor float32"
  for name, width in (("key", q.shape[-1]), ("value", v.shape[-1])):
    if width > WIDTHS[-1]:
      return f"{name} width {width} is above {WIDTHS[-1]}"
  return None


def kda(q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG, *, a_log, dt_bias, floor,
        normalize_qk, sigmoid_beta, scale, initial_state, segment_ids,
        config=None):
  """Runs the gated delta rule in chunks of 64. Arguments: see api.kda.

  `config` overrides the blocks that `triton_config` chooses.
  """
  batch, time, groups, value = v_BTGV.shape
  key = q_BTHK.shape[-1]
  wide_key, wide_value = _width(key), _width(value)
  if config is None:
    config = triton_config.choose(
        jax.devices()[0].device_kind, batch, time, groups, wide_key,
        wide_value, q_BTHK.dtype.name,
        triton_config.capability_of(jax.devices()[0]))
  static = Static(float(floor), float(scale), a_log is not None, normalize_qk,
                  sigmoid_beta, segment_ids is not None, config)
  if a_log is None:
    a_log = jnp.zeros(groups, jnp.float32)
    dt_bias = jnp.zeros((groups, key), jnp.float32)
  if initial_state is None:
    initial_state = jnp.zeros((batch, groups, key, value), jnp.float32)
  tokens = (_pad(q_BTHK, wide_key), _pad(k_BTHK, wide_key),
            _pad(v_BTGV, wide_value), _pad(decay_BTGK, wide_key), beta_BTG)
  gate = (a_log.astype(jnp.float32),
          _pad(dt_bias.astype(jnp.float32), wide_key))
  s_BGKV = jnp.pad(initial_state.astype(jnp.float32),
                   ((0, 0), (0, 0), (0, wide_key - key),
                    (0, wide_value - value)))
  o_BTGV, s_BGKV = _kda(static, tokens, gate, s_BGKV,
                        _codes(segment_ids, time))
  return o_BTGV[..., :value], s_BGKV[:, :, :key, :value]


def launch(kernel, arrays, outputs, grid, *, warps, stages=1, alias=None,
           **constants):
  """Calls a Triton kernel: jax-triton 0.3 (out_shape) or 0.4 (out_type).

  `alias` maps an input's index to the output that takes its memory. jax-triton
  cannot batch a call, so under vmap the calls run one after another.
  """
  import jax_triton
  names = inspect.signature(jax_triton.triton_call).parameters
  out = {"out_type" if "out_type" in names else "out_shape": outputs}
  call = jax.custom_batching.sequential_vmap(functools.partial(
      jax_triton.triton_call, kernel=kernel, grid=grid, num_warps=warps,
      num_stages=stages, input_output_aliases=alias or {}, **out, **constants))
  return call(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static, tokens, gate, s_BGKV, code):
  size = size_of(tokens)
  made = prepare(static, size, tokens, gate, code)
  return walk(static, size, made[:-2], tokens[2], s_BGKV)[:2]


def _kda_fwd(static, tokens, gate, s_BGKV, code):
  size = size_of(tokens)
  made = prepare(static, size, tokens, gate, code)
  o, final, states, writes = walk(static, size, made[:-2], tokens[2], s_BGKV,
                                  save=True)
  return (o, final), (tokens, gate, code, made, states, writes, o)


def _kda_bwd(static, residuals, cotangents):
  tokens, gate, code, (*made, marks, scales), states, writes, o = residuals
  do, d_final = cotangents
  size = size_of(tokens)
  dv, d_states, d_first = walk_back(static, size, made, do, d_final)
  d_beta, *pairs = meet(static, size, tokens, code, o, do, dv, writes)
  dq, dk, dz, d_rate, d_bias = gradient(
      static, size, tokens, gate, code, do, dv, states, d_states, writes,
      *pairs, marks, scales)
  if size["H"] != size["G"]:
    dq, dk = (jnp.sum(x.reshape(*x.shape[:2], size["H"], -1, x.shape[-1]), 3)
              for x in (dq, dk))
  d_gate = tuple(jnp.zeros_like(x) for x in gate)
  if static.gate:
    d_gate = (jnp.sum(d_rate, axis=(0, 1, 3)), jnp.sum(d_bias, axis=(0, 1)))
  d_tokens = tuple(x.astype(y.dtype)
                   for x, y in zip((dq, dk, dv, dz, d_beta), tokens))
  return d_tokens, d_gate, d_first, None


_kda.defvjp(_kda_fwd, _kda_bwd)


def prepare(static, size, tokens, gate, code):
  """Launches triton_intra.prepare: see its outputs."""
  from pallas_kernels.kda import triton_intra
  q, k, _, decay, beta = tokens
  b, g, n, width = (size[x] for x in "BGNK")
  rows = jax.ShapeDtypeStruct((b, g, n, CHUNK, width), q.dtype)
  pairs = jax.ShapeDtypeStruct((b, g, n, CHUNK, CHUNK), q.dtype)
  gamma = jax.ShapeDtypeStruct((b, g, n, width), jnp.float32)
  marks = jax.ShapeDtypeStruct((b, g, n, 4, width), jnp.float32)
  scales = jax.ShapeDtypeStruct((b, g, n, 2, CHUNK), jnp.float32)
  config = static.config
  return launch(
      triton_intra.prepare, (q, k, decay, beta, *gate, code, _keep()),
      (rows, rows, rows, gamma, pairs, pairs, marks, scales), (g, n, b),
      warps=config.prepare_warps, stages=config.prepare_stages,
      STAGES=config.prepare_stages,
      **_constants(static, size, config.prepare_keys, without=("V", "BV")))


def walk(static, size, made, v, s_BGKV, save=False):
  """Launches triton_pass.forward: o, final state, states, writes."""
  from pallas_kernels.kda import triton_pass
  b, t, n, g, k, width = (size[x] for x in "BTNGKV")
  dtype = made[0].dtype
  saved = ((b, g, n, k, width), (b, g, n, CHUNK, width)) if save else (
      (1,), (1,))
  return launch(
      triton_pass.forward, (*made, v, s_BGKV),
      (jax.ShapeDtypeStruct((b, t, g, width), v.dtype),
       jax.ShapeDtypeStruct((b, g, k, width), jnp.float32),
       *(jax.ShapeDtypeStruct(shape, dtype) for shape in saved)),
      SAVE=save, **_pass(static, size))


def walk_back(static, size, made, do, d_final):
  """Launches triton_pass.reverse: cotangents of values and states."""
  from pallas_kernels.kda import triton_pass
  b, t, n, g, k, width = (size[x] for x in "BTNGKV")
  dtype = made[0].dtype
  return launch(
      triton_pass.reverse, (*made, do, d_final),
      (jax.ShapeDtypeStruct((b, t, g, width), dtype),
       jax.ShapeDtypeStruct((b, g, n, k, width), dtype),
       jax.ShapeDtypeStruct((b, g, k, width), jnp.float32)),
      **_pass(static, size))


def meet(static, size, tokens, code, o, do, dv, writes):
  """Launches triton_gradient.meet: cotangents of beta, A and P; `along`."""
  from pallas_kernels.kda import triton_gradient
  value, beta = tokens[2], tokens[4]
  b, g, n = (size[x] for x in "BGN")
  return launch(
      triton_gradient.meet, (value, beta, code, o, do, dv, writes),
      (jax.ShapeDtypeStruct(beta.shape, jnp.float32),
       jax.ShapeDtypeStruct((b, g, n, 2, CHUNK, CHUNK), writes.dtype),
       jax.ShapeDtypeStruct((b, g, n, 2, CHUNK), jnp.float32)),
      (g, n, b), warps=4, **_constants(static, size, None, without=(
          "H", "K", "BK", "FLOOR", "SCALE", "GATE", "NORM")))


def gradient(static, size, tokens, gate, code, do, dv, states, d_states,
             writes, d_mix, along, marks, scales):
  """Launches triton_gradient.gradient: cotangents of q, k and the gate."""
  from pallas_kernels.kda import triton_gradient
  b, t, n, g, k = (size[x] for x in "BTNGK")
  q, key, _, decay, _ = tokens
  # Value heads that share a key head are added up afterwards, in float32.
  dtype = q.dtype if size["H"] == g else jnp.float32
  config = static.config
  parts = k // config.gradient_keys
  shapes = (((b, t, g, k), dtype), ((b, t, g, k), dtype),
            ((b, t, g, k), decay.dtype), ((b, n, g, parts), jnp.float32),
            ((b, n, g, k), jnp.float32))
  return launch(
      triton_gradient.gradient,
      (q, key, decay, *gate, code, _keep(), do, dv, states, d_states, writes,
       d_mix, along, marks, scales),
      tuple(jax.ShapeDtypeStruct(*x) for x in shapes), (g * parts, n, b),
      warps=config.gradient_warps, stages=config.gradient_stages,
      STAGES=config.gradient_stages,
      **_constants(static, size, config.gradient_keys, without=("SIGMOID",)))


def _pass(static, size):
  """Grid, warps and constants of the sequential kernels."""
  config = static.config
  block = min(config.value_block, size["V"])
  return dict(
      grid=(size["V"] // block, size["G"], size["B"]),
      warps=config.pass_warps, stages=config.pass_stages,
      STAGES=config.pass_stages, BV=block, C=CHUNK, IEEE=size["wide"],
      **{x: size[x] for x in "TNGKV"})


def _constants(static, size, keys, without=()):
  """Constants of the parallel kernels."""
  constants = dict(
      T=size["T"], N=size["N"], H=size["H"], G=size["G"], K=size["K"],
      V=size["V"], C=CHUNK, BK=keys,
      BV=32 if size["wide"] else 64, FLOOR=static.floor,
      SCALE=static.scale, GATE=static.gate, NORM=static.normalize,
      SIGMOID=static.sigmoid, DOCUMENTS=static.documents, IEEE=size["wide"],
      ASSEMBLY=True)
  return {x: y for x, y in constants.items() if x not in without}


def _keep():
  return jnp.asarray(triton_config.sums_of_decay())


def size_of(tokens):
  """Sizes of the axes, by their letters; `wide` for float32 inputs."""
  q, _, v, _, _ = tokens
  b, t, h, k = q.shape
  return dict(B=b, T=t, H=h, K=k, G=v.shape[2], V=v.shape[3],
              N=-(-t // CHUNK), wide=q.dtype == jnp.float32)


def _codes(segment_ids, time):
  """2 * document + real for each token of whole chunks, [B, N * C]."""
  if segment_ids is None:
    return jnp.zeros((1, 1), jnp.int32)
  code = 2 * inputs.documents(segment_ids)
  padding = ((0, 0), (0, -time % CHUNK))
  code = jnp.pad(code, padding, mode="edge")
  return code + jnp.pad((segment_ids != 0).astype(jnp.int32), padding)


def _width(width):
  """The kernels' width that a head is padded to."""
  return next(w for w in WIDTHS if w >= width)


def _pad(x, width):
  """Zeros after the last axis's own entries."""
  if x.shape[-1] == width:
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
