"""One decoding step of Kimi delta attention: a token of each sequence.

Reading and writing the states is all the work, so the kernel updates them in
place: donate `s_BGKV` to the jitted step, or XLA copies it first.
"""
import jax
import jax.numpy as jnp

from pallas_kernels.kda import reference, triton

WIDTHS = (16, 32, 64, 128, 256)
# Value columns and warps of a program; measured in experiments/0003.
COLUMNS = 64
WARPS = 4


def unsupported(q_BHK, v_BGV):
  """Why the kernel cannot run, or None."""
  for name, width in (("key", q_BHK.shape[-1]), ("value", v_BGV.shape[-1])):
    if width not in WIDTHS:
      return f"{name} width {width} is none of {WIDTHS}"
  return triton.unsupported_device()


def step(q_BHK, k_BHK, v_BGV, decay_BGK, beta_BG, s_BGKV, *, a_log=None,
         dt_bias=None, floor=None, normalize_qk=False, sigmoid_beta=False,
         scale=None, real_B=None, implementation=None):
  """Runs the gated delta rule over one token. See api.kda for the options.

    S <- Diag(exp g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale S^T q

  Not differentiable.

  Args:
    q_BHK: queries.
    k_BHK: keys.
    v_BGV: values.
    decay_BGK: log decay, or gate inputs when `a_log` is given.
    beta_BG: write strength, or its logits when `sigmoid_beta`.
    s_BGKV: float32 states; donate them.
    a_log: [G] or None.
    dt_bias: [G, K], with `a_log`.
    floor: lower bound of the log decay, or None: unbounded.
    normalize_qk: divides q and k by their norms.
    sigmoid_beta: `beta_BG` are logits.
    scale: of the queries; default K**-0.5.
    real_B: False leaves a sequence's state as it is; its output is to be
      ignored. Default: all are real.
    implementation: "triton", "reference" or None: the first that can run.

  Returns:
    o_BGV: outputs, in the dtype of the values.
    s_BGKV: states after the token.

  Raises:
    NotImplementedError: `implementation` cannot run; says why.
  """
  scale = q_BHK.shape[-1]**-0.5 if scale is None else scale
  reason = unsupported(q_BHK, v_BGV)
  if implementation not in (None, "triton", "reference"):
    raise ValueError(f"implementation={implementation!r} is none of "
                     "['triton', 'reference']")
  if implementation == "triton" and reason is not None:
    raise NotImplementedError(f"no triton step of kda: {reason}")
  options = dict(floor=floor, scale=scale)
  if implementation == "reference" or reason is not None:
    segments = None if real_B is None else real_B[:, None].astype(jnp.int32)
    o_BTGV, s_BGKV = reference.kda(
        *(x[:, None] for x in (q_BHK, k_BHK, v_BGV, decay_BGK, beta_BG)),
        a_log=a_log, dt_bias=dt_bias, normalize_qk=normalize_qk,
        sigmoid_beta=sigmoid_beta, initial_state=s_BGKV, segment_ids=segments,
        **options)
    return o_BTGV[:, 0], s_BGKV
  return launch(
      (q_BHK, k_BHK, v_BGV, decay_BGK, beta_BG), s_BGKV, a_log, dt_bias,
      real_B, normalize_qk, sigmoid_beta, **options)


def launch(tokens, s_BGKV, a_log, dt_bias, real_B, normalize_qk, sigmoid_beta,
           *, floor, scale, columns=COLUMNS, warps=WARPS):
  """Launches triton_step.step."""
  from pallas_kernels.kda import triton_step
  q_BHK, _, v_BGV, _, _ = tokens
  batch, groups, key, value = s_BGKV.shape
  gate = a_log is not None
  if not gate:
    a_log = jnp.zeros(groups, jnp.float32)
    dt_bias = jnp.zeros((groups, key), jnp.float32)
  real = jnp.ones(1, jnp.int32) if real_B is None else real_B.astype(jnp.int32)
  columns = min(columns, value)
  arrays = (*tokens, a_log.astype(jnp.float32), dt_bias.astype(jnp.float32),
            real, s_BGKV.astype(jnp.float32))
  return triton.launch(
      triton_step.step, arrays,
      (jax.ShapeDtypeStruct(v_BGV.shape, v_BGV.dtype),
       jax.ShapeDtypeStruct(s_BGKV.shape, jnp.float32)),
      (value // columns, groups, batch), warps=warps, alias={8: 1},
      H=q_BHK.shape[1], G=groups, K=key, V=value, BV=columns,
      FLOOR=None if floor is None else float(floor), SCALE=float(scale),
      GATE=gate, NORM=normalize_qk, SIGMOID=sigmoid_beta,
      PADDED=real_B is not None, ASSEMBLY=True)
