"""Every leaf of a config: its default, its unit and who reads it.

A config file starts from get_config(), changes what differs and adds nothing;
a new leaf comes here first, with the line that says what it is.
"""
import difflib
import types

from ml_collections import ConfigDict


def get_config():
  """Returns the base config; a leaf that is not here does not exist."""
  c = ConfigDict()
  c.seed = 0  # of initial parameters and of the order of the data
  c.context = 512  # tokens in a row
  c.batch = 4  # rows in an optimiser step, over all devices and processes
  c.accumulate = 1  # micro-batches that the rows of a step are split into
  c.steps = 1_000  # optimiser steps in the whole run, or in a stage of it
  c.batch_tokens = 0  # batch x context instead of batch; 0: batch decides
  c.total_tokens = 0  # rounded up to steps, instead of steps; 0: steps decides
  # A stage ends before its steps are over once its validation loss has
  # flattened: once a line through so many of the latest evaluations falls by
  # less than `flat_fall` nats an evaluation. 0: steps alone decide.
  c.flat_evaluations = 0
  c.flat_fall = 0.0
  c.mtp_weight = 0.3  # of that token's loss beside the next one's; model.mtp
  c.model = model()
  c.balance = balance()
  c.data = data()
  c.optim = optim()

  # Names of the stages in their order, "short,long", and for each the leaves
  # in which it differs: train/stages.py says which may. "": one stage.
  c.stage_order = ""
  c.stages = ConfigDict()

  c.evaluate = ConfigDict()
  c.evaluate.every_steps = 500  # 0: at the end of the run only
  # Needles and pairs in held-out text: right answers by length and depth.
  c.evaluate.recall_lengths = ()  # in tokens, such as (1_024, 65_536); (): off
  c.evaluate.recall_depths = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: far back
  c.evaluate.recall_samples = 32  # documents of a task, length and depth
  c.evaluate.recall_segment = 4_096  # tokens that are read at a time
  c.evaluate.recall_statements = 4  # in a document, one of them asked
  c.checkpoint = ConfigDict()
  c.checkpoint.every_steps = 500  # 0: at the end and on a signal only
  c.checkpoint.keep = 2  # newest checkpoints that stay on disk
  c.log = ConfigDict()
  c.log.every_seconds = 5.0  # longest silence while steps are faster
  c.log.every_steps = 10  # and a line after so many steps
  return c


