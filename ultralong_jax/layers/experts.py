"""Experts in a latent space, and the grouped matmul that they are made of."""

import importlib.util

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import layout as array_layout

from ultralong_jax.layers import balance, capacity, dispatch, glu, linear
from ultralong_jax.layers import norm, prototypes, router

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
    square_XA: mean square of each pair's hidden activations, float32, without
      a gradient.
  """
  implementation = resolve(implementation)
  experts = w_gate_EDF.shape[0]
  if implementation == "dense":
    return _mix_dense(x_XD, w_gate_EDF, w_up_EDF, w_down_EFD, choice_XA,
                      weight_XA, kind)
  block = (dispatch.block_rows(choice_XA.size, experts)
           if implementation == "blocks" else 1)
  layout = dispatch.arrange(choice_XA, experts, block)
  x_ID = dispatch.to_experts(x_XD, layout)
  how = layout.size_E, implementation, block
  both = jnp.concatenate([w_gate_EDF, w_up_EDF], axis=2)
  gate_IF, up_IF = jnp.split(grouped_matmul(x_ID, both, *how), 2, axis=1)
  f_IF = glu.activate(kind, gate_IF, up_IF)
  y_ID = grouped_matmul(f_IF, w_down_EFD, *how)
  square_I = _mean_square(f_IF)
  return dispatch.combine(y_ID, weight_XA, layout), square_I[layout.row_XA]


def _mean_square(f):
  f = jax.lax.stop_gradient(f).astype(jnp.float32)
  return jnp.mean(f * f, axis=-1)


def _mix_dense(x_XD, w_gate_EDF, w_up_EDF, w_down_EFD, choice_XA, weight_XA,
               kind):
  """Every token through every expert: the definition, slow."""
  one_XAE = jax.nn.one_hot(choice_XA, w_gate_EDF.shape[0])
  weight_XE = jnp.einsum("XAE,XA->XE", one_XAE, weight_XA)
  gate_XEF = jnp.einsum("XD,EDF->XEF", x_XD, w_gate_EDF)
  up_XEF = jnp.einsum("XD,EDF->XEF", x_XD, w_up_EDF)
  f_XEF = glu.activate(kind, gate_XEF, up_XEF)
  y_XED = jnp.einsum("XEF,EFD->XED", f_XEF, w_down_EFD)
  square_XA = jnp.take_along_axis(_mean_square(f_XEF), choice_XA, axis=1)
  return jnp.einsum("XED,XE->XD", y_XED.astype(jnp.float32),
                    weight_XE), square_XA


class LatentExperts(nn.Module):
  """Routed experts that live in a latent, and shared ones at full width.

    y = shared(x) + w_expand norm(sum_a weight_a E_a(w_compress x))

  The router reads the full width. Padding tokens come out as zero, count in
  no statistic and change no other token; nor, without a capacity, does any
  token.

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
    router: "hidden" reads logits off the input, "prototype" from similarity
      in a space of its own, see `prototypes`.
    routing_width: of that space.
    similarity: see `prototypes.similarity`.
    noise: deviation of the noise on logits that a training choice is made by;
      weights do not see it.
    capacity_factor: most tokens of an expert in training, in fair shares; the
      others lose it, those of lowest score first. 0: no limit.
    balance: one of `balance.FORMS`; decides what is counted and remembered.
    glu: activation, see `glu.ACTIVATIONS`.
    input_norm: of all units, see `glu.normalize_input`.
    activations: count the experts' mean square activation.
    training: noise and capacity apply.
    epsilon: of the latent's and the inputs' RMSNorm.
    implementation: see `resolve`.

  Collections:
    router: reads threshold_E; declares recent_E and start_ER for those who
      read them. Written by `balance.update` only.
    statistics: adds load_E, and by form histogram_EZ, score_sum_E, dropped,
      square_sum_E, where it is mutable. Loads are those that the router
      asked for, before any drop.

  Rngs:
    noise: read in training where there is noise.
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
  router: str = "hidden"
  routing_width: int = 64
  similarity: str = "cosine"
  noise: float = 0.
  capacity_factor: float = 0.
  balance: str = "quantile"
  glu: str = "situ"
  input_norm: bool = False
  activations: bool = False
  training: bool = False
  epsilon: float = 1e-5
  implementation: str = ""

  @nn.compact
  def __call__(self, x_BTD, valid_BT):
    width = x_BTD.shape[-1]
    rank = self.latent or width
    dtype = x_BTD.dtype
    x_XD = x_BTD.reshape(-1, width)
    valid_X = valid_BT.reshape(-1)
    choice_XA, weight_XA = self._route(x_XD, valid_X)

    z_XR = x_XD
    if self.latent:
      z_XR = linear.linear(
          x_XD, linear.weight(self, "w_compress_DR", width, rank))
    if self.input_norm:
      z_XR = glu.normalize_input(z_XR, self.epsilon)
    inner = self.experts, rank, self.hidden
    outer = self.experts, self.hidden, rank
    y_XD, square_XA = mix(
        z_XR, linear.weight(self, "w_gate_ERF", *inner).astype(dtype),
        linear.weight(self, "w_up_ERF", *inner).astype(dtype),
        linear.weight(self, "w_down_EFR", *outer).astype(dtype),
        choice_XA, weight_XA, self.glu, self.implementation)
    y_XD = y_XD.astype(dtype)
    if self.activations and self._counts():
      self._count("square_sum_E", self._by_expert(
          choice_XA, jnp.where(valid_X[:, None], square_XA, 0.)))
    if self.latent:
      u_XR = norm.RMSNorm(self.epsilon, name="latent_norm")(y_XD)
      y_XD = linear.linear(
          u_XR, linear.weight(self, "w_expand_RD", rank, width))
    y_BTD = y_XD.reshape(x_BTD.shape)
    if self.shared:
      y_BTD += glu.GatedUnit(self.shared * self.hidden, self.glu,
                             self.input_norm, self.epsilon,
                             name="shared")(x_BTD)
    # Zero here, so no gradient reaches padding, its router scores included.
    return jnp.where(valid_BT[..., None], y_BTD, 0)

  def _route(self, x_XD, valid_X):
    """Chooses experts, weighs them, and counts when asked to."""
    top = self.experts_per_token
    threshold_E = self.variable("router", "threshold_E", jnp.zeros,
                                (self.experts,), jnp.float32).value
    if self.balance in balance.REMEMBERS:
      self.variable("router", "recent_E", jnp.ones, (self.experts,),
                    jnp.float32)
    logits_XE = self._logits(x_XD)
    s_XE = picked_XE = jax.nn.sigmoid(logits_XE)
    if self.training and self.noise:
      picked_XE = router.disturbed_scores(logits_XE, self.noise,
                                          self.make_rng("noise"))
    choice_XA, cutoff_X = router.choose(picked_XE, threshold_E, top,
                                        self.groups, self.groups_per_token)
    if self.router == "prototype" and self.renormalize:
      weight_XA = router.soft_assignment(logits_XE, choice_XA, self.scale)
    else:
      weight_XA = router.weights(s_XE, choice_XA, self.scale,
                                 self.renormalize)
    if self.training and self.capacity_factor:
      weight_XA = self._limit(s_XE, choice_XA, weight_XA, valid_X)
    if self._counts():
      count_XA = jnp.broadcast_to(valid_X[:, None], choice_XA.shape)
      self._count("load_E", self._by_expert(choice_XA,
                                            count_XA.astype(jnp.int32)))
      if self.balance == "quantile":
        self._count("histogram_EZ", balance.histogram(
            picked_XE, cutoff_X, threshold_E, valid_X))
      elif self.balance == "aux_loss":
        self._count("score_sum_E", balance.score_sums(s_XE, valid_X))
    return choice_XA, weight_XA

  def _logits(self, x_XD):
    width = x_XD.shape[1]
    if self.router == "hidden":
      return router.logits(
          x_XD, linear.weight(self, "w_router_DE", width, self.experts))
    if self.router != "prototype":
      raise ValueError(f"router={self.router!r} is neither 'hidden' nor "
                       "'prototype'")
    w_router_DR = linear.weight(self, "w_router_DR", width,
                                self.routing_width)
    prototype_ER = self.param("prototype_ER", prototypes.dispersed,
                              (self.experts, self.routing_width))
    self.variable("router", "start_ER", lambda: prototype_ER)
    temperature = self.param("temperature", nn.initializers.zeros, (),
                             jnp.float32)
    x_XD = norm.RMSNorm(self.epsilon, name="router_norm")(
        x_XD.astype(jnp.float32))
    return prototypes.logits(x_XD, w_router_DR, prototype_ER, temperature,
                             self.similarity)

  def _limit(self, s_XE, choice_XA, weight_XA, valid_X):
    """Weight zero for pairs over capacity; the others keep theirs."""
    keep_XA = capacity.keep(
        jnp.take_along_axis(s_XE, choice_XA, axis=1), choice_XA, valid_X,
        capacity.most(valid_X, choice_XA.shape[1], self.experts,
                      self.capacity_factor), self.experts)
    if self._counts():
      self._count("dropped", jnp.sum(~keep_XA & valid_X[:, None],
                                     dtype=jnp.int32))
    return jnp.where(keep_XA, weight_XA, 0.)

  def _by_expert(self, choice_XA, value_XA):
    return jnp.zeros(self.experts, value_XA.dtype).at[choice_XA].add(value_XA)

  def _counts(self):
    return (self.is_mutable_collection("statistics")
            and not self.is_initializing())

  def _count(self, name, value):
    self.sow("statistics", name, value, init_fn=lambda: 0,
             reduce_fn=lambda a, b: a + b)
