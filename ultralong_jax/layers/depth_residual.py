"""Block attention residuals: a softmax over depth replaces the residual sum.

Sources are the embedding, the sums of earlier blocks of layers, and the
running sum of the present one (arXiv 2603.15031, 2607.24653).
"""
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp


def mix(sources, valid, query_D, scale_D, epsilon):
  """Averages the sources of each token by a softmax over depth.

    score_m = sum_d query_d scale_d v_md / sqrt(mean(v_m^2) + epsilon)
    h = sum_m softmax(score)_m v_m

  In float32. Only one number a source and token is kept for the backward pass
  beside the sources themselves, which other layers keep anyway.

  Args:
    sources: a sequence of arrays [B, T, D].
    valid: a boolean scalar for each source, or None when all count. An invalid
      source must still be finite.
    query_D: learned query; zeros give the plain mean.
    scale_D: learned scale of the keys' norm.
    epsilon: added to the mean square.

  Returns:
    h_BTD: the mixture, in the sources' dtype.
  """
  return _mix(epsilon, tuple(sources), valid, query_D * scale_D)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(epsilon, sources, valid, w_D):
  return _mix_fwd(epsilon, sources, valid, w_D)[0]


def _mix_fwd(epsilon, sources, valid, w_D):
  rstd, score = zip(*(_score(v, w_D, epsilon) for v in sources))
  rstd_MBT, score_MBT = jnp.stack(rstd), jnp.stack(score)
  masked_MBT = score_MBT
  if valid is not None:
    valid_M = jnp.stack([jnp.asarray(x) for x in valid])
    masked_MBT = jnp.where(valid_M[:, None, None], score_MBT, -jnp.inf)
  p_MBT = jax.nn.softmax(masked_MBT, axis=0)
  h_BTD = sum(p_MBT[m][..., None] * v.astype(jnp.float32)
              for m, v in enumerate(sources))
  residuals = sources, valid, w_D, rstd_MBT, score_MBT, p_MBT
  return h_BTD.astype(sources[0].dtype), residuals


def _score(v_BTD, w_D, epsilon):
  v_BTD = v_BTD.astype(jnp.float32)
  rstd_BT = jax.lax.rsqrt(jnp.mean(v_BTD * v_BTD, axis=-1) + epsilon)
  return rstd_BT, rstd_BT * jnp.sum(v_BTD * w_D[None, None], axis=-1)


def _mix_bwd(epsilon, residuals, dh_BTD):
  """With ds = p (dp - sum p dp), dp = v.dh:

    dv = p dh + ds rstd (w - v rstd score / D);  dw = sum ds rstd v
  """
  del epsilon
  sources, valid, w_D, rstd_MBT, score_MBT, p_MBT = residuals
  dtype, width = dh_BTD.dtype, dh_BTD.shape[-1]
  dh_BTD = dh_BTD.astype(jnp.float32)
  dp_MBT = jnp.stack([jnp.sum(v.astype(jnp.float32) * dh_BTD, axis=-1)
                      for v in sources])
  ds_MBT = p_MBT * (dp_MBT - jnp.sum(p_MBT * dp_MBT, axis=0, keepdims=True))
  pull_MBT = ds_MBT * rstd_MBT
  dsources, dw_D = [], 0
  for m, v_BTD in enumerate(sources):
    v_BTD = v_BTD.astype(jnp.float32)
    own_BT = pull_MBT[m] * rstd_MBT[m] * score_MBT[m] / width
    dv_BTD = (p_MBT[m][..., None] * dh_BTD
              + pull_MBT[m][..., None] * w_D[None, None]
              - own_BT[..., None] * v_BTD)
    dsources.append(dv_BTD.astype(dtype))
    dw_D += jnp.einsum("BT,BTD->D", pull_MBT[m], v_BTD, precision="highest")
  return tuple(dsources), None, dw_D


_mix.defvjp(_mix_fwd, _mix_bwd)


class DepthMix(nn.Module):
  """`mix` with its learned query, which starts at zero: the plain mean.

  Attributes:
    epsilon: of the keys' norm.
  """
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, sources, valid=None):
    width = sources[0].shape[-1]
    query_D = self.param("query_D", nn.initializers.zeros, (width,),
                         jnp.float32)
    scale_D = self.param("scale_D", nn.initializers.ones, (width,),
                         jnp.float32)
    return mix(sources, valid, query_D, scale_D, self.epsilon)
