"""Mosaic GPU body of the walk over a head's chunks.

One warpgroup carries half of a head's state, transposed: S^T [V / 2, K]. Then
the state and the writes are always the operand that may lie in registers, so
the chain from one chunk to the next touches no memory. A second warpgroup
fetches what the chunks need.

  u^T = U^T + S^T (-W)^T;  o^T = S^T (q e^G)^T + u^T A^T
  S^T <- S^T e^G_C + u^T (k e^(G_C - G))
"""
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic import CHUNK, WIDTH
from pallas_kernels.kda.mosaic_tile import COLUMN, SWIZZLED, multiply, store

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
          fetched=plgpu.Barrier(num_arrivals=6, num_barriers=stages),
          read=plgpu.Barrier(num_barriers=stages),
          spare_s=[plgpu.SMEM((VALUES, x), jnp.bfloat16, transforms=SWIZZLED)
                   if static.interpret else None for x in (WIDTH, CHUNK)]),
      kernel_name="kda_walk", interpret=static.interpret,
      grid=(WIDTH // VALUES, g, b),
      grid_names=("part", "head", "batch"), num_threads=2,
      thread_name="warpgroup",
      compiler_params=plgpu.CompilerParams(
          approx_math=True, unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane))


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
    *, w_s, q_s, k_s, u_s, mix_s, gamma_s, o_s, fetched, read, spare_s,
):
  """All chunks of one head and half of its value columns."""
  part, g, b = (jax.lax.axis_index(x) for x in ("part", "head", "batch"))
  values = pl.ds(part * VALUES, VALUES)

  @pl.when(jax.lax.axis_index("warpgroup") == 1)
  def _():
    @pl.loop(0, chunks + stages)
    def _(n):
      slot = jax.lax.rem(n, stages)

      @pl.when(n >= stages)
      def _():
        plgpu.barrier_wait(read.at[slot])

      @pl.when(n < chunks)
      def _():
        for x_ref, x_s in (
            (w_ref, w_s), (q_g_ref, q_s), (k_g_ref, k_s), (mix_ref, mix_s),
            (gamma_ref, gamma_s)):
          plgpu.copy_gmem_to_smem(x_ref.at[b, g, n], x_s.at[slot],
                                  fetched.at[slot])
        plgpu.copy_gmem_to_smem(u_ref.at[b, g, n, :, values], u_s.at[slot],
                                fetched.at[slot])

  def emit(n, o_VC):
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_s.transpose((1, 0))[...] = plgpu.layout_cast(
        o_VC, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        o_s, o_ref.at[b, pl.ds(n * CHUNK, CHUNK), g, values])

  def chunk(n, carry):
    s_VK, o_VC = carry
    slot = jax.lax.rem(n, stages)
    plgpu.barrier_wait(fetched.at[slot])
    narrow_VK = s_VK.astype(jnp.bfloat16)
    gamma_VK = jax.lax.broadcast_in_dim(
        plgpu.load(gamma_s.at[slot], layout=COLUMN, optimized=False),
        s_VK.shape, (1,))

    def products(u_acc, o_acc, add_acc):
      """The next chunk awaits the writes and what they add to the state."""
      u_local_VC = u_s[slot].astype(jnp.float32)
      for at in (0, 64):  # in two, so that the first need not wait for all
        channels = pl.ds(at, 64)
        multiply(static, u_acc, narrow_VK[:, at:at + 64],
                 w_s.at[slot, :, channels].transpose((1, 0)), spare_s[1])
      multiply(static, o_acc, narrow_VK, q_s.at[slot].transpose((1, 0)),
               spare_s[0])
      if o_VC is not None:
        emit(n - 1, o_VC)
      u_VC = plgpu.wgmma_accumulator_load(u_acc, wait_n=1)
      u_VC = (u_VC + u_local_VC).astype(jnp.bfloat16)
      multiply(static, add_acc, u_VC, k_s.at[slot], spare_s[1])
      multiply(static, o_acc, u_VC, mix_s.at[slot], spare_s[1])
      add_VK = plgpu.wgmma_accumulator_load(add_acc, wait_n=1)
      return (s_VK * gamma_VK + add_VK,
              plgpu.wgmma_accumulator_load(o_acc).astype(jnp.bfloat16))

    narrow = plgpu.ACC((VALUES, CHUNK), jnp.float32)
    carry = pl.run_scoped(products, narrow, narrow,
                          plgpu.ACC(s_VK.shape, jnp.float32))
    plgpu.barrier_arrive(read.at[slot])
    return carry

  @pl.when(jax.lax.axis_index("warpgroup") == 0)
  def _():
    s_VK = plgpu.load(first_ref.at[b, g, values], layout=plgpu.Layout.WGMMA,
                      optimized=False)
    carry = chunk(0, (s_VK, None))
    s_VK, o_VC = jax.lax.fori_loop(1, chunks, chunk, carry)
    emit(chunks - 1, o_VC)
    store(final_ref.at[b, g, values], s_VK)
    plgpu.wait_smem_to_gmem(0)
