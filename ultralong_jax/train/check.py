"""Errors of a config that need no compile to be seen: check(config, ...)."""
import ml_collections
from PIL import Image

from pallas_kernels.kda import config as kda_config
from ultralong_jax import optim
from ultralong_jax.data import images
from ultralong_jax.data import reading
from ultralong_jax.data import synthetic
from ultralong_jax.layers import balance
from ultralong_jax.layers import prototypes
from ultralong_jax.models import depth_plan

CHOICES = {
    "model.balance": tuple(balance.FORMS),
    "model.router": ("hidden", "prototype"),
    "model.router_similarity": tuple(prototypes.SLOPE),
    "model.glu": ("situ", "swiglu"),
    "model.depth": ("block_attention", "residual"),
    "model.latent_gate": ("output", "latent", "none"),
    "model.position": ("none", "rope"),
    "model.rope_scaling": ("none", "linear", "yarn"),
    "model.share": ("none", "latent", "gates", "latent+gates"),
    "model.fusion": ("layer", "head", "token"),
    "model.vision": ("none", "tower", "direct"),
    "model.remat": ("none", "layer"),
    "data.source": ("text", *reading.SOURCES, "synthetic"),
    "model.dtype": ("float32", "bfloat16"),
    "optim.name": ("muon", "adamw"),
    "optim.muon": optim.FORMS,
    "optim.schedule": ("cosine", "wsd", "constant"),
}
# At least 1, and at least 0.
COUNTS = (
    "context", "batch", "accumulate", "steps", "model.vocab", "model.width",
    "model.layers", "model.expert_groups", "model.expert_groups_per_token",
    "model.heads", "model.key_width", "model.value_width",
    "model.conv_width", "model.latent_heads", "model.latent_key_width",
    "model.latent_value_width", "model.latent_rank", "model.dense_hidden",
    "model.block_layers", "model.rope_context", "model.vision_patch",
    "model.vision_merge", "model.vision_grid", "model.vision_layers",
    "model.vision_width", "model.vision_heads", "model.vision_key_width",
    "model.vision_hidden", "data.image_pixels", "data.decoded_pixels",
    "model.routing_width",
    "balance.quantile_steps", "balance.load_steps", "data.validation_bytes",
    "data.validation_context", "data.synthetic.documents",
    "data.synthetic.statements", "evaluate.recall_samples",
    "evaluate.recall_segment", "evaluate.recall_statements",
    "checkpoint.keep", "log.every_steps")
COUNTS_OR_ZERO = (
    "model.latent_shared_width", "model.query_rank", "model.gate_rank",
    "model.dense_layers", "model.injection_stride", "model.router_noise",
    "model.capacity_factor", "data.patches", "balance.load_least",
    "model.expert_latent", "model.shared_experts", "optim.warmup_steps",
    "optim.decay_steps", "optim.weight_decay", "evaluate.every_steps",
    "checkpoint.every_steps", "log.every_seconds",
    *(f"data.synthetic.shares.{task}" for task in synthetic.TASKS),
    *(f"data.synthetic.weights.{name}" for name in ("text", *synthetic.TASKS)))
POSITIVE = (
    "mtp_weight", "optim.lr", "optim.adam_lr", "optim.clip_norm",
    "model.norm_epsilon", "model.routed_scale", "balance.load_rate",
    "balance.sign_rate", "balance.loss_coefficient")
FRACTIONS = ("optim.b1", "optim.b2", "optim.momentum")  # [0, 1)


class Refusal(ValueError):
  """What the user can put right: main prints it without a stack."""


def check(config, vocab: int = 0, devices: int = 1, processes: int = 1):
  """Raises one Refusal that lists all that is wrong with a config.

  Args:
    config: the resolved config.
    vocab: the tokenizer's number of ids.
    devices: accelerators of all processes.
    processes: how many of them share a step.
  """
  # A leaf that is wrong alone would only confuse what is said of several.
  errors = list(_leaves(config)) or [
      *_model(config.model, vocab), *_rows(config, devices, processes),
      *_images(config), *_synthetic(config), *_recall(config.evaluate),
      *_optim(config), *_balance(config.balance)]
  if errors:
    raise Refusal("this config cannot run:\n  " + "\n  ".join(errors))


