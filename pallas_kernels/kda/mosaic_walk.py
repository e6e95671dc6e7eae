"""Mosaic GPU body of the walk over a head's chunks.

One warpgroup carries half of a head's state, transposed: S^T [V / 2, K]. Then
the state and the writes are always the operand that may lie in registers, so
the chain from one chunk to the next touches no memory:

  u^T = U^T + S^T (-W)^T;  o^T = S^T (q e^G)^T + u^T A^T
  S^T <- S^T e^G_C + u^T (k e^(G_C - G))
"""
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_intra import (
    CHUNK, COLUMN, SWIZZLED, WIDTH, multiply)

VALUES = 64  # value columns of a warpgroup
STAGES = 3  # chunks in flight


def walk(static, size):
  """Returns the kernel: see `_walk` for its inputs and outputs."""
  b, t, g, n = (size[x] for x in "BTGN")
  stages = min(STAGES, n)

  def tile(*shape):
    return plgpu.SMEM((stages, *shape), jnp.bfloat16, transforms=SWIZZLED)

  return plgpu.kernel(
      functools.partial(_walk, static, n, stages),
      out_type=(
          jax.ShapeDtypeStruct((b, t, g, WIDTH), jnp.bfloat16),
          jax.ShapeDtypeStruct((b, g, WIDTH, WIDTH), jnp.float32)),
      scratch_types=dict(
          w_s=tile(CHUNK, WIDTH), q_s=tile(CHUNK, WIDTH),
          k_s=tile(CHUNK, WIDTH), u_s=tile(VALUES, CHUNK),
          mix_s=tile(CHUNK, CHUNK),
          gamma_s=plgpu.SMEM((stages, WIDTH), jnp.float32),
          o_s=plgpu.SMEM((CHUNK, VALUES), jnp.bfloat16, transforms=SWIZZLED),
          barrier=plgpu.Barrier(num_arrivals=6, num_barriers=stages)),
      kernel_name="kda_walk", interpret=static.interpret,
      grid=(WIDTH // VALUES, g, b),
      grid_names=("part", "head", "batch"),
      compiler_params=plgpu.CompilerParams(
          approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane))


def _walk(
    static, chunks, stages,
    # inputs, see mosaic_intra
    w_ref,  # [B, G, N, C, K]
    u_ref,  # [B, G, N, V / 2, 2 C]
    q_g_ref,  # [B, G, N, C, K]
    k_g_ref,  # [B, G, N, C, K]
    mix_ref,  # [B, G, N, J, C]
    gamma_ref,  # [B, G, N, K]
    first_ref,  # [B, G, V, K]: the state before the first token
    # outputs
    o_ref,  # [B, T, G, V]
    final_ref,  # [B, G, V, K]
    # scratch
    *, w_s, q_s, k_s, u_s, mix_s, gamma_s, o_s, barrier,
):
  """All chunks of one head and half of its value columns."""
  part, g, b = (jax.lax.axis_index(x) for x in ("part", "head", "batch"))
  values = pl.ds(part * VALUES, VALUES)

  def fetch(n, slot):
    for x_ref, x_s in (
        (w_ref, w_s), (q_g_ref, q_s), (k_g_ref, k_s), (mix_ref, mix_s),
        (gamma_ref, gamma_s)):
      plgpu.copy_gmem_to_smem(x_ref.at[b, g, n], x_s.at[slot],
                              barrier.at[slot])
    plgpu.copy_gmem_to_smem(u_ref.at[b, g, n, :, values], u_s.at[slot],
                            barrier.at[slot])

  for n in range(stages):
    fetch(n, n)

  def chunk(n, s_VK):
    slot = jax.lax.rem(n, stages)
    plgpu.barrier_wait(barrier.at[slot])
    narrow_VK = s_VK.astype(jnp.bfloat16)
    gamma_VK = jax.lax.broadcast_in_dim(
        plgpu.load(gamma_s.at[slot], layout=COLUMN, optimized=False),
        s_VK.shape, (1,))

    def products(u_acc, o_acc, add_acc):
      """The outputs' products run behind those that the next chunk awaits."""
      multiply(static, u_acc, narrow_VK, w_s.at[slot].transpose((1, 0)))
      multiply(static, o_acc, narrow_VK, q_s.at[slot].transpose((1, 0)))
      u_VC = plgpu.wgmma_accumulator_load(u_acc, wait_n=1)
      u_VC = (u_VC + u_s[slot].astype(jnp.float32)).astype(jnp.bfloat16)
      multiply(static, add_acc, u_VC, k_s.at[slot])
      multiply(static, o_acc, u_VC, mix_s.at[slot])
      add_VK = plgpu.wgmma_accumulator_load(add_acc, wait_n=1)
      return (s_VK * gamma_VK + add_VK,
              plgpu.wgmma_accumulator_load(o_acc).astype(jnp.bfloat16))

    s_VK, o_VC = pl.run_scoped(
        products, plgpu.ACC((VALUES, CHUNK), jnp.float32),
        plgpu.ACC((VALUES, CHUNK), jnp.float32),
        plgpu.ACC(s_VK.shape, jnp.float32))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s.transpose((1, 0))[...] = plgpu.layout_cast(
        o_VC, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, pl.ds(n * CHUNK, CHUNK), g,
                                          values])

    @pl.when(n + stages < chunks)
    def _():
      fetch(n + stages, slot)
    return s_VK

  s_VK = plgpu.load(first_ref.at[b, g, values], layout=plgpu.Layout.WGMMA,
                    optimized=False)
  s_VK = jax.lax.fori_loop(0, chunks, chunk, s_VK)
  final_ref[b, g, values] = s_VK
  plgpu.wait_smem_to_gmem(0)
