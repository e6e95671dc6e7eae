"""Experts in a latent space: dispatch, grouped matmul, combine; dropless."""

import importlib.util
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import layout as array_layout

from ultralong_jax.layers import balance, glu, linear, norm, router

IMPLEMENTATIONS = ("blocks", "ragged", "tokamax", "dense")


def resolve(implementation):
  """The implementation to run; "" picks by backend, a name never falls back."""
  if implementation == "":
    if jax.default_backend() == "cpu":
      return "blocks"  # several times faster there than XLA's ragged_dot
    return "tokamax" if importlib.util.find_spec("tokamax") else "ragged"
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"{implementation=} is none of {IMPLEMENTATIONS}")
  if implementation == "tokamax" and not importlib.util.find_spec("tokamax"):
    raise NotImplementedError(f"{implementation=}: tokamax is not installed")
  return implementation


def block_rows(pairs, experts):
  """Rows in a block. Padding costs half a block an expert, a block a copy of
  its expert's weights; between 32 and 128 the first has the say."""
  share = max(pairs // experts, 1)
  return min(128, max(8, 1 << (share // 4).bit_length()))


class Layout(NamedTuple):
  """Rows sorted by expert, each expert's first at a multiple of the block.

  A pair is a token and one of its experts, number token * A + slot.

  Attributes:
    pair_I: pair in each row; the number of pairs where a row is empty.
    row_XA: row of each pair.
    size_E: rows of each expert, empty ones included.
  """
  pair_I: jax.Array
  row_XA: jax.Array
  size_E: jax.Array


def arrange(choice_XA, experts, block):
  """Sorts pairs by expert. The number of rows is static: pairs + E * block."""
  tokens, top = choice_XA.shape
  pairs = tokens * top
  expert_I = choice_XA.reshape(pairs)
  real_E = jnp.bincount(expert_I, length=experts)
  size_E = (real_E + block - 1) // block * block
  end_E = jnp.cumsum(size_E)
  shift_E = (end_E - size_E) - (jnp.cumsum(real_E) - real_E)
  sorted_I = jnp.argsort(expert_I, stable=True)
  row_I = jnp.arange(pairs) + shift_E[expert_I[sorted_I]]
  row_XA = jnp.zeros(pairs, jnp.int32).at[sorted_I].set(
      row_I, unique_indices=True, mode="promise_in_bounds")
  rows = pairs if block == 1 else (pairs // block + experts) * block
  pair_I = jnp.full(rows, pairs, jnp.int32).at[row_I].set(
      sorted_I, unique_indices=True, mode="promise_in_bounds")
  return Layout(pair_I, row_XA.reshape(tokens, top), size_E)


@jax.custom_vjp
def dispatch(x_XD, layout):
  """Copies each token to its rows; empty rows are zero."""
  top = layout.row_XA.shape[1]
  return x_XD.at[layout.pair_I // top].get(mode="fill", fill_value=0)


def _dispatch_fwd(x_XD, layout):
  return dispatch(x_XD, layout), layout


def _dispatch_bwd(layout, d_ID):
  # Transposing the copy would scatter; every pair knows its row, so gather.
  # Slot by slot: a sum over an axis of two costs a CPU five times as much.
  d_XD = sum(d_ID.at[row_X].get(mode="promise_in_bounds").astype(jnp.float32)
             for row_X in layout.row_XA.T)
  return d_XD.astype(d_ID.dtype), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine(y_ID, weight_XA, layout):
  """Weighted sum of each token's rows, in float32."""
  y_XAD = y_ID.at[layout.row_XA].get(mode="promise_in_bounds")
  return jnp.einsum("XAD,XA->XD", y_XAD.astype(jnp.float32), weight_XA)


def _combine_fwd(y_ID, weight_XA, layout):
  return combine(y_ID, weight_XA, layout), (y_ID, weight_XA, layout)


def _combine_bwd(residuals, d_XD):
  y_ID, weight_XA, layout = residuals
  top = weight_XA.shape[1]
  y_XAD = y_ID.at[layout.row_XA].get(mode="promise_in_bounds")
  d_weight_XA = jnp.einsum("XAD,XD->XA", y_XAD.astype(jnp.float32), d_XD)
  weight_I = weight_XA.reshape(-1).at[layout.pair_I].get(
      mode="fill", fill_value=0.)
  d_ID = d_XD.at[layout.pair_I // top].get(mode="fill", fill_value=0.)
  d_ID = (weight_I[:, None] * d_ID).astype(y_ID.dtype)
  return d_ID, d_weight_XA, None


combine.defvjp(_combine_fwd, _combine_bwd)


def grouped_matmul(x_ID, w_EDF, size_E, implementation, block):
  """Multiplies each expert's rows by its own matrix.

  Args:
    x_ID: rows sorted by expert.
    w_EDF: matrices, in the dtype of the rows.
    size_E: rows of each expert, multiples of `block`; what remains at the end
      belongs to nobody.
    implementation: "blocks", "ragged" or "tokamax".
    block: rows that surely share an expert.

  Returns:
    y_IF: products, in the dtype of the rows.
  """
  if implementation == "ragged":
    return jax.lax.ragged_dot(x_ID, w_EDF, size_E)
  if implementation == "tokamax":
    import tokamax  # heavy, and not in the base install
    return tokamax.ragged_dot(x_ID, w_EDF, size_E)
  first_N = block * jnp.arange(x_ID.shape[0] // block)
  expert_N = jnp.searchsorted(jnp.cumsum(size_E), first_N, side="right")
  expert_N = jnp.minimum(expert_N, w_EDF.shape[0] - 1)
  x_NCD = x_ID.reshape(-1, block, x_ID.shape[1])
  y_NCF = _block_matmul(x_NCD, w_EDF, expert_N)
  return y_NCF.reshape(x_ID.shape[0], -1)


@jax.custom_vjp
def _block_matmul(x_NCD, w_EDF, expert_N):
  return jnp.einsum("NCD,NDF->NCF", x_NCD, w_EDF[expert_N])


def _block_matmul_fwd(x_NCD, w_EDF, expert_N):
  return _block_matmul(x_NCD, w_EDF, expert_N), (x_NCD, w_EDF, expert_N)


def _block_matmul_bwd(residuals, d_NCF):
  x_NCD, w_EDF, expert_N = residuals
  d_NCD = jnp.einsum("NCF,NDF->NCD", d_NCF, w_EDF[expert_N])
  x_NDC = jnp.swapaxes(x_NCD, 1, 2)
  if jax.default_backend() == "cpu" and x_NDC.dtype == jnp.bfloat16:
    # A transpose inside the matmul would send it to a float32 path.
    x_NDC = array_layout.with_layout_constraint(
        x_NDC, array_layout.Layout((0, 1, 2)))
  d_NDF = jnp.einsum("NDC,NCF->NDF", x_NDC, d_NCF)
  # A matmul with zeros and ones: XLA's scatter-add of matrices is slower.
  one_EN = jax.nn.one_hot(expert_N, w_EDF.shape[0], axis=0, dtype=d_NDF.dtype)
  d_EDF = jnp.einsum("EN,NDF->EDF", one_EN, d_NDF)
  return d_NCD, d_EDF, None


_block_matmul.defvjp(_block_matmul_fwd, _block_matmul_bwd)


def mix(x_XD, w_gate_EDF, w_up_EDF, w_down_EFD, choice_XA, weight_XA, kind,
        implementation=""):
  """Sums each token's experts, weighted: sum_a weight_a E_a(x).

  Args:
    x_XD: tokens.
    w_gate_EDF: gate projections, in the dtype of the tokens.
    w_up_EDF: up projections.
    w_down_EFD: down projections.
    choice_XA: experts of each token, all different.
    weight_XA: float32 weights, applied after the down projection.
    kind: activation, see `glu.ACTIVATIONS`.
    implementation: see `resolve`.

  Returns:
    y_XD: float32.
  """
  implementation = resolve(implementation)
  experts = w_gate_EDF.shape[0]
  if implementation == "dense":
    return _mix_dense(x_XD, w_gate_EDF, w_up_EDF, w_down_EFD, choice_XA,
                      weight_XA, kind)
  block = (block_rows(choice_XA.size, experts)
           if implementation == "blocks" else 1)
  layout = arrange(choice_XA, experts, block)
  x_ID = dispatch(x_XD, layout)
  how = layout.size_E, implementation, block
  both = jnp.concatenate([w_gate_EDF, w_up_EDF], axis=2)
  gate_IF, up_IF = jnp.split(grouped_matmul(x_ID, both, *how), 2, axis=1)
  f_IF = glu.activate(kind, gate_IF, up_IF)
  y_ID = grouped_matmul(f_IF, w_down_EFD, *how)
  return combine(y_ID, weight_XA, layout)


def _mix_dense(x_XD, w_gate_EDF, w_up_EDF, w_down_EFD, choice_XA, weight_XA,
               kind):
  """Every token through every expert: the definition, slow."""
  one_XAE = jax.nn.one_hot(choice_XA, w_gate_EDF.shape[0])
  weight_XE = jnp.einsum("XAE,XA->XE", one_XAE, weight_XA)
  gate_XEF = jnp.einsum("XD,EDF->XEF", x_XD, w_gate_EDF)
  up_XEF = jnp.einsum("XD,EDF->XEF", x_XD, w_up_EDF)
  f_XEF = glu.activate(kind, gate_XEF, up_XEF)
  y_XED = jnp.einsum("XEF,EFD->XED", f_XEF, w_down_EFD)
  return jnp.einsum("XED,XE->XD", y_XED.astype(jnp.float32), weight_XE)


class LatentExperts(nn.Module):
  """Routed experts that live in a latent, and shared ones at full width.

    y = shared(x) + w_expand norm(sum_a weight_a E_a(w_compress x))

  The router reads the full width. Padding tokens come out as zero, count in
  no statistic and change no other token.

  Attributes:
    experts: routed experts.
    experts_per_token: of them, for each token; fewer than all.
    hidden: hidden width of one expert.
    latent: width that routed experts read and write; 0 is the model's width,
      without the two projections and the norm.
    shared: experts that every token takes, fused into one unit.
    scale: sum of a token's routed weights.
    renormalize: False: weights are scores times `scale`.
    groups: groups of neighbouring experts.
    groups_per_token: of them, those that a token's experts come from.
    glu: activation, see `glu.ACTIVATIONS`.
    epsilon: of the latent's RMSNorm.
    implementation: see `resolve`.

  Collections:
    router: reads threshold_E; written by `balance.update` only.
    statistics: adds histogram_EZ and load_E where it is mutable.
  """
  experts: int
  experts_per_token: int
  hidden: int
  latent: int = 0
  shared: int = 1
  scale: float = 1.
  renormalize: bool = True
  groups: int = 1
  groups_per_token: int = 1
  glu: str = "situ"
  epsilon: float = 1e-5
  implementation: str = ""

  @nn.compact
  def __call__(self, x_BTD, valid_BT):
    width = x_BTD.shape[-1]
    rank = self.latent or width
    dtype = x_BTD.dtype
    x_XD = x_BTD.reshape(-1, width)
    choice_XA, weight_XA = self._route(x_XD, valid_BT.reshape(-1))

    z_XR = x_XD
    if self.latent:
      z_XR = linear.linear(
          x_XD, linear.weight(self, "w_compress_DR", width, rank))
    inner = self.experts, rank, self.hidden
    outer = self.experts, self.hidden, rank
    y_XD = mix(
        z_XR, linear.weight(self, "w_gate_ERF", *inner).astype(dtype),
        linear.weight(self, "w_up_ERF", *inner).astype(dtype),
        linear.weight(self, "w_down_EFR", *outer).astype(dtype),
        choice_XA, weight_XA, self.glu, self.implementation).astype(dtype)
    if self.latent:
      u_XR = norm.RMSNorm(self.epsilon, name="latent_norm")(y_XD)
      y_XD = linear.linear(
          u_XR, linear.weight(self, "w_expand_RD", rank, width))
    y_BTD = y_XD.reshape(x_BTD.shape)
    if self.shared:
      y_BTD += glu.GatedUnit(self.shared * self.hidden, self.glu,
                             name="shared")(x_BTD)
    # Zero here, so no gradient reaches padding, its router scores included.
    return jnp.where(valid_BT[..., None], y_BTD, 0)

  def _route(self, x_XD, valid_X):
    """Chooses experts, weighs them, and counts when asked to."""
    w_router_DE = linear.weight(self, "w_router_DE", x_XD.shape[1],
                                self.experts)
    threshold_E = self.variable("router", "threshold_E", jnp.zeros,
                                (self.experts,), jnp.float32).value
    s_XE = router.scores(x_XD, w_router_DE)
    choice_XA, cutoff_X = router.choose(
        s_XE, threshold_E, self.experts_per_token, self.groups,
        self.groups_per_token)
    weight_XA = router.weights(s_XE, choice_XA, self.scale, self.renormalize)
    if (self.is_mutable_collection("statistics")
        and not self.is_initializing()):
      self._count("histogram_EZ", balance.histogram(
          s_XE, cutoff_X, threshold_E, valid_X))
      count_XA = jnp.broadcast_to(valid_X[:, None], choice_XA.shape)
      self._count("load_E", jnp.zeros(self.experts, jnp.int32).at[
          choice_XA].add(count_XA.astype(jnp.int32)))
    return choice_XA, weight_XA

  def _count(self, name, value):
    self.sow("statistics", name, value, init_fn=lambda: 0,
             reduce_fn=lambda a, b: a + b)
