r"""Learns to read handwritten digits and words of pages, inside of text.

python -m ultralong_jax.main --config configs/tiny_vision.py \
    --workdir runs/vision

Reached after 500 steps (512,000 tokens) on held-out images, read right to the
last character by greedy decoding: 96.4 % of 364 digits, 57.3 % of 1,200 words
cut out of pages; 1.84 bits per byte of all text (bigram 3.78). That took 337 s
on two AVX2 cores, and two minutes to set up and compile (commit 470d685).
"""
from configs import common
from configs import tiny


def get_config(arg=None):
  """Returns the config; `:smoke` is a run of seconds."""
  arg = common.parse_arg(arg, context=512, smoke=False)
  c = common.get_config()
  c.context = arg.context
  c.batch = max(1, 1_024 // arg.context)
  c.steps = 6 if arg.smoke else 500
  tiny.shrink(c.model)
  c.model.experts = 16
  c.model.vision = "tower"
  c.data.source = "reading"
  c.data.patches = 512
  c.data.image_pixels = 4_096
  c.data.validation_fraction = 0.2
  c.data.validation_bytes = 65_536
  c.data.validation_context = 512
  c.optim.lr = 0.004
  c.optim.adam_lr = 0.006
  c.optim.warmup_steps = 2 if arg.smoke else 15
  if arg.smoke:
    c.data.validation_bytes = 8_192
  return c
