r"""The published 2.78T model (Kimi K3, arXiv 2607.24653), 104B active.

python -m ultralong_jax.main --config configs/hybrid_2800b.py:tiny \
    --workdir runs/hybrid_tiny

93 layers, 896 experts of which a token takes 16, a latent of 3,584, depth
blocks of 12 layers; `:vision` adds its tower for images. Rates, batch and
token count of the original are not published.
"""
from configs import common


def get_config(arg=None):
  """Returns the config; `:tiny` has the same forms at CPU size."""
  arg = common.parse_arg(arg, tiny=False, vision=False)
  c = common.get_config()
  m = c.model
  if arg.tiny:
    m.pattern = "dddmdddmm"
    m.layers = 9
    m.block_layers = 4
    m.query_rank = 48
    m.experts = 16
    m.experts_per_token = 4
    m.expert_latent = 128
    m.shared_experts = 2
    return c
  c.context = 8_192
  c.batch = 2_048  # 16M tokens
  m.vocab = 163_840
  m.width = 7_168
  m.layers = 93
  m.pattern = "dddm" * 23 + "m"
  m.heads = m.latent_heads = 96
  m.key_width = m.value_width = 128
  m.latent_key_width = m.latent_value_width = 128
  m.latent_shared_width = 64
  m.latent_rank = 512
  m.query_rank = 1_536
  m.dense_hidden = 33_792
  m.experts = 896
  m.experts_per_token = 16
  m.expert_hidden = 3_072
  m.expert_latent = 3_584
  m.shared_experts = 2
  m.block_layers = 12
  m.remat = "layer"
  m.dtype = "bfloat16"
  c.optim.warmup_steps = 10
  if arg.vision:
    m.update(common.published_tower())
  return c
