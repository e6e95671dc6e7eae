"""Kimi Linear on the hub: its config.json, and its tensors' names and shapes.

As released (moonshotai/Kimi-Linear-48B-A3B-Instruct) and as transformers
writes it: the spellings of both are read, those of both are written.
"""
from typing import NamedTuple

from ultralong_jax.interop.safetensors_file import Refusal
from ultralong_jax.models import depth_plan

# Hub's names of one thing; the first is written.
SPELLINGS = (
    ("num_experts", "num_local_experts"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_shared_experts", "n_shared_experts"),
    ("num_expert_group", "n_group"),
    ("moe_renormalize", "norm_topk_prob"),
    ("model_max_length", "max_position_embeddings"),
    ("dtype", "torch_dtype"),
)
# The only values that have a counterpart here; absent is as good.
FIXED = {
    "model_type": ("kimi_linear",), "hidden_act": ("silu",),
    "attention_bias": (False,), "mla_use_nope": (True,),
    "mla_use_output_gate": (False,), "rope_scaling": (None,),
    "moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0, None), "quantization_config": (None,),
    "routed_expert_hidden_size": (None,), "attn_res_block_size": (None,),
    "vision_config": (None,),
}
KINDS = {"linear_attention": "d", "full_attention": "m"}
REQUIRED = object()


def to_model(hub: dict, where: str) -> dict:
  """Returns the fields of models.hybrid.Hybrid.

  Args:
    hub: a config.json.
    where: its file, for errors.

  Raises:
    Refusal: lists every field that is missing or has no counterpart here.
  """
  errors = [f"{name}={hub[name]!r}: only {allowed[0]!r} can be read"
            for name, allowed in FIXED.items()
            if name in hub and hub[name] not in allowed]

  def get(name, default=REQUIRED, source=hub):
    names = next((s for s in SPELLINGS if name in s), (name,))
    for spelled in names:
      if source.get(spelled) is not None:
        return source[spelled]
    if default is REQUIRED:
      errors.append(f"{' or '.join(names)} is missing")
      return 0
    return default

  linear = hub.get("linear_attn_config") or {}
  for name in ("use_full_rank_gate", "gate_lower_bound"):
    if linear.get(name):
      errors.append(f"linear_attn_config.{name}={linear[name]!r}: cannot be "
                    "read")

  def get_linear(inside, outside):
    return get(inside, None, linear) or get(outside)

  layers, heads = get("num_hidden_layers"), get("num_attention_heads")
  if get("num_key_value_heads", heads) != heads:
    errors.append(f"num_key_value_heads={hub['num_key_value_heads']}: only "
                  f"num_attention_heads={heads} can be read")
  head = get_linear("head_dim", "linear_head_dim")
  dtype = get("dtype", "float32")
  if dtype not in ("float32", "bfloat16"):
    errors.append(f"dtype={dtype!r}: float32 and bfloat16 can be read")
  groups = get("num_expert_group", 1) if get("use_grouped_topk", True) else 1
  model = dict(
      vocab=get("vocab_size"), width=get("hidden_size"), layers=layers,
      pattern=_pattern(hub, linear, layers, errors),
      norm_epsilon=float(get("rms_norm_eps")),
      heads=get_linear("num_heads", "linear_num_heads"), key_width=head,
      value_width=head, floor=None, gate_rank=head,
      conv_width=get_linear("short_conv_kernel_size",
                            "linear_conv_kernel_dim"),
      latent_heads=heads, latent_key_width=get("qk_nope_head_dim"),
      latent_shared_width=get("qk_rope_head_dim"),
      latent_value_width=get("v_head_dim"), latent_rank=get("kv_lora_rank"),
      query_rank=get("q_lora_rank", 0), latent_gate="none",
      position="none", rope_scaling="none", rope_factor=1.0, mtp=False,
      glu="swiglu",
      dense_layers=_dense_layers(hub, layers, errors),
      dense_hidden=get("intermediate_size"), experts=get("num_experts"),
      experts_per_token=get("num_experts_per_token"),
      expert_hidden=get("moe_intermediate_size"), expert_latent=0,
      shared_experts=get("num_shared_experts"),
      routed_scale=float(get("routed_scaling_factor")),
      routed_renormalize=bool(get("moe_renormalize")), expert_groups=groups,
      expert_groups_per_token=get("topk_group", 1) if groups > 1 else 1,
      depth="residual", block_layers=max(layers, 1), injection_stride=0,
      share="none", vision="none", router="hidden", glu_input_norm=False,
      tied_embedding=bool(get("tie_word_embeddings", False)), remat="none",
      dtype=dtype, implementation="")
  if errors:
    raise Refusal(f"{where} describes no model that can be read here:\n  "
                  + "\n  ".join(errors) + "\ngive a Kimi Linear checkpoint")
  return model


def _pattern(hub, linear, layers, errors):
  """The shortest pattern that repeats to the layers' kinds."""
  if hub.get("layer_types") is not None:
    kinds = [KINDS.get(kind) for kind in hub["layer_types"]]
    if None in kinds or len(kinds) != layers:
      errors.append(f"layer_types={hub['layer_types']}: has to be one of "
                    f"{', '.join(KINDS)} for each of {layers} layers")
      return ""
  else:
    full, delta = (linear.get(name) for name in ("full_attn_layers",
                                                 "kda_layers"))
    if full is None or delta is None or sorted([*full, *delta]) != list(
        range(1, layers + 1)):
      errors.append(
          f"linear_attn_config.full_attn_layers={full} and kda_layers={delta} "
          f"(or layer_types): have to name each layer from 1 to {layers} once")
      return ""
    kinds = ["m" if i + 1 in full else "d" for i in range(layers)]
  kinds = "".join(kinds)
  return next(kinds[:size] for size in range(1, layers + 1)
              if (kinds[:size] * layers)[:layers] == kinds)


def _dense_layers(hub, layers, errors):
  kinds = hub.get("mlp_layer_types")
  if kinds is None:
    return hub.get("first_k_dense_replace", 1)
  dense = kinds.count("dense")
  if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
    errors.append(f"mlp_layer_types={kinds}: only dense layers before sparse "
                  f"ones, {layers} together, can be read")
  return dense


def to_hub(model, hub=None) -> dict:
  """Returns the config.json of a Hybrid.

  Args:
    model: Hybrid.
    hub: a config.json whose other fields are kept, such as token ids.

  Raises:
    Refusal: lists every field that the hub's model has no counterpart for.
  """
  m = model
  wanted = dict(floor=None, gate_rank=m.key_width, value_width=m.key_width,
                latent_gate="none", position="none", mtp=False,
                glu="swiglu", expert_latent=0, router="hidden",
                glu_input_norm=False, vision="none",
                depth="residual", injection_stride=0, share="none")
  errors = [f"model.{name}={getattr(m, name)!r}: has to be {value!r}"
            for name, value in wanted.items() if getattr(m, name) != value]
  if set(m.pattern) - set(KINDS.values()):
    errors.append(f"model.pattern={m.pattern!r}: only the letters d and m have "
                  "a counterpart")
  if m.shared_experts < 1:
    errors.append("model.shared_experts=0: has to be 1 or more")
  if errors:
    raise Refusal("this model is no Kimi Linear, so it cannot be exported as "
                  "one:\n  " + "\n  ".join(errors))
  kinds = (m.pattern * m.layers)[:m.layers]
  names = {letter: name for name, letter in KINDS.items()}
  stale = {name for spelled in SPELLINGS for name in spelled[1:]}
  config = {name: value for name, value in (hub or {}).items()
            if name not in stale}
  config.setdefault("model_max_length", 1_048_576)
  return config | dict(
      architectures=["KimiLinearForCausalLM"], model_type="kimi_linear",
      vocab_size=m.vocab, hidden_size=m.width, num_hidden_layers=m.layers,
      layer_types=[names[kind] for kind in kinds],
      mlp_layer_types=(["dense"] * m.dense_layers
                       + ["sparse"] * (m.layers - m.dense_layers)),
      first_k_dense_replace=m.dense_layers, moe_layer_freq=1,
      linear_attn_config=dict(
          full_attn_layers=[i + 1 for i, k in enumerate(kinds) if k == "m"],
          kda_layers=[i + 1 for i, k in enumerate(kinds) if k == "d"],
          head_dim=m.key_width, num_heads=m.heads,
          short_conv_kernel_size=m.conv_width),
      linear_head_dim=m.key_width, linear_num_heads=m.heads,
      linear_conv_kernel_dim=m.conv_width, rms_norm_eps=m.norm_epsilon,
      num_attention_heads=m.latent_heads, num_key_value_heads=m.latent_heads,
      qk_nope_head_dim=m.latent_key_width,
      qk_rope_head_dim=m.latent_shared_width, v_head_dim=m.latent_value_width,
      kv_lora_rank=m.latent_rank, q_lora_rank=m.query_rank or None,
      mla_use_nope=True, attention_bias=False, hidden_act="silu",
      intermediate_size=m.dense_hidden, moe_intermediate_size=m.expert_hidden,
      num_experts=m.experts, num_experts_per_token=m.experts_per_token,
      num_shared_experts=m.shared_experts,
      num_expert_group=m.expert_groups, topk_group=m.expert_groups_per_token,
      use_grouped_topk=True, moe_renormalize=m.routed_renormalize,
      moe_router_activation_func="sigmoid",
      routed_scaling_factor=m.routed_scale,
      tie_word_embeddings=m.tied_embedding, dtype=m.dtype)


class Piece(NamedTuple):
  """A part of a hub's tensor and where it goes; see `huggingface.split`.

  Attributes:
    leaf: name of the parameter.
    index: into its leading axes: layers, experts.
    heads: the tensor's rows are so many heads' rows.
    start: first row of a head.
    stop: end of its rows.
    transpose: rows of the hub are outputs; here inputs come first.
  """
  leaf: str
  index: tuple
  heads: int
  start: int
  stop: int
  transpose: bool


class Tensor(NamedTuple):
  """A tensor of the hub: its name, its shape, and its pieces."""
  name: str
  shape: tuple
  pieces: tuple


def tensors(model) -> list:
  """Returns a Tensor for everything that a checkpoint of `model` holds."""
  m = model
  found = [_tensor("model.embed_tokens.weight", (m.vocab, m.width),
                   "params/w_embed_WD", transpose=False)]
  paths = depth_plan.layer_paths(m.plan())
  kinds = (m.pattern * m.layers)[:m.layers]
  for i, (path, index) in enumerate(paths):
    root = "/".join(("stack", *path))
    parts = _delta(m) if kinds[i] == "d" else _latent(m)
    parts += [("input_layernorm.weight", (m.width,), "attention_norm/scale_D"),
              ("post_attention_layernorm.weight", (m.width,),
               "feed_forward_norm/scale_D")]
    if i < m.dense_layers:
      parts += _unit("mlp", m.width, m.dense_hidden, "dense")
    else:
      parts += _unit("block_sparse_moe.shared_experts", m.width,
                     m.shared_experts * m.expert_hidden, "experts/shared")
      parts += [("block_sparse_moe.gate.weight", (m.experts, m.width),
                 "experts/w_router_DE")]
    for name, shape, *leaves in parts:
      found.append(_tensor(f"model.layers.{i}.{name}", shape, *[
          (f"params/{root}/{leaf[0]}", *leaf[1:]) if isinstance(leaf, tuple)
          else f"params/{root}/{leaf}" for leaf in leaves], index=index))
    if i >= m.dense_layers:
      found += _experts(m, i, root, index)
  found.append(_tensor("model.norm.weight", (m.width,),
                       "params/final_norm/scale_D"))
  if not m.tied_embedding:
    found.append(_tensor("lm_head.weight", (m.vocab, m.width),
                         "params/w_unembed_DW"))
  return found


def _tensor(name, shape, *leaves, index=(), transpose=True):
  """A leaf is a name, or a name with heads, start and stop."""
  pieces = [Piece(leaf, index, 1, 0, shape[0], transpose)
            if isinstance(leaf, str) else
            Piece(leaf[0], index, *leaf[1:], transpose) for leaf in leaves]
  return Tensor(name, shape, tuple(pieces))


def _delta(m):
  rows, a = m.heads * m.key_width, "self_attn."
  parts = [(f"{a}{x}_proj.weight", (rows, m.width), f"attention/w_{x}_DH{axis}")
           for x, axis in ("qK", "kK", "vV")]
  parts += [(f"{a}{x}_conv1d.weight", (rows, 1, m.conv_width),
             f"attention/conv_{x}_IH{axis}") for x, axis in ("qK", "kK", "vV")]
  return parts + [
      (a + "A_log", (1, 1, m.heads, 1), "attention/a_log_H"),
      (a + "dt_bias", (rows,), "attention/dt_bias_HK"),
      (a + "f_a_proj.weight", (m.key_width, m.width),
       "attention/w_decay_down_DR"),
      (a + "f_b_proj.weight", (rows, m.key_width), "attention/w_decay_up_RHK"),
      (a + "g_a_proj.weight", (m.gate_rank, m.width),
       "attention/w_gate_down_DR"),
      (a + "g_b_proj.weight", (rows, m.gate_rank), "attention/w_gate_up_RHV"),
      (a + "b_proj.weight", (m.heads, m.width), "attention/w_beta_DH"),
      (a + "o_norm.weight", (m.value_width,), "attention/scale_V"),
      (a + "o_proj.weight", (m.width, rows), "attention/w_out_HVD")]


def _latent(m):
  a, heads, rank = "self_attn.", m.latent_heads, m.latent_rank
  key, shared, value = (m.latent_key_width, m.latent_shared_width,
                        m.latent_value_width)
  parts = [
      (a + "kv_a_proj_with_mqa.weight", (rank + shared, m.width),
       ("attention/w_down_DR", 1, 0, rank),
       ("attention/w_shared_DU", 1, rank, rank + shared)),
      (a + "kv_a_layernorm.weight", (rank,), "attention/latent_scale_R"),
      (a + "kv_b_proj.weight", (heads * (key + value), rank),
       ("attention/w_k_up_RHK", heads, 0, key),
       ("attention/w_v_up_RHV", heads, key, key + value)),
      (a + "o_proj.weight", (m.width, heads * value), "attention/w_out_HVD")]
  rows = heads * (key + shared)
  if not m.query_rank:
    return [(a + "q_proj.weight", (rows, m.width), "attention/w_q_DHK"),
            *parts]
  return [
      (a + "q_a_proj.weight", (m.query_rank, m.width),
       "attention/w_q_down_DQ"),
      (a + "q_a_layernorm.weight", (m.query_rank,), "attention/query_scale_Q"),
      (a + "q_b_proj.weight", (rows, m.query_rank), "attention/w_q_up_QHK"),
      *parts]


def _unit(name, width, hidden, leaf):
  return [(f"{name}.gate_proj.weight", (hidden, width), f"{leaf}/w_gate_DF"),
          (f"{name}.up_proj.weight", (hidden, width), f"{leaf}/w_up_DF"),
          (f"{name}.down_proj.weight", (width, hidden), f"{leaf}/w_down_FD")]


def _experts(m, layer, root, index):
  name, leaf = f"model.layers.{layer}.block_sparse_moe", f"{root}/experts"
  found = [_tensor(f"{name}.gate.e_score_correction_bias", (m.experts,),
                   f"router/{leaf}/threshold_E", index=index)]
  inner, outer = (m.expert_hidden, m.width), (m.width, m.expert_hidden)
  for e in range(m.experts):
    found += [
        _tensor(f"{name}.experts.{e}.{w}.weight", shape,
                f"params/{leaf}/{ours}", index=(*index, e))
        for w, shape, ours in (("w1", inner, "w_gate_ERF"),
                               ("w2", outer, "w_down_EFR"),
                               ("w3", inner, "w_up_ERF"))]
  return found
