r"""The published form at 4M parameters; four minutes on two CPU cores.

python -m ultralong_jax.main --config configs/tiny.py --workdir runs/tiny

Expected: at most ... validation bits per byte (experiments/...).
"""
from configs import common


def get_config(arg=None):
  """Returns the config; `:smoke` is a run of seconds, `:context=N` longer."""
  arg = common.parse_arg(arg, context=512, smoke=False)
  c = common.get_config()
  c.context = arg.context
  c.batch = max(1, 2_048 // arg.context)
  c.steps = 6 if arg.smoke else 600
  c.model.dtype = "bfloat16"
  c.optim.warmup_steps = 2 if arg.smoke else 30
  if arg.smoke:
    c.data.validation_bytes = 8_192
  return c
