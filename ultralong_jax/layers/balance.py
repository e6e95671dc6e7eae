"""Quantile balancing of experts: thresholds from a histogram of margins.

With the cutoffs of a step held fixed, an expert's threshold is set to the bias
at which exactly its fair share of tokens would have chosen it. There is no
loss term and no learning rate (Kimi K3 report, appendix A.2 and A.3).
"""

import jax
import jax.numpy as jnp
from flax import traverse_util

BINS = 1000  # more gained nothing in public experiments


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


def update(router, statistics, top):
  """Thresholds of the next step, from the statistics of this one.

  Args:
    router: collection whose leaves are all `threshold_E`.
    statistics: collection with a `histogram_EZ` wherever `router` has a
      `threshold_E`, and nowhere else; other leaves are left alone.
    top: experts for each token.

  Returns:
    router: same structure as `router`.
  """
  thresholds = traverse_util.flatten_dict(router)
  histograms = {path[:-1]: leaf for path, leaf
                in traverse_util.flatten_dict(statistics).items()
                if path[-1] == "histogram_EZ"}
  strange = {path for path in thresholds if path[-1] != "threshold_E"}
  if strange or {path[:-1] for path in thresholds} != set(histograms):
    raise ValueError(
        f"router {sorted(thresholds)} and histograms {sorted(histograms)} "
        "are not of the same modules")
  new = {}
  for path, threshold_E in thresholds.items():
    histogram_EZ = histograms[path[:-1]]
    if histogram_EZ.shape != threshold_E.shape + (BINS,):
      raise ValueError(f"{path}: {histogram_EZ.shape=} does not extend "
                       f"{threshold_E.shape=} by {BINS} bins")
    new[path] = quantile_thresholds(threshold_E, histogram_EZ, top)
  return traverse_util.unflatten_dict(new)
