"""The definition of Kimi delta attention: one token at a time."""
import jax
import jax.numpy as jnp

from pallas_kernels.kda import inputs


def unsupported(*_, **__):
  """The reference runs everywhere."""
  return None


def kda(q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG, *, a_log, dt_bias, floor,
        normalize_qk, sigmoid_beta, scale, initial_state, segment_ids):
  """Runs the gated delta rule as a scan over tokens. Arguments: see api.kda.

    S_t = Diag(exp g_t) S_{t-1};  u_t = beta_t (v_t - S_t^T k_t)
    S_t = S_t + k_t u_t^T;        o_t = S_t^T q_t
  """
  real_BT, starts_BT = None, jnp.zeros(q_BTHK.shape[:2], bool)
  if segment_ids is not None:
    documents_BT = inputs.documents(segment_ids)
    real_BT = (segment_ids != 0)[..., None]
    starts_BT = jnp.diff(documents_BT, axis=1, prepend=documents_BT[:, :1]) != 0
  q_BTGK, k_BTGK, u_BTGV, g_BTGK, beta_BTG = inputs.prepare(
      q_BTHK, k_BTHK, v_BTGV, decay_BTGK, beta_BTG, real_BT, a_log, dt_bias,
      floor=floor, normalize_qk=normalize_qk, sigmoid_beta=sigmoid_beta,
      scale=scale)

  def token(s_BGKV, xs):
    q_BGK, k_BGK, v_BGV, g_BGK, beta_BG, starts_B = xs
    s_BGKV = jnp.where(starts_B[:, None, None, None], 0, s_BGKV)
    s_BGKV = s_BGKV * jnp.exp(g_BGK)[..., None]
    read_BGV = jnp.einsum("BGK,BGKV->BGV", k_BGK, s_BGKV, precision="highest")
    write_BGV = beta_BG[..., None] * (v_BGV - read_BGV)
    s_BGKV += k_BGK[..., None] * write_BGV[..., None, :]
    return s_BGKV, jnp.einsum("BGK,BGKV->BGV", q_BGK, s_BGKV,
                              precision="highest")

  batch, _, heads, key = q_BTGK.shape
  s_BGKV = jnp.zeros((batch, heads, key, v_BTGV.shape[-1]), u_BTGV.dtype)
  if initial_state is not None:
    s_BGKV = initial_state.astype(s_BGKV.dtype)
  xs = (q_BTGK, k_BTGK, u_BTGV, g_BTGK, beta_BTG, starts_BT)
  s_BGKV, o_TBGV = jax.lax.scan(
      token, s_BGKV, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs))
  return jnp.moveaxis(o_TBGV, 0, 1).astype(v_BTGV.dtype), s_BGKV
