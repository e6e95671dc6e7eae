"""KDA with a bounded decay on Hopper GPUs in Pallas Mosaic GPU: the host side.

Two kernels: `mosaic_intra` works on all chunks at once, `mosaic_walk` carries
the state from chunk to chunk. No backward kernel is written yet: a call that is
differentiated is another backend's, forward and backward.
"""
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs, triton, xla

CHUNK = 64
WIDTH = 128  # of a head's keys and values; narrower ones are padded
TILE = 32  # queries that share a reference decay
# e^(|floor| TILE / 2) must fit float32, and its inverse bfloat16's normal range
LOWEST_FLOOR = -5.0
LOG2E = 1.4426950408889634


class Static(NamedTuple):
  """What is fixed when a kernel is compiled."""
  floor: float
  scale: float
  gate: bool
  normalize: bool
  sigmoid: bool
  marks: bool
  interpret: Any


def unsupported(q, v, *, floor):
  """Why these kernels cannot run, or None."""
  device = jax.devices()[0]
  if device.platform != "gpu":
    return f"the device is {device.platform}, not an NVIDIA GPU"
  if jax.device_count() > 1:
    return (f"{jax.device_count()} devices: a kernel cannot be partitioned by "
            "the compiler, and the call under shard_map is not written yet")
  capability = str(getattr(device, "compute_capability", "unknown"))
  if not capability.startswith("9."):
    return (f"the GPU has compute capability {capability}; wgmma is Hopper's "
            "(9.0)")
  return unsupported_shape(q, v, floor)


def unsupported_shape(q, v, floor):
  """Why no device could run this call, or None."""
  if floor is None:
    return "the decay is unbounded: floor is None"
  if floor < LOWEST_FLOOR:
    return (f"floor={floor} is below {LOWEST_FLOOR}: {TILE} tokens share a "
            "reference decay")
  if q.dtype != jnp.bfloat16:
    return f"q is {q.dtype}, not bfloat16"
  for name, width in (("key", q.shape[-1]), ("value", v.shape[-1])):
    if width > WIDTH:
      return f"{name} width {width} is above {WIDTH}"
  return None


def kda(q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG, *, a_log, dt_bias, floor,
        normalize_qk, sigmoid_beta, scale, initial_state, segment_ids,
        interpret=None):
  """Runs the gated delta rule in chunks of 64. Arguments: see api.kda.

  `interpret` are parameters of Pallas's GPU interpreter.
  """
  batch, time, groups, value = v_BTGV.shape
  key = q_BTHK.shape[-1]
  static = Static(
      float(floor), float(scale), a_log is not None, normalize_qk,
      sigmoid_beta, segment_ids is not None or time % CHUNK > 0, interpret)
  if initial_state is None:
    initial_state = jnp.zeros((batch, groups, key, value), jnp.float32)
  return _kda(static, (q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG),
              (a_log, dt_bias), initial_state, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(static, tokens, gate, s_BGKV, segment_ids):
  q, k, v, decay, beta = tokens
  size = dict(B=v.shape[0], T=-(-v.shape[1] // CHUNK) * CHUNK, G=v.shape[2],
              H=q.shape[2], N=-(-v.shape[1] // CHUNK))
  strength, marks = _rows(static, size, beta, segment_ids)
  intra, walk = kernels(static, size)
  made = intra(
      _tile(q), _tile(k), _tile(v), _tile(decay.astype(jnp.bfloat16)),
      _slopes(static, size, *gate), strength, marks)
  s_BGVK = jnp.swapaxes(s_BGKV.astype(jnp.float32), -1, -2)
  key, value = s_BGKV.shape[-2:]
  s_BGVK = jnp.pad(s_BGVK, ((0, 0), (0, 0), (0, WIDTH - value),
                            (0, WIDTH - key)))
  o_BTGV, s_BGVK = walk(*made, s_BGVK)
  return (o_BTGV[:, :v.shape[1], :, :value].astype(v.dtype),
          jnp.swapaxes(s_BGVK[..., :value, :key], -1, -2))


def _kda_fwd(static, tokens, gate, s_BGKV, segment_ids):
  """Triton's forward pass where Triton runs, else plain JAX's."""
  q, v = tokens[0], tokens[2]
  backend = triton
  if static.interpret or triton.unsupported(q, v, floor=static.floor):
    backend = xla
  logging.getLogger(__name__).info(
      "kda: a differentiated call, so %s in place of mosaic", backend.__name__)

  def outputs(tokens, gate, s_BGKV):
    return backend.kda(
        *tokens, a_log=gate[0], dt_bias=gate[1], floor=static.floor,
        normalize_qk=static.normalize, sigmoid_beta=static.sigmoid,
        scale=static.scale, initial_state=s_BGKV, segment_ids=segment_ids)

  return jax.vjp(outputs, tokens, gate, s_BGKV)


def _kda_bwd(static, pull, cotangents):
  del static
  return *pull(cotangents), None


_kda.defvjp(_kda_fwd, _kda_bwd)


def kernels(static, size):
  """The two kernels for a shape, `size` being its axes by their letters."""
  from pallas_kernels.kda import mosaic_intra, mosaic_walk
  return mosaic_intra.intra(static, size), mosaic_walk.walk(static, size)


def _tile(x):
  """Pads tokens to whole chunks and channels to the kernels' width."""
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK), (0, 0),
                     (0, WIDTH - x.shape[-1])))


def _slopes(static, size, a_log, dt_bias):
  """Slope and bias of the gate's argument, in powers of 2: [G, 2, K]."""
  shape = size["G"], WIDTH
  if not static.gate:
    return jnp.zeros((shape[0], 2, WIDTH), jnp.float32)
  slope = -LOG2E * jnp.exp(a_log.astype(jnp.float32))[:, None]
  bias = slope * dt_bias.astype(jnp.float32)
  bias = jnp.pad(bias, ((0, 0), (0, WIDTH - bias.shape[-1])))
  return jnp.stack([jnp.broadcast_to(slope, shape), bias], axis=1)


def _rows(static, size, beta_BTG, segment_ids):
  """Numbers of each token: write strength, and masks of whole chunks.

  Returns:
    strength: [B, G, N * C], 0 on padding.
    marks: [B, N, 5, C]: real tokens; those that read the state before the
      chunk, and write the one after it; document; whether the state passes.
      Not read where a row is one document of whole chunks.
  """
  b, t, n = (size[x] for x in "BTN")
  time = beta_BTG.shape[1]
  padding = ((0, 0), (0, t - time))
  strength = beta_BTG.astype(jnp.float32)
  if static.sigmoid:
    strength = jax.nn.sigmoid(strength)
  strength = jnp.moveaxis(jnp.pad(strength, (*padding, (0, 0))), 1, 2)
  if not static.marks:
    return strength, jnp.zeros((b, n, 5, CHUNK), jnp.float32)
  if segment_ids is None:
    segment_ids = jnp.ones((b, time), jnp.int32)
  real = jnp.pad(segment_ids != 0, padding)
  document = jnp.pad(inputs.documents(segment_ids), padding, mode="edge")
  before = jnp.pad(document, ((0, 0), (1, 0)))[:, :t:CHUNK, None]
  chunks = document.reshape(b, n, CHUNK)
  last = chunks[:, :, -1:]
  marks = jnp.stack(
      [real.reshape(chunks.shape), chunks == before, chunks == last, chunks,
       jnp.broadcast_to(before == last, chunks.shape)], axis=2)
  return strength * real[:, None], marks.astype(jnp.float32)
