r"""Kimi Linear 48B-A3B as published (arXiv 2510.26692): 49.1B parameters.

python -m ultralong_jax.main --config configs/kimi_linear_48b.py:tiny \
    --workdir runs/kimi_linear_tiny

What its released checkpoints need: the unbounded gate, a low-rank output gate,
plain residuals, experts at full width. `--mode import_hf` reads them.
"""
from configs import common


def get_config(arg=None):
  """Returns the config; `:tiny` has the same forms at CPU size."""
  arg = common.parse_arg(arg, tiny=False)
  c = common.get_config()
  m = c.model
  m.balance = "none"
  m.floor = None  # softplus gate
  m.glu = "swiglu"
  m.depth = "residual"
  m.expert_latent = 0
  m.latent_gate = "none"
  if arg.tiny:
    m.pattern = "ddmddm"
    m.layers = 8
    m.gate_rank = 16
    return c
  c.context = 4_096
  c.batch = 8_192  # 32M tokens
  m.vocab = 163_840
  m.width = 2_304
  m.layers = 27
  m.pattern = "dddm" * 6 + "ddm"
  m.heads = m.latent_heads = 32
  m.key_width = m.value_width = 128
  m.gate_rank = 128
  m.latent_key_width = m.latent_value_width = 128
  m.latent_shared_width = 64
  m.latent_rank = 512
  m.dense_hidden = 9_216
  m.experts = 256
  m.experts_per_token = 8
  m.expert_hidden = 1_024
  m.routed_scale = 2.446
  m.remat = "layer"
  m.dtype = "bfloat16"
  c.optim.schedule = "wsd"
  c.optim.lr = 1.1e-3
  c.steps = 43_000  # 1.4T tokens
  c.optim.warmup_steps = 500
  c.optim.decay_steps = 8_600
  return c