def _leaf(config, name: str):
  for part in name.split("."):
    config = config[part]
  return config


def _leaves(config):
  """What can be said of one leaf alone."""
  for name, choices in CHOICES.items():
    value = _leaf(config, name)
    if value not in choices:
      yield f'{name}="{value}": choose from {", ".join(choices)}'
  for names, holds, rule in (
      (COUNTS, lambda x: x >= 1, "at least 1"),
      (COUNTS_OR_ZERO, lambda x: x >= 0, "0 or more"),
      (POSITIVE, lambda x: x > 0, "above 0"),
      (FRACTIONS, lambda x: 0 <= x < 1, "from 0 to below 1"),
      (("model.rope_base",), lambda x: x > 1, "above 1"),
      (("model.rope_factor",), lambda x: x >= 1, "1 or more"),
      (("optim.final_fraction", "balance.load_low", "balance.load_high"),
       lambda x: 0 <= x <= 1, "from 0 to 1"),
      (("data.validation_fraction",), lambda x: 0 < x < 1,
       "between 0 and 1")):
    for name in names:
      value = _leaf(config, name)
      if not holds(value):
        yield f"{name}={value}: has to be {rule}"


def _model(c: ml_collections.ConfigDict, vocab: int):
  unknown = sorted(set(c.pattern) - set("dmf"))
  if unknown or not c.pattern:
    yield (f'model.pattern="{c.pattern}": letters are d (delta), m (latent '
           f"attention) and f (both), one or more; {unknown} are not")
  if "f" in c.pattern:
    for ours, other in (("heads", "latent_heads"),
                        ("value_width", "latent_value_width")):
      if c[ours] != c[other]:
        yield (f"model.{ours}={c[ours]} and model.{other}={c[other]} differ: "
               f'a fused layer (f in model.pattern="{c.pattern}") needs them '
               f"equal; set model.{other}={c[ours]}")
  if len(c.pattern) > c.layers:
    yield (f'model.pattern="{c.pattern}" is longer than model.layers='
           f"{c.layers}; drop letters or raise model.layers")
  yield from _position(c)
  if c.dense_layers > c.layers:
    yield (f"model.dense_layers={c.dense_layers} exceeds model.layers="
           f"{c.layers}; lower it")
  if c.vocab < vocab:
    yield (f"model.vocab={c.vocab} is below the tokenizer's {vocab} ids; "
           f"set model.vocab={-(-vocab // 16) * 16}")
  for heads, width in (("heads", "value_width"),
                       ("latent_heads", "latent_value_width")):
    # Heads wider in sum than the model, as released models have them, need
    # not divide it.
    if c.width % c[heads] and c[heads] * c[width] < c.width:
      fit = -(-c.width // c[heads]) * c[heads]
      yield (f"model.width={c.width} is not a multiple of model.{heads}="
             f"{c[heads]}; set model.width={fit}")
  yield from _across_layers(c)
  try:
    kda_config.check_floor(c.floor)
  except ValueError as error:
    yield f"model.floor: {error}"
  if c.dense_layers < c.layers:
    if c.experts < 2 or c.expert_hidden < 1:
      yield (f"model.experts={c.experts} of model.expert_hidden="
             f"{c.expert_hidden}: layers with experts need at least 2 of "
             "width 1; or set model.dense_layers to model.layers")
    elif not 1 <= c.experts_per_token < c.experts:
      yield (f"model.experts_per_token={c.experts_per_token}: has to be "
             f"from 1 to below model.experts={c.experts}")
    elif c.experts % c.expert_groups:
      yield (f"model.experts={c.experts} do not split into "
             f"model.expert_groups={c.expert_groups}; set model.experts="
             f"{-(-c.experts // c.expert_groups) * c.expert_groups}")
    elif c.expert_groups_per_token > c.expert_groups or (
        c.experts_per_token
        >= c.experts // c.expert_groups * c.expert_groups_per_token):
      yield (f"model.expert_groups_per_token={c.expert_groups_per_token} of "
             f"model.expert_groups={c.expert_groups}: has to be at most all, "
             "and to leave more experts than model.experts_per_token="
             f"{c.experts_per_token} to choose among")


def _position(c):
  if c.position == "none" and c.rope_scaling != "none":
    yield (f'model.rope_scaling="{c.rope_scaling}" scales nothing at '
           'model.position="none"; set model.position=rope')
  if c.rope_scaling == "none" and c.rope_factor != 1:
    yield (f"model.rope_factor={c.rope_factor} is not read at "
           'model.rope_scaling="none"; set that to linear or yarn')
  if c.position == "rope":
    if c.latent_shared_width < 2 or c.latent_shared_width % 2:
      yield (f"model.latent_shared_width={c.latent_shared_width}: "
             'model.position="rope" turns pairs of these channels; set '
             f"{max(2, c.latent_shared_width + c.latent_shared_width % 2)}")
    if not set(c.pattern) & set("mf"):
      yield (f'model.position="rope": no layer of model.pattern="{c.pattern}" '
             "has a position; m and f have")


def _across_layers(c):
  stride, span = c.injection_stride, c.injection_span
  if stride and not 1 <= span <= stride:
    yield (f"model.injection_span={span}: has to be from 1 to model."
           f"injection_stride={stride}, so that a layer reads one source")
  if stride and c.layers < 2:
    yield (f"model.injection_stride={stride} with model.layers={c.layers}: "
           "there is no later layer; set it to 0")
  # What the pattern's letters have is known once they are.
  if c.share == "none" or not c.pattern or set(c.pattern) - set("dmf"):
    return
  share = c.share.split("+")
  plan = depth_plan.plan(c.pattern, c.layers, 0, c.block_layers, share=share)
  shared = {x for layer in depth_plan.all_layers(plan) for x in layer.leads}
  for name in share:
    if name not in shared:
      kind = "latent (m or f)" if name == "latent" else "delta (d or f)"
      yield (f'model.share="{c.share}": no block of model.block_layers='
             f'{c.block_layers} layers of model.pattern="{c.pattern}" has two '
             f'{kind} layers; raise model.block_layers or leave out "{name}"')


def _rows(c, devices: int, processes: int):
  """What has to divide what in a batch."""
  for name in ("context", "data.validation_context"):
    value = _leaf(c, name)
    if value % kda_config.CHUNK:
      fit = -(-value // kda_config.CHUNK) * kda_config.CHUNK
      yield (f"{name}={value} is not a multiple of the delta rule's chunk of "
             f"{kda_config.CHUNK} tokens; set {name}={fit}")
  for name, value in (("accumulate", c.accumulate), ("devices", devices),
                      ("processes", processes)):
    if c.batch % value:
      yield (f"batch={c.batch} rows do not split over {value} {name}; set "
             f"batch={-(-c.batch // value) * value}")
  if not c.batch % c.accumulate:
    rows = c.batch // c.accumulate
    if rows % devices:
      yield (f"batch={c.batch} in accumulate={c.accumulate} parts leaves "
             f"{rows} rows for {devices} devices; set batch="
             f"{c.accumulate * -(-rows // devices) * devices}")
  if c.data.validation_bytes < c.data.validation_context:
    yield (f"data.validation_bytes={c.data.validation_bytes} fill no row of "
           f"data.validation_context={c.data.validation_context}; raise the "
           "first or lower the second")


def _balance(c):
  if c.load_low > c.load_high:
    yield (f"balance.load_low={c.load_low} exceeds balance.load_high="
           f"{c.load_high}; swap them")


def _images(c):
  """What images ask of the model and of the rows."""
  if c.model.vision == "none":
    if c.data.source in reading.SOURCES:
      yield (f'data.source="{c.data.source}" has images, which model.vision='
             '"none" does not read; set model.vision=tower')
    return
  form = images.form(c)
  if form.channels not in (1, 3):
    yield (f"model.vision_channels={form.channels}: has to be 1 (grey) or 3 "
           "(colour)")
  if c.model.vision == "tower" and c.model.vision_key_width % 4:
    yield (f"model.vision_key_width={c.model.vision_key_width} is not a "
           "multiple of 4, which turns by row and column need")
  if form.decoded_pixels > Image.MAX_IMAGE_PIXELS:
    yield (f"data.decoded_pixels={form.decoded_pixels} is above Pillow's own "
           f"limit; set at most {Image.MAX_IMAGE_PIXELS}")
  if form.pixels < form.unit**2:
    yield (f"data.image_pixels={form.pixels} is less than one token of "
           f"{form.unit} x {form.unit} pixels; raise it")
  if c.data.source not in reading.SOURCES:
    return
  merged = form.merge**2
  most = form.pixels // form.unit**2
  if form.patches % merged or form.patches < most * merged:
    yield (f"data.patches={form.patches} has to be a multiple of {merged} and "
           f"hold an image of data.image_pixels={form.pixels}; set at least "
           f"{most * merged}, or lower data.image_pixels")
  for name in ("context", "data.validation_context"):
    if _leaf(c, name) < most:
      yield (f"{name}={_leaf(c, name)} holds no image of data.image_pixels="
             f"{form.pixels}, which takes {most} tokens; lower the latter")


def _synthetic(config):
  """What generated documents ask of the rows."""
  if config.data.source != "synthetic":
    return
  c = config.data.synthetic
  least = synthetic.least_distance(c.statements)
  if c.distance_low < least:
    yield (f"data.synthetic.distance_low={c.distance_low} may not hold data."
           f"synthetic.statements={c.statements}; set at least {least}")
  if c.distance_high < c.distance_low:
    yield (f"data.synthetic.distance_high={c.distance_high} is below data."
           f"synthetic.distance_low={c.distance_low}; swap them")
  longest = c.distance_high + synthetic.room(c.statements)
  fit = -(-longest // kda_config.CHUNK) * kda_config.CHUNK
  for name in ("context", "data.validation_context"):
    if _leaf(config, name) < longest:
      yield (f"{name}={_leaf(config, name)} cuts documents of data.synthetic."
             f"distance_high={c.distance_high}, which have up to {longest} "
             f"tokens; set {name}={fit} or lower the latter")
  for name in ("shares", "weights"):
    if not any(c[name].values()):
      yield f"data.synthetic.{name} are all 0; raise one"


def _recall(c):
  """What the figures of recall ask of their documents."""
  least = (synthetic.least_distance(c.recall_statements)
           + synthetic.room(c.recall_statements))
  for length in c.recall_lengths:
    if length < least:
      yield (f"evaluate.recall_lengths={tuple(c.recall_lengths)}: {length} "
             f"tokens do not hold evaluate.recall_statements="
             f"{c.recall_statements}; set at least {least}")
  for depth in c.recall_depths:
    if not 0 <= depth <= 1:
      yield (f"evaluate.recall_depths={tuple(c.recall_depths)}: {depth} is no "
             "depth; set it from 0 (far back) to 1")
  if c.recall_lengths and not c.recall_depths:
    yield "evaluate.recall_depths=() measures nothing; set (0.0, 0.5, 1.0)"


def _optim(c):
  if c.optim.warmup_steps >= c.steps:
    yield (f"optim.warmup_steps={c.optim.warmup_steps} leaves none of steps="
           f"{c.steps}; lower it")
  if c.optim.schedule == "wsd":
    if c.optim.decay_steps < 1:
      yield (f"optim.decay_steps={c.optim.decay_steps}: schedule wsd ends "
             f"with a decay; try {max(1, c.steps // 5)}")
    elif c.optim.warmup_steps + c.optim.decay_steps > c.steps:
      yield (f"optim.warmup_steps={c.optim.warmup_steps} and "
             f"optim.decay_steps={c.optim.decay_steps} exceed steps="
             f"{c.steps}; lower them")
