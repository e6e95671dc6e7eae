"""Ours and FLA's kernels in bfloat16 beside a recurrence in float64."""
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import reference, triton

WIDTH = 128
HEADS = 32
TOKENS = ("q", "k", "v", "decay", "beta")
FLOOR = -5.0


def options(width=WIDTH):
  return dict(floor=FLOOR, normalize_qk=True, sigmoid_beta=True,
              scale=width**-0.5, segment_ids=None)


def relative(a, b):
  a, b = (np.asarray(y, np.float64) for y in (a, b))
  return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-300))


def accuracy(record):
  """Errors of the first of 32 heads; both packages see all of them."""
  for time_, slow in ((1024, 0.0), (65536, -6.0)):
    rng = np.random.default_rng(0)
    shapes = dict(q=WIDTH, k=WIDTH, v=WIDTH, decay=WIDTH, beta=0, do=WIDTH)
    x = {n: jnp.asarray(rng.standard_normal(
        (1, time_, HEADS, width) if width else (1, time_, HEADS),
        np.float32), jnp.bfloat16) for n, width in shapes.items()}
    do = x.pop("do")
    # Low decay logits make a memory of a thousand tokens and more.
    gate = dict(a_log=np.zeros(HEADS, np.float32),
                dt_bias=np.full((HEADS, WIDTH), slow, np.float32))
    backward = time_ <= 1024
    wanted = _float64(x, gate, do, backward)
    for name, function in (("ours", _ours), ("fla", _fla)):
      got = function(x, gate, do, backward)
      got = {n: y[:, :1] if n == "s" else y[:, :, :1] for n, y in got.items()}
      errors = {n: relative(got[n], wanted[n]) for n in wanted}
      errors["o of the last 1024"] = relative(
          got["o"][:, -1024:], wanted["o"][:, -1024:])
      record(section="accuracy", name=f"{name} T{time_}",
             **{n: float(f"{e:.3g}") for n, e in errors.items()})


def _outputs(function, x, gate, backward, do, static):
  def run(x):
    return function(*(x[n] for n in TOKENS), initial_state=None, **gate,
                    **static)
  if not backward:
    o, s = jax.jit(run)(x)
    return dict(o=o, s=s)
  (o, s), pull = jax.vjp(jax.jit(run), x)
  return dict(o=o, s=s, **pull((do.astype(o.dtype), jnp.zeros_like(s)))[0])


def _float64(x, gate, do, backward):
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    x, do = jax.tree.map(
        lambda y: jnp.asarray(np.asarray(y[:, :, :1], np.float64)), (x, do))
    gate = jax.tree.map(lambda y: jnp.asarray(y[:1], jnp.float64), gate)
    out = _outputs(reference.kda, x, gate, backward, do, options())
    return {n: np.asarray(y) for n, y in out.items()}


def _ours(x, gate, do, backward):
  return _outputs(triton.kda, x, gate, backward, do, options())


def _fla(x, gate, do, backward):
  import torch
  from fla.ops.kda import chunk_kda

  def to_torch(y, dtype=torch.bfloat16):
    return torch.tensor(np.asarray(y, np.float32), device="cuda", dtype=dtype)

  leaves = {n: to_torch(y).requires_grad_(backward) for n, y in x.items()}
  o, s = chunk_kda(
      *(leaves[n] for n in TOKENS),
      A_log=to_torch(gate["a_log"], torch.float32),
      dt_bias=to_torch(gate["dt_bias"], torch.float32).reshape(-1),
      safe_gate=True, lower_bound=FLOOR, use_qk_l2norm_in_kernel=True,
      use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
      output_final_state=True)
  out = dict(o=o, s=s)
  if backward:
    o.backward(to_torch(do))
    out |= {n: y.grad for n, y in leaves.items()}
  return {n: y.detach().float().cpu().numpy() for n, y in out.items()}
