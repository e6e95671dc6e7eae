"""The decoder: a pattern of attention layers, mixed over depth."""
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from ultralong_jax.layers import cross_layer, delta_attention, depth_residual
from ultralong_jax.layers import experts, fused_attention, glu
from ultralong_jax.layers import latent_attention, norm
from ultralong_jax.layers import position as position_lib
from ultralong_jax.models import depth_plan, multi_token, stack, vision
from ultralong_jax.models import state as state_lib


class Hybrid(nn.Module):
  """Decoder of delta and latent attention, experts and depth mixing.

  Attributes:
    vocab: rows of the embedding.
    width: channels of the residual stream.
    layers: how many.
    pattern: a letter a layer, d delta, m latent, f both fused; repeated to
      `layers`.
    heads, key_width, value_width, conv_width, floor, gate_rank: of delta
      layers.
    latent_heads, latent_key_width, latent_shared_width, latent_value_width,
      latent_rank, query_rank, latent_gate: of latent layers.
    position: of latent layers, "none" or "rope".
    rope_base, rope_scaling, rope_factor, rope_context: see `position.Rotary`;
      another value needs no other parameters.
    fusion: of fused layers, which are otherwise both of the above.
    dense_layers: first layers whose feed-forward is dense.
    dense_hidden: its hidden width.
    experts, experts_per_token, expert_hidden, expert_latent, shared_experts,
      routed_scale, routed_renormalize, expert_groups,
      expert_groups_per_token: of the other layers' experts.
    router, routing_width, router_similarity, router_noise, capacity_factor,
      balance, expert_activations: of their routing, see
      `experts.LatentExperts`.
    glu: activation of all gated units.
    glu_input_norm: their input is scaled to mean square one.
    depth: "block_attention", or "residual" for plain sums.
    block_layers: layers whose outputs are summed to one source of the mix, and
      that may share.
    injection_stride, injection_span: the attention outputs of layers 0,
      stride, 2 stride, ... are added, transformed, to the attention inputs of
      the next span layers each; a stride of 0: none are.
    share: "latent", "gates" or "latent+gates" of a block's first layer that
      has them serve its later ones; "none".
    norm_epsilon: of all norms but the latents'.
    remat: "layer" recomputes each layer in the backward pass, "none" keeps
      its activations.
    dtype: of activations and matmuls; parameters are float32.
    implementation: of `pallas_kernels.kda`; "" lets it choose.
    tied_embedding: the unembedding is the embedding, not a parameter.
    mtp: there is one more layer that predicts the token after the next, of
      the pattern's last letter and the last layer's feed-forward; see `draft`.
    vision: how images are read, "none", "tower" or "direct".
    vision_patch, vision_channels: pixels along a patch's side, values of one.
    vision_merge, vision_grid, vision_layers, vision_width, vision_heads,
      vision_key_width, vision_hidden: see `vision.Encoder`.
    training: what only training does applies: noise and capacity of experts.
      No leaf of a config; `train.step` sets it.

  Collections:
    params: trained.
    router: thresholds of the experts; read here, written by
      `balance.update` between steps.
    statistics: written where mutable; loads, histograms, decays.

  Rngs:
    noise: of the router, in training with `router_noise`.
  """
  vocab: int
  width: int
  layers: int
  pattern: str
  heads: int
  key_width: int
  value_width: int
  conv_width: int
  floor: float
  latent_heads: int
  latent_key_width: int
  latent_shared_width: int
  latent_value_width: int
  latent_rank: int
  query_rank: int
  latent_gate: str
  dense_layers: int
  dense_hidden: int
  experts: int
  experts_per_token: int
  expert_hidden: int
  expert_latent: int
  shared_experts: int
  routed_scale: float
  glu: str
  depth: str
  block_layers: int
  norm_epsilon: float
  remat: str
  dtype: str
  implementation: str
  # A config.json that was written before these has none of them.
  gate_rank: int = 0
  routed_renormalize: bool = True
  expert_groups: int = 1
  expert_groups_per_token: int = 1
  tied_embedding: bool = False
  fusion: str = "token"
  position: str = "none"
  rope_base: float = 10_000.0
  rope_scaling: str = "none"
  rope_factor: float = 1.0
  rope_context: int = 4_096
  mtp: bool = False
  injection_stride: int = 0
  injection_span: int = 1
  share: str = "none"
  vision: str = "none"
  vision_patch: int = 14
  vision_channels: int = 3
  vision_merge: int = 2
  vision_grid: int = 64
  vision_layers: int = 27
  vision_width: int = 1024
  vision_heads: int = 12
  vision_key_width: int = 128
  vision_hidden: int = 4096
  router: str = "hidden"
  routing_width: int = 64
  router_similarity: str = "cosine"
  router_noise: float = 0.
  capacity_factor: float = 0.
  balance: str = "quantile"
  expert_activations: bool = False
  glu_input_norm: bool = False
  training: bool = False

  def setup(self):
    normal = nn.initializers.normal(0.02)
    self.w_embed_WD = self.param("w_embed_WD", normal,
                                 (self.vocab, self.width), jnp.float32)
    self.w_unembed_DW = self.w_embed_WD.T if self.tied_embedding else (
        self.param("w_unembed_DW", normal, (self.width, self.vocab),
                   jnp.float32))
    self.stack = stack.Stack(self._parts(), self.plan())
    self.final_norm = norm.RMSNorm(self.norm_epsilon)
    if self.mtp:
      self.ahead = multi_token.Ahead(self._parts(), self.ahead_plan())
    if self.vision != "none":
      self.images = vision.encoder_of(self)

  def __call__(self, tokens_BT, segment_ids_BT=None, positions_BT=None,
               state=None, seen=None):
    """Predicts each token's successor.

    Args:
      tokens_BT: ids below `vocab`.
      segment_ids_BT: documents of a packed row: a change of id starts one, 0
        is trailing padding. None: each row is one document, without padding,
        that goes on from `state` if there is one.
      positions_BT: inside the document; None: counted here.
      state: a `State`, or None when nothing precedes or follows.
      seen: (media_BND, index_BT), embeddings of images from `see`, and which
        of them stands at each token, -1 for text; None without images.

    Returns:
      logits_BTW: float32. A row that outgrew `state.capacity` is NaN.
      state: after the last real token; None for None.
    """
    hidden_BTD, state = self.features(tokens_BT, segment_ids_BT, positions_BT,
                                      state, seen)
    if self.mtp and self.is_initializing():  # makes its parameters
      self.draft(hidden_BTD, tokens_BT, segment_ids_BT, positions_BT)
    logits_BTW = jnp.einsum(
        "BTD,DW->BTW", hidden_BTD, self.w_unembed_DW.astype(hidden_BTD.dtype),
        preferred_element_type=jnp.float32)
    return logits_BTW, state

  def features(self, tokens_BT, segment_ids_BT=None, positions_BT=None,
               state=None, seen=None):
    """As `__call__`, but returns what the unembedding reads: hidden_BTD."""
    return self.decode(self.embed(tokens_BT, seen), segment_ids_BT,
                       positions_BT, state)

  def embed(self, tokens_BT, seen=None):
    """Returns what stands at each token, NaN for ids past the vocabulary."""
    x_BTD = self.w_embed_WD.astype(self.dtype).at[tokens_BT].get(
        mode="fill", fill_value=jnp.nan)
    if self.vision != "none" and self.is_initializing():
      self.see(vision.blank(self))  # makes its parameters
    return x_BTD if seen is None else vision.place(x_BTD, seen)

  def see(self, images):
    """Encodes `vision.Images`; returns media_BND for `seen`."""
    vision.check(self.vision)
    return self.images(images)

  def decode(self, x_BTD, segment_ids_BT=None, positions_BT=None, state=None):
    """As `features`, from embeddings instead of tokens."""
    return self._run(self.stack, x_BTD, segment_ids_BT, positions_BT, state)

  def draft(self, hidden_BTD, next_BT, segment_ids_BT=None, positions_BT=None,
            state=None, seen=None):
    """Predicts the token after the next, by the layer that `mtp` adds.

    Training adds its loss. A draft model goes on from the model's own step,
    which has just chosen x_{t+1}, and may go on from its own:

      hidden_t of `features`, x_{t+1}  ->  hidden'_t, x_{t+2} by the unembedding
      hidden'_t, x_{t+2}  ->  hidden''_t, x_{t+3}

    Args:
      hidden_BTD: what `features`, or this, returned for the same tokens.
      next_BT: the token after each; of a document's last one, its target.
      segment_ids_BT: as in `__call__`, of the tokens, not of those after them.
      positions_BT: likewise.
      state: of `empty_draft_state`, beside the model's own, or None.
      seen: as in `__call__`, of the tokens after them.

    Returns:
      hidden_BTD: what the unembedding reads.
      state: after the last real token; None for None.
    """
    next_BTD = self.embed(next_BT, seen)
    return self._run(functools.partial(self.ahead, hidden_BTD), next_BTD,
                     segment_ids_BT, positions_BT, state)

  def _run(self, layers, x_BTD, segment_ids_BT, positions_BT, state):
    """Runs `layers`, which see documents, and carries the state on."""
    if segment_ids_BT is None:
      segment_ids_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
      if state is not None:
        segment_ids_BT *= jnp.maximum(state.segment_id_B, 1)[:, None]
    documents_BT, continues_B = state_lib.number_documents(
        segment_ids_BT, state)
    if positions_BT is None:
      positions_BT = state_lib.count_positions(
          documents_BT, continues_B, state)
    x_BTD, after = layers(
        x_BTD, (documents_BT, positions_BT, continues_B),
        None if state is None else state.layers)
    hidden_BTD = self.final_norm(x_BTD)
    if state is None:
      return hidden_BTD, None
    state = state_lib.advance(state, after, segment_ids_BT, documents_BT,
                              positions_BT)
    full_B = state.length_B > state.capacity
    hidden_BTD = jnp.where(full_B[:, None, None], jnp.nan, hidden_BTD)
    return hidden_BTD, state

  def _parts(self):
    make = functools.partial
    mix = None
    if self.depth == "block_attention":
      mix = make(depth_residual.DepthMix, epsilon=self.norm_epsilon)
    delta = dict(
        heads=self.heads, key_width=self.key_width,
        value_width=self.value_width, conv_width=self.conv_width,
        floor=self.floor, gate_rank=self.gate_rank, epsilon=self.norm_epsilon,
        implementation=self.implementation)
    rotary = None
    if self.position == "rope":
      rotary = position_lib.Rotary(self.rope_base, self.rope_scaling,
                                   self.rope_factor, self.rope_context)
    latent = dict(
        heads=self.latent_heads, key_width=self.latent_key_width,
        shared_width=self.latent_shared_width,
        value_width=self.latent_value_width, rank=self.latent_rank,
        query_rank=self.query_rank, gate=self.latent_gate, rotary=rotary)
    return stack.Parts(
        delta=make(delta_attention.KimiDeltaAttention, **delta),
        latent=make(latent_attention.LatentAttention, **latent),
        fused=make(
            fused_attention.FusedAttention,
            delta=make(fused_attention.DeltaPath, **delta),
            latent=make(fused_attention.LatentPath, **latent),
            fusion=self.fusion, gate_rank=self.gate_rank,
            epsilon=self.norm_epsilon),
        dense=make(glu.GatedUnit, hidden=self.dense_hidden, kind=self.glu,
                   input_norm=self.glu_input_norm, epsilon=self.norm_epsilon),
        experts=make(
            experts.LatentExperts, experts=self.experts,
            experts_per_token=self.experts_per_token,
            hidden=self.expert_hidden, latent=self.expert_latent,
            shared=self.shared_experts, scale=self.routed_scale,
            renormalize=self.routed_renormalize, groups=self.expert_groups,
            groups_per_token=self.expert_groups_per_token,
            router=self.router, routing_width=self.routing_width,
            similarity=self.router_similarity, noise=self.router_noise,
            capacity_factor=self.capacity_factor, balance=self.balance,
            glu=self.glu, input_norm=self.glu_input_norm,
            activations=self.expert_activations, training=self.training,
            epsilon=self.norm_epsilon),
        norm=make(norm.RMSNorm, epsilon=self.norm_epsilon), mix=mix,
        injection=make(cross_layer.Injection, epsilon=self.norm_epsilon),
        remat=self.remat == "layer")

  def plan(self):
    """Which layers there are, and what is scanned; see `depth_plan`."""
    share = () if self.share == "none" else tuple(self.share.split("+"))
    whole = self.depth == "residual" and not share
    return depth_plan.plan(
        self.pattern, self.layers, self.dense_layers,
        self.layers if whole else self.block_layers,
        (self.injection_stride, self.injection_span), share)

  def ahead_plan(self):
    """The plan of the layer that `mtp` adds."""
    kinds = (self.pattern * self.layers)[:self.layers]
    return depth_plan.plan(kinds[-1], 1, self.dense_layers // self.layers, 1)


def unembedding(params):
  """Returns w_unembed_DW of a Hybrid's parameters, tied or not."""
  if "w_unembed_DW" in params:
    return params["w_unembed_DW"]
  return params["w_embed_WD"].T


def empty_state(model, batch, capacity):
  """The state before the first token.

  Args:
    model: a `Hybrid`.
    batch: rows.
    capacity: tokens a row may take in; only latent layers pay for it.

  Returns:
    A `State`. Leaves have the rows first; those of scanned layers have the
    layer before that.
  """
  return _empty(model, model.plan(), batch, capacity)


def empty_draft_state(model, batch, capacity):
  """As `empty_state`, of the layer that `Hybrid.draft` runs."""
  return _empty(model, model.ahead_plan(), batch, capacity)


def _empty(model, plan, batch, capacity):
  m, dtype = model, jnp.dtype(model.dtype)

  def one(layer):
    if layer.kind == "d":
      return delta_attention.empty_delta_state(
          batch, m.heads, m.key_width, m.value_width, m.conv_width, dtype)
    if layer.kind == "f":
      return fused_attention.FusedState(one(layer._replace(kind="d")),
                                        one(layer._replace(kind="m")))
    if "latent" in layer.follows:
      return None
    return latent_attention.empty_latent_state(
        batch, capacity, m.latent_rank, m.latent_shared_width, dtype)

  def stacked(repeats, tree):
    return jax.tree.map(lambda x: jnp.repeat(x[None], repeats, axis=0), tree)

  layers = {}
  for block_name, block, block_repeats in plan:
    own = {}
    for name, group, repeats in block:
      if repeats == 1:
        own[name] = one(group[0])
      else:
        own[name] = stacked(repeats, {x.name: one(x) for x in group})
    layers[block_name] = own if block_repeats == 1 else stacked(block_repeats,
                                                                own)
  zeros_B = jnp.zeros(batch, jnp.int32)
  return state_lib.State(layers, zeros_B, zeros_B, zeros_B, zeros_B,
                         capacity=capacity)


def bytes_per_token(model):
  """What one more token of capacity adds to a row's state, in bytes."""
  one, two = (sum(math.prod(x.shape) * x.dtype.itemsize for x in
                  jax.tree.leaves(jax.eval_shape(functools.partial(
                      empty_state, model, 1, capacity))))
              for capacity in (1, 2))
  return two - one