def model():
  """Returns the fields of models.hybrid.Hybrid."""
  c = ConfigDict()
  c.vocab = 272  # rows of the embedding, at least the tokenizer's
  c.width = 256
  c.layers = 4
  # d delta, m latent, f both fused; repeated over the layers.
  c.pattern = "dddm"
  c.norm_epsilon = 1e-5

  # Delta layers.
  c.heads = 4
  c.key_width = 32  # of one head
  c.value_width = 32  # of one head
  c.conv_width = 4  # taps of the short convolution
  # Least log decay of a step; x 16 has to fit float32's exp. None (in a config
  # file, not on the command line): -exp(a) softplus(z), without a bound.
  c.floor = -5.0
  c.gate_rank = 0  # width inside the output gate's projection; 0: full rank

  # Latent attention layers.
  c.latent_heads = 4
  c.latent_key_width = 32  # of one head, made from the latent
  c.latent_shared_width = 16  # key part that all heads share
  c.latent_value_width = 32
  c.latent_rank = 64  # width of the latent that is cached
  c.query_rank = 0  # 0: queries straight from the model's width
  # Sigmoid gate of the query: on the heads' "output" (fused layers have that
  # anyway), on each "latent" as the query sees it, or "none".
  c.latent_gate = "output"

  c.position = "none"  # "rope" turns their shared key channels
  c.rope_base = 10_000.0  # the slowest pair turns in 2 pi base tokens
  c.rope_scaling = "none"  # "linear" or "yarn" interpolate to longer contexts
  c.rope_factor = 1.0  # that context over the one before
  c.rope_context = 4_096  # tokens of the one before; read by yarn

  # Fused layers: both of the above, of as many heads and as wide values.
  c.fusion = "token"  # weights by "layer", "head", or token and head

  # Feed-forward part of every layer.
  c.glu = "situ"  # bounded; "swiglu" is the baseline
  c.glu_input_norm = False  # the input of every unit gets mean square 1
  c.dense_layers = 1  # first layers that have no experts
  c.dense_hidden = 768
  c.experts = 8
  c.experts_per_token = 2
  c.expert_hidden = 128
  c.expert_latent = 128  # width that experts work in; 0: the model's
  c.shared_experts = 1  # experts that see every token
  c.routed_scale = 1.0  # factor on the routed experts' sum
  c.routed_renormalize = True  # their weights sum to 1 before that factor
  c.expert_groups = 1  # groups of neighbours, of which a token picks some first
  c.expert_groups_per_token = 1
  c.router = "hidden"  # reads the layer's input; "prototype": its similarity
  c.routing_width = 64  # to learned prototypes, in a space of this width
  c.router_similarity = "cosine"  # or "distance", the negative squared one
  c.router_noise = 0.0  # deviation, in logits, on choices; in training only
  # Most tokens of an expert in a micro-batch, in fair shares; 0: all that
  # want it. In training only; what is over is dropped, lowest scores first.
  c.capacity_factor = 0.0
  # What moves the experts' thresholds after a step: "quantile",
  # "load_quantile", "sign_bias", "aux_loss" (a loss term instead), "none".
  c.balance = "quantile"
  c.expert_activations = False  # log how they vary across experts

  # Across layers.
  c.depth = "block_attention"  # "residual" is the baseline
  c.block_layers = 2  # layers in a depth block
  # Attention outputs of layers 0, stride, ... added, normalised and times a
  # matrix, to the attention inputs of the next `span` layers; 0: none.
  c.injection_stride = 0
  c.injection_span = 1  # at most the stride
  # Of a depth block's first layer, for its later ones too: "latent" (cached
  # once a block), "gates" (decay, write strength), "latent+gates" or "none".
  c.share = "none"

  c.tied_embedding = False  # the unembedding is the embedding
  c.mtp = False  # one more layer predicts the token after the next

  # Images; what follows "none" is not looked at then.
  c.vision = "none"  # "tower" of attention, or "direct", a linear map
  c.vision_patch = 4  # pixels along a patch's side
  c.vision_channels = 1  # values of a pixel: 1 grey, 3 colour
  c.vision_merge = 2  # patches along a side that become one token
  c.vision_grid = 16  # cells along each side of the table of positions
  c.vision_layers = 2  # of the tower, and so the rest
  c.vision_width = 96
  c.vision_heads = 3
  c.vision_key_width = 32  # of one head
  c.vision_hidden = 256

  # How it runs; neither changes the function.
  c.remat = "none"  # "layer" recomputes each layer in the backward pass
  c.dtype = "float32"  # of compute; parameters are float32 always
  c.implementation = ""  # of the delta rule; "": the fastest that can run
  return c


def balance():
  """Returns the fields of layers.balance.Settings; the form is model's."""
  c = ConfigDict()
  c.quantile_steps = 1  # quantile: steps a threshold is an average over
  c.load_steps = 8  # load_quantile: steps that loads are an average over
  c.load_low = 0.1  # between these quantiles of the experts' loads
  c.load_high = 0.9  # nothing is corrected
  c.load_least = 0.25  # of the fair load: less is corrected anyway
  c.load_rate = 0.03  # threshold a step for each fair load outside
  c.sign_rate = 1e-3  # sign_bias: threshold a step
  c.loss_coefficient = 0.01  # aux_loss
  return c


