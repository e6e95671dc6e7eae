r"""The published form at 3.4M parameters; four minutes on two CPU cores.

python -m ultralong_jax.main --config configs/tiny.py --workdir runs/tiny

Expected: 2.05 to 2.09 validation bits per byte at the end; a bigram model of
the corpus has 3.6 (experiments/0001_tiny_text).
"""
from configs import common


def shrink(model):
  """Sets the sizes of `model` that all tiny models have."""
  # Half of common's width and many small experts: on a slow CPU more tokens
  # are worth more than more work a token.
  model.width = 128
  model.dense_hidden = 256
  model.experts = 32
  model.expert_hidden = 96
  model.expert_latent = 96


def get_config(arg=None):
  """Returns the config; `:smoke` is a run of seconds, `:context=N` longer."""
  arg = common.parse_arg(arg, context=512, smoke=False)
  c = common.get_config()
  c.context = arg.context
  c.batch = max(1, 1_024 // arg.context)
  c.steps = 6 if arg.smoke else 540
  shrink(c.model)
  # float32: bfloat16 is emulated, so slower, on CPUs without instructions for
  # it; set model.dtype=bfloat16 where there are.
  c.model.dtype = "float32"
  c.optim.lr = 0.004
  c.optim.adam_lr = 0.004
  # A run of 540 steps has no time to wait for long averages.
  c.optim.momentum = 0.75
  c.optim.b2 = 0.99
  c.optim.weight_decay = 0.3
  c.optim.warmup_steps = 2 if arg.smoke else 15
  if arg.smoke:
    c.data.validation_bytes = 8_192
  return c
