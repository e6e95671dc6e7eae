"""The models that are compared: one form changed at a time."""
from configs import article
from configs import common

# Leaves of the base, the published forms at about 20M parameters.
BASE = {
    "context": 512, "batch": 4, "balance.load_steps": 4,
    "model.layers": 8, "model.block_layers": 4, "model.dense_hidden": 512,
    "model.experts": 48, "model.experts_per_token": 4,
    "model.expert_latent": 128, "model.expert_activations": True,
    "optim.schedule": "constant", "optim.lr": 0.003, "optim.adam_lr": 0.003,
    "optim.momentum": 0.9, "data.validation_bytes": 131_072,
}
# What each differs in; a name with "article" has configs/article.py's forms.
VARIANTS = {
    "published": {},
    "softplus gate": {"model.floor": None},
    "swiglu": {"model.glu": "swiglu"},
    "plain residual": {"model.depth": "residual"},
    "aux loss": {"model.balance": "aux_loss"},
    "sign bias": {"model.balance": "sign_bias"},
    "no balancing": {"model.balance": "none"},
    "load quantile": {"model.balance": "load_quantile"},
    "prototype router": {"model.router": "prototype"},
    "article": {},
    "article without injection": {"model.injection_stride": 0},
    "article without input norm": {"model.glu_input_norm": False},
}


def configure(name):
  """Returns the config of a variant."""
  c = common.get_config()
  if name.startswith("article"):
    c.model.update(article.forms())
  with c.unlocked():
    for leaf, value in {**BASE, **VARIANTS[name]}.items():
      *path, last = leaf.split(".")
      node = c
      for part in path:
        node = node[part]
      node[last] = value
  return c