def published_tower():
  """Returns the leaves of `model` of the published tower, 401M parameters.

  With its projector; the decoder decides that one's width.
  """
  return dict(
      vision="tower", vision_patch=14, vision_channels=3, vision_merge=2,
      vision_grid=64, vision_layers=27, vision_width=1_024, vision_heads=12,
      vision_key_width=128, vision_hidden=4_096)


def data():
  """Returns what data.loader.open_data reads."""
  c = ConfigDict()
  # Or, with images: "interleaved" (JSON lines of your own under data.path),
  # "digits", "pages", "reading" (both of them, between text of data.path).
  # Or "synthetic": tasks made up, inside of text of data.path.
  c.source = "text"
  c.path = ""  # folder or glob of UTF-8 text; "": Python's standard library
  c.tokenizer = "byte"  # or a tokenizers JSON file
  c.validation_fraction = 0.05  # of the documents, chosen by their hash
  c.validation_bytes = 262_144  # of the validation slice
  c.validation_context = 2_048  # tokens in a row of it
  c.patches = 0  # of images in a row; 0 without images
  c.image_pixels = 16_384  # of one image; larger ones are shrunk
  c.decoded_pixels = 50_000_000  # of a file; larger ones are not decoded
  c.synthetic = synthetic()
  return c


def synthetic():
  """Returns what data.synthetic reads; for data.source "synthetic"."""
  tasks = "needles", "pairs", "variables", "settings", "permuted"
  c = ConfigDict()
  c.documents = 8_192  # in an epoch; they differ by seed
  # Tokens between the question and the evidence furthest back that it needs.
  c.distance_low = 128
  c.distance_high = 256
  c.statements = 4  # in a document, of which a question asks for some
  c.shares = ConfigDict(dict.fromkeys(tasks, 1.0))  # of documents, relative
  # Of the loss, in training only: on an answer by its task; on all else.
  c.weights = ConfigDict(dict.fromkeys(("text", *tasks), 1.0))
  return c


def optim():
  """Returns what optim.make and optim.schedule read."""
  c = ConfigDict()
  c.name = "muon"  # matrices by Muon, the rest by AdamW; "adamw": all by AdamW
  # What Muon takes for a matrix of weights into heads: "per_head" each head's,
  # "full_matrix" all heads' side by side.
  c.muon = "per_head"
  c.lr = 0.02  # peak
  c.adam_lr = 2.5e-3  # peak of the AdamW group under Muon
  c.schedule = "cosine"  # "wsd" (warm-up, stable, decay) or "constant"
  c.warmup_steps = 20
  c.decay_steps = 0  # at the end of the run; wsd only
  c.final_fraction = 0.1  # of the peak, at the last step
  c.weight_decay = 0.1  # on matrices only
  c.b1 = 0.9  # AdamW
  c.b2 = 0.95  # AdamW
  c.momentum = 0.95  # Muon
  c.clip_norm = 1.0  # of the gradient, over all leaves
  return c


def parse_arg(arg, **defaults):
  """Parses what stands behind the colon in `file.py:context=2048,smoke`.

  Args:
    arg: the text, or None. A name alone sets a boolean to True.
    **defaults: every name that is known; a value's type is its name's type.

  Returns:
    A namespace of the defaults and of what the text changes.
  """
  values = dict(defaults)
  for item in filter(None, (arg or "").split(",")):
    name, equals, text = item.partition("=")
    if name not in defaults:
      close = difflib.get_close_matches(name, defaults, 1)
      hint = f'did you mean "{close[0]}"?' if close else (
          "known: " + ", ".join(defaults))
      raise ValueError(f'config argument "{name}" is unknown; {hint}')
    kind = type(defaults[name])
    if kind is bool:
      text = text.lower() if equals else "true"
      if text not in ("true", "false"):
        raise ValueError(f'config argument "{item}": {name} is true or false')
      values[name] = text == "true"
    else:
      try:
        values[name] = kind(text)
      except ValueError:
        raise ValueError(f'config argument "{item}": {name} is '
                         f"{kind.__name__}") from None
  return types.SimpleNamespace(**values)
