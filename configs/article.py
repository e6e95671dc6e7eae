r"""The two articles' own forms, where the published model chose others.

python -m ultralong_jax.main --config configs/article.py:tiny \
    --workdir runs/article

Each layer remembers and looks back at once, the two paths fused for each token
and head; latents are gated by the query and know their position; attention
outputs are injected into later layers; tokens go to the experts whose learned
prototypes they resemble, balanced by the quantiles of the experts' loads, with
noise while training; units normalise their input.
"""
from configs import common
from configs import tiny


def forms():
  """Returns the leaves of `model` in which the articles' forms differ."""
  return {
      "pattern": "f", "fusion": "token", "latent_gate": "latent",
      "position": "rope", "injection_stride": 2, "injection_span": 1,
      "router": "prototype", "balance": "load_quantile", "router_noise": 0.1,
      "glu_input_norm": True}


def get_config(arg=None):
  """Returns the config, 1.5B parameters; `:tiny` trains like tiny.py."""
  arg = common.parse_arg(arg, tiny=False)
  if arg.tiny:
    c = tiny.get_config()
    c.model.update(forms())
    c.model.routing_width = 32
    return c
  c = common.get_config()
  m = c.model
  m.update(forms())
  c.context = 4_096
  c.batch = 128
  c.steps = 50_000
  m.vocab = 32_000
  m.width = 1_024
  m.layers = 24
  m.block_layers = 6
  m.heads = m.latent_heads = 8
  m.key_width = m.value_width = 128
  m.latent_key_width = m.latent_value_width = 128
  m.latent_shared_width = 64
  m.latent_rank = 256
  m.dense_hidden = 4_096
  m.experts = 128
  m.experts_per_token = 8
  m.expert_hidden = 256
  m.expert_latent = 512
  m.routing_width = 128
  m.remat = "layer"
  m.dtype = "bfloat16"
  c.optim.lr = 0.01
  c.optim.warmup_steps = 500
  return c
