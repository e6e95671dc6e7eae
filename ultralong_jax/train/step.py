"""train_step(state, batch) -> state, metrics; pure."""

import math
from typing import Callable

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ultralong_jax import objectives
from ultralong_jax import optim
from ultralong_jax import tree
from ultralong_jax.layers import balance as balance_lib
from ultralong_jax.models import hybrid
from ultralong_jax.models import multi_token


def make_train_step(model, optimizer, accumulate: int, balance: str,
                    byte_lengths=None, mtp_weight: float = 0.) -> Callable:
  """Returns the function that is jitted with its first argument donated.

  A step whose gradient is not finite leaves params, opt_state and router as
  they are; `step` moves on all the same.

  Args:
    model: Hybrid.
    optimizer: of `optim.make`.
    accumulate: micro-batches that the rows are split into, one after another.
    balance: "quantile" moves the thresholds of the experts; "none".
    byte_lengths: bytes of each token, for bits per byte; None counts a
      target as one byte.
    mtp_weight: of the loss on the token after the next, which is descended
      beside the next one's; 0 for a model without `mtp`.

  Returns:
    train_step: (TrainState, batch) -> (TrainState, metrics), all float32:
      loss: nats per weighted target.
      mtp_loss: nats per weighted target of the token after the next.
      bits_per_byte: of the loss's targets.
      grad_norm: before clipping.
      lr: of the main group; of the last step if this one is skipped.
      tokens: real (not padding) tokens.
      skipped: 1 if the gradient was not finite, else 0.
      load: [layers, E] share of an expert times E; 1 is balanced.
      load_max_over_mean: largest of `load`.
      decay_mean, decay_min, decay_max: over the channels of all delta
        layers, of each one's mean log decay.
      (mtp_loss, loads and decays only from models that have such layers)
  """
  if balance not in ("quantile", "none"):
    raise ValueError(f"{balance=} is neither 'quantile' nor 'none'")

  def nats_of(params, router, batch, weights):
    """Of a micro-batch; divided by the step's weights so that parts add up."""
    documents = batch["segment_ids"], batch["positions"], None
    next_BT, *asked = _ahead(batch)

    def features(model):
      hidden_BTD, _ = model.features(batch["tokens"], *documents)
      if not mtp_weight:
        return hidden_BTD, None
      return hidden_BTD, model.draft(hidden_BTD, next_BT, *documents)[0]

    (hidden_BTD, ahead_BTD), written = model.apply(
        {"params": params, "router": router}, method=features,
        mutable=["statistics"])
    w_DW = hybrid.unembedding(params)
    nats, _ = objectives.next_token_loss(hidden_BTD, w_DW, batch["targets"],
                                         batch["weights"])
    losses = {"loss": nats / weights["loss"]}
    total = losses["loss"]
    if mtp_weight:
      nats, _ = objectives.next_token_loss(ahead_BTD, w_DW, *asked)
      losses["mtp_loss"] = nats / weights["mtp_loss"]
      total += mtp_weight * losses["mtp_loss"]
    statistics = written["statistics"] if "statistics" in written else {}
    return total, (losses, statistics)

  def train_step(state, batch):
    # A batch of padding only has a gradient of zero, not of 0 / 0.
    weights = {name: jnp.maximum(jnp.sum(weights_BT), 1e-6)
               for name, weights_BT in (("loss", batch["weights"]),
                                        ("mtp_loss", _ahead(batch)[2]))}

    def one(part):
      (_, aux), grads = jax.value_and_grad(nats_of, has_aux=True)(
          state.params, state.router, part, weights)
      return grads, *aux

    grads, losses, statistics = _accumulate(one, batch, accumulate)
    grad_norm = tree.norm(grads)
    applied = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state,
                                          state.params)
    router = state.router
    if balance == "quantile" and router:
      router = balance_lib.update(router, statistics, model.experts_per_token)
    params, opt_state, router = tree.choose(
        applied, (optax.apply_updates(state.params, updates), opt_state,
                  router),
        (state.params, state.opt_state, state.router))
    bits = losses["loss"] * weights["loss"] / math.log(2)
    metrics = {
        **losses,
        "bits_per_byte": bits / _bytes(batch, byte_lengths),
        "grad_norm": grad_norm,
        "lr": optim.learning_rate(opt_state),
        "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32),
        "skipped": 1. - applied,
        **_summary(statistics)}
    state = state.replace(params=params, opt_state=opt_state, router=router,
                          step=state.step + 1)
    return state, metrics

  return train_step


def _ahead(batch):
  return multi_token.look_ahead(batch["tokens"], batch["targets"],
                                batch["weights"], batch["segment_ids"])


def _accumulate(function, batch, accumulate: int):
  """Sums function(part) over the micro-batches of a batch."""
  if accumulate == 1:
    return function(batch)
  rows = jax.tree.leaves(batch)[0].shape[0]
  if rows % accumulate:
    raise ValueError(f"{accumulate=} does not divide the batch of {rows} rows")
  # Part i takes rows i, i + accumulate, ...: rows that lie on one device stay
  # there, whereas consecutive ones would all be another device's.
  parts = jax.tree.map(
      lambda x: jnp.moveaxis(
          x.reshape(rows // accumulate, accumulate, *x.shape[1:]), 1, 0),
      batch)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def body(total, part):
    return tree.add(total, function(part)), None

  return jax.lax.scan(body, zeros, parts)[0]


def _bytes(batch, byte_lengths):
  """Bytes that the counted targets stand for; at least one."""
  counted_BT = batch["weights"] > 0
  if byte_lengths is None:
    return jnp.maximum(jnp.sum(counted_BT, dtype=jnp.float32), 1)
  lengths_W = jnp.asarray(np.asarray(byte_lengths), jnp.float32)
  return jnp.maximum(jnp.sum(lengths_W[batch["targets"]] * counted_BT), 1)


def _summary(statistics) -> dict:
  """The loads and decays of a step for the log."""
  leaves = traverse_util.flatten_dict(statistics)
  metrics = {}
  loads = [x.reshape(-1, x.shape[-1]) for path, x in leaves.items()
           if path[-1] == "load_E"]
  if loads:
    load_LE = jnp.concatenate(loads).astype(jnp.float32)
    mean_L = jnp.maximum(jnp.mean(load_LE, axis=1), 1e-6)
    metrics["load"] = load_LE / mean_L[:, None]
    metrics["load_max_over_mean"] = jnp.max(metrics["load"])
  # Sums over tokens, with or without leading axes of stacked layers.
  decays = [x / jnp.maximum(leaves[(*path[:-1], "sampled")], 1)[
      ..., None, None] for path, x in leaves.items()
            if path[-1] == "decay_sum_HK"]
  if decays:
    channels = jnp.concatenate([x.reshape(-1) for x in decays])
    metrics["decay_mean"] = jnp.mean(channels)
    metrics["decay_min"] = jnp.min(channels)
    metrics["decay_max"] = jnp.max(channels)
  return metrics
