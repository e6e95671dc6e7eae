"""Balancing of experts: what moves their thresholds after a step.

The published form is `quantile`. With the cutoffs of a step held fixed, an
expert's threshold is set to the bias at which exactly its fair share of tokens
would have chosen it. There is no loss term and no learning rate (Kimi K3
report, appendix A.2 and A.3). The other forms are what it is compared with.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

BINS = 1000  # more gained nothing in public experiments


class Settings(NamedTuple):
  """The numbers of all forms; the keys of a config's `balance`.

  Attributes:
    quantile_steps: quantile: steps that a threshold is an average over; 1 is
      the published form.
    load_steps: load_quantile: steps that the counts are an average over.
    load_low: load_quantile: quantile of the counts of all experts at which
      the band begins.
    load_high: load_quantile: quantile at which it ends.
    load_least: load_quantile: share of the fair load under which an expert is
      below the band even if many are; else half of them could stay dormant.
    load_rate: load_quantile: threshold for each fair load beyond the band.
    sign_rate: sign_bias: threshold for a step.
    loss_coefficient: aux_loss: weight of the loss term.
  """
  quantile_steps: int = 1
  load_steps: int = 8
  load_low: float = 0.1
  load_high: float = 0.9
  load_least: float = 0.25
  load_rate: float = 0.03
  sign_rate: float = 1e-3
  loss_coefficient: float = 1e-2


def _range(threshold_E):
  """Lowest possible required bias and the width of a bin, [..., 1]."""
  low = jnp.min(threshold_E, axis=-1, keepdims=True) - 1.
  high = jnp.max(threshold_E, axis=-1, keepdims=True) + 1.
  return low, (high - low) / BINS


def histogram(s_XE, cutoff_X, threshold_E, valid_X):
  """Counts tokens by the bias with which they would have chosen an expert.

  The required bias cutoff - s lies in [min(threshold) - 1,
  max(threshold) + 1], which the bins divide evenly. Counts of parts of a
  batch add up to those of the whole, so micro-batches and devices sum them.

  Args:
    s_XE: router scores in (0, 1).
    cutoff_X: see `router.choose`, made with the same thresholds.
    threshold_E: float32 thresholds of this step.
    valid_X: False where a token is padding and does not count.

  Returns:
    histogram_EZ: int32; every row sums to the number of valid tokens.
  """
  experts = s_XE.shape[1]
  low, width = _range(threshold_E)
  required_XE = jax.lax.stop_gradient(cutoff_X[:, None] - s_XE)
  bin_XE = jnp.floor((required_XE - low[None]) / width[None])
  bin_XE = jnp.clip(bin_XE, 0, BINS - 1).astype(jnp.int32)
  bin_XE += BINS * jnp.arange(experts, dtype=jnp.int32)[None]
  count_XE = jnp.broadcast_to(valid_X[:, None], bin_XE.shape)
  flat = jnp.zeros(experts * BINS, jnp.int32).at[bin_XE.reshape(-1)].add(
      count_XE.reshape(-1).astype(jnp.int32), mode="promise_in_bounds")
  return flat.reshape(experts, BINS)


def quantile_thresholds(threshold_E, histogram_EZ, top):
  """The threshold at which each expert gets its share q = tokens * top / E.

  Args:
    threshold_E: thresholds that the histogram was made with; may have leading
      axes (stacked layers), shared with the histogram.
    histogram_EZ: see `histogram`, summed over everything in the step.
    top: experts for each token.

  Returns:
    threshold_E: float32 with mean zero; the old one where nothing was counted.
  """
  experts = threshold_E.shape[-1]
  low, width = _range(threshold_E)
  tokens = jnp.sum(histogram_EZ, axis=-1)
  # q in whole and fractional part: float32 holds no integer above 2^24, and
  # tokens * top can pass 2^31.
  rest = (tokens % experts) * top
  whole = tokens // experts * top + rest // experts
  fraction = (rest % experts).astype(jnp.float32) / experts
  target = whole + (rest % experts > 0)
  reached = jnp.cumsum(histogram_EZ, axis=-1)
  bin_ = jnp.argmax(reached >= target[..., None], axis=-1)
  inside = jnp.take_along_axis(histogram_EZ, bin_[..., None], axis=-1)[..., 0]
  before = jnp.take_along_axis(reached, bin_[..., None], axis=-1)[..., 0]
  before -= inside
  share = (whole - before).astype(jnp.float32) + fraction
  # An empty bin is selected only when nothing was counted at all.
  share = jnp.clip(share / jnp.maximum(inside, 1), 0., 1.)
  new = low + (bin_ + share) * width
  new -= jnp.mean(new, axis=-1, keepdims=True)
  return jnp.where(tokens > 0, new, threshold_E)


def exact_thresholds(s_XE, threshold_E, top, valid_X):
  """What `quantile_thresholds` estimates, by sorting; tests compare the two.

  Not for use under jit: the number of valid tokens sets shapes.
  """
  s_XE = s_XE[valid_X]
  tokens, experts = s_XE.shape
  share = -(-tokens * top // experts)
  biased_XE = jnp.sort(s_XE + threshold_E[None], axis=1)
  cutoff_X = biased_XE[:, experts - top - 1]
  required_XE = jnp.sort(cutoff_X[:, None] - s_XE, axis=0)
  return required_XE[share] - jnp.mean(required_XE[share])


def quantile(own, counted, top, settings):
  """Published form; with `quantile_steps`, an average over recent steps."""
  threshold_E = own["threshold_E"]
  new_E = quantile_thresholds(threshold_E, counted["histogram_EZ"], top)
  if settings.quantile_steps > 1:
    new_E = threshold_E + (new_E - threshold_E) / settings.quantile_steps
  return {"threshold_E": new_E}


def load_quantile(own, counted, top, settings):
  """Corrects experts whose recent load is outside a band of quantiles.

    low, high = quantiles of recent over the experts; low at least `load_least`
    threshold += load_rate * (max(low - recent, 0) - max(recent - high, 0))

  Inside the band nothing moves; outside, the correction grows with the
  distance. Recent loads are averages over about `load_steps` steps, in fair
  shares, so that 1 is balanced.
  """
  del top
  load_E, tokens = _share(counted)
  recent_E = own["recent_E"]
  recent_E += (load_E - recent_E) / settings.load_steps
  low, high = (jnp.quantile(recent_E, q, axis=-1, keepdims=True)
               for q in (settings.load_low, settings.load_high))
  low = jnp.maximum(low, settings.load_least)
  over_E = jnp.maximum(recent_E - jnp.maximum(low, high), 0.)
  move_E = settings.load_rate * (jnp.maximum(low - recent_E, 0.) - over_E)
  return {"threshold_E": jnp.where(tokens, own["threshold_E"] + move_E,
                                   own["threshold_E"]),
          "recent_E": jnp.where(tokens, recent_E, own["recent_E"])}


def sign_bias(own, counted, top, settings):
  """A fixed step towards balance, whatever the distance (DeepSeek-V3)."""
  del top
  load_E = counted["load_E"].astype(jnp.float32)
  towards_E = jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)
  return {"threshold_E": own["threshold_E"] + settings.sign_rate * towards_E}


def _keep(own, counted, top, settings):
  """Thresholds stay where they are."""
  del counted, top, settings
  return {"threshold_E": own["threshold_E"]}


def _share(counted):
  """Loads in fair shares, 1 if nothing was counted; whether anything was."""
  load_E = counted["load_E"].astype(jnp.float32)
  mean = jnp.mean(load_E, axis=-1, keepdims=True)
  return jnp.where(mean > 0, load_E / jnp.maximum(mean, 1e-6), 1.), mean > 0


FORMS = {"quantile": quantile, "load_quantile": load_quantile,
         "sign_bias": sign_bias, "aux_loss": _keep, "none": _keep}
# What a form needs to be counted besides load_E, and what it remembers of
# loads; both are `experts.LatentExperts`' to declare.
COUNTS = {"quantile": "histogram_EZ", "aux_loss": "score_sum_E"}
REMEMBERS = ("load_quantile",)


def update(router, statistics, top, name="quantile", settings=Settings()):
  """State of the next step, from the statistics of this one.

  Args:
    router: collection with a threshold_E for each module that has experts,
      a recent_E beside it for load_quantile; a start_ER is passed on.
    statistics: collection of the same modules with load_E and what COUNTS
      names; other modules and leaves are left alone.
    top: experts for each token.
    name: one of FORMS.
    settings: numbers of the form.

  Returns:
    router: same structure as `router`.
  """
  if name not in FORMS:
    raise ValueError(f"balance={name!r} is none of {sorted(FORMS)}")
  owns, counts = _by_module(router), _by_module(statistics)
  counted = COUNTS.get(name, "load_E")
  counts = {path: own for path, own in counts.items() if counted in own}
  state = {"threshold_E", *(["recent_E"] if name in REMEMBERS else [])}
  strange = [path for path, own in owns.items()
             if set(own) - {"start_ER"} != state]
  if strange or set(owns) != set(counts):
    raise ValueError(
        f"balance={name!r}: router {_names(router)} and statistics "
        f"{_names(statistics)} are not of the same modules")
  new = {}
  for path, own in owns.items():
    shape = own["threshold_E"].shape + (
        (BINS,) if counted == "histogram_EZ" else ())
    if counts[path][counted].shape != shape:
      raise ValueError(f"{path}: {counted} {counts[path][counted].shape} does "
                       f"not fit thresholds: {shape}")
    own = own | FORMS[name](own, counts[path], top, settings)
    new |= {(*path, leaf): x for leaf, x in own.items()}
  return traverse_util.unflatten_dict(new)


def remembering(router, name):
  """Adds to a collection of thresholds what a form remembers, at its start."""
  if name not in REMEMBERS:
    return router
  new = {}
  for path, own in _by_module(router).items():
    own = {"recent_E": jnp.ones_like(own["threshold_E"])} | own
    new |= {(*path, leaf): x for leaf, x in own.items()}
  return traverse_util.unflatten_dict(new)


def _by_module(collection) -> dict:
  """{path: {leaf: array}}."""
  modules = {}
  for path, x in traverse_util.flatten_dict(collection).items():
    modules.setdefault(path[:-1], {})[path[-1]] = x
  return modules


def _names(collection):
  return sorted("/".join(path) for path in
                traverse_util.flatten_dict(collection))


def score_sums(s_XE, valid_X):
  """Sums over tokens of scores that sum to 1 over the experts; see `loss`.

  Args:
    s_XE: router scores in (0, 1).
    valid_X: False where a token is padding and does not count.

  Returns:
    score_sum_E: float32, with a gradient.
  """
  share_XE = s_XE / jnp.sum(s_XE, axis=1, keepdims=True)
  return jnp.sum(jnp.where(valid_X[:, None], share_XE, 0.), axis=0)


def loss(statistics, top):
  """Auxiliary loss over all layers: sum_l E sum_e f_e P_e.

  f_e is the share of choices that expert e got, without a gradient; P_e the
  mean of its scores where a token's scores sum to 1. A balanced layer has 1.
  (Switch Transformers, with the normalised sigmoid scores of DeepSeek-V3.)

  Args:
    statistics: collection with load_E and score_sum_E, over the tokens of a
      micro-batch.
    top: experts for each token.

  Returns:
    loss: float32 scalar, without the coefficient.
  """
  total = jnp.float32(0)
  for own in _by_module(statistics).values():
    if "score_sum_E" in own:
      fair_E, _ = _share(own)  # E times f
      tokens = jnp.sum(own["load_E"], axis=-1, keepdims=True) / top
      total += jnp.sum(fair_E * own["score_sum_E"] / jnp.maximum(tokens, 1.))
  return total
