"""train_step(state, batch) -> state, metrics; pure."""

import math
from typing import Callable

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
from ultralong_jax.models import vision
from ultralong_jax.train import summary


def make_train_step(model, optimizer, accumulate: int, balance=None,
                    byte_lengths=None, mtp_weight: float = 0.) -> Callable:
  """Returns the function that is jitted with its first argument donated.

  A step whose gradient is not finite leaves params, opt_state and router as
  they are; `step` moves on all the same.

  Args:
    model: Hybrid; its `balance` is what moves the thresholds of the experts.
    optimizer: of `optim.make`.
    accumulate: micro-batches that the rows are split into, one after another.
    balance: numbers of that form, by the names of `balance.Settings`.
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
      balance_loss: what aux_loss adds to the loss that is descended.
      and what `summary.of_statistics` and `summary.of_prototypes` say.
      (mtp_loss and balance_loss only from models that have them)
  """
  settings = balance_lib.Settings(**(balance or {}))
  form, top = model.balance, model.experts_per_token
  if form not in balance_lib.FORMS:
    raise ValueError(f"balance={form!r} is none of "
                     f"{sorted(balance_lib.FORMS)}")
  noisy = model.router_noise > 0
  nats_of = make_loss(model, settings, mtp_weight)

  def train_step(state, batch):
    weights, tokens = _weights(batch), _tokens(batch)

    def one(part, index):
      rngs = {}
      if noisy:
        key = jax.random.fold_in(state.rng, state.step)
        rngs["noise"] = jax.random.fold_in(key, index)
      (_, aux), grads = jax.value_and_grad(nats_of, has_aux=True)(
          state.params, state.router, part, weights, tokens, rngs)
      return grads, *aux

    grads, losses, statistics = _accumulate(one, batch, accumulate)
    grad_norm = tree.norm(grads)
    applied = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state,
                                          state.params)
    router = state.router
    if form != "none" and router:
      router = balance_lib.update(router, statistics, top, form, settings)
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
        "tokens": tokens,
        "skipped": 1. - applied,
        **summary.of_statistics(statistics),
        **summary.of_prototypes(params, router)}
    state = state.replace(params=params, opt_state=opt_state, router=router,
                          step=state.step + 1)
    return state, metrics

  return train_step


def make_loss(model, settings, mtp_weight: float = 0.) -> Callable:
  """Returns the function of a micro-batch that the step differentiates.

  Args:
    model: Hybrid.
    settings: `balance.Settings`.
    mtp_weight: see `make_train_step`.

  Returns:
    nats_of: (params, router, batch, weights, tokens, rngs) -> (total,
      (losses, statistics)); divided by the weights and tokens of the whole
      step, so that micro-batches add up.
  """
  form, top = model.balance, model.experts_per_token
  model = model.clone(training=True)

  def nats_of(params, router, batch, weights, tokens, rngs):
    (hidden_BTD, ahead_BTD), written = model.apply(
        {"params": params, "router": router}, batch, mtp_weight > 0,
        method=_features, mutable=["statistics"], rngs=rngs)
    w_DW = hybrid.unembedding(params)
    nats, _ = objectives.next_token_loss(hidden_BTD, w_DW, batch["targets"],
                                         batch["weights"])
    losses = {"loss": nats / weights["loss"]}
    total = losses["loss"]
    if mtp_weight:
      nats, _ = objectives.next_token_loss(ahead_BTD, w_DW, *_ahead(batch)[1:])
      losses["mtp_loss"] = nats / weights["mtp_loss"]
      total += mtp_weight * losses["mtp_loss"]
    statistics = written["statistics"] if "statistics" in written else {}
    if form == "aux_loss":
      # Loads are those of the micro-batch, which counts by its tokens.
      share = _tokens(batch) / jnp.maximum(tokens, 1.)
      losses["balance_loss"] = (settings.loss_coefficient * share
                                * balance_lib.loss(statistics, top))
      total += losses["balance_loss"]
    return total, (losses, statistics)

  return nats_of


def make_measure(model, accumulate: int) -> Callable:
  """Returns (params, router, batch) -> router, measured without training.

  Thresholds become those at which the batch's first micro-batch would have
  been balanced: the published form's, of one step. No other form measures.

  Args:
    model: Hybrid with experts whose `balance` is "quantile".
    accumulate: micro-batches of a batch.
  """
  model = model.clone(training=True, router_noise=0.)

  def measure(params, router, batch):
    part = jax.tree.map(lambda x: x[::accumulate], batch)
    _, written = model.apply({"params": params, "router": router}, part,
                             model.mtp, method=_features,
                             mutable=["statistics"])
    return balance_lib.update(router, written["statistics"],
                              model.experts_per_token)

  return measure


def saved_bytes(model, params, router, batch, mtp_weight: float = 0.) -> int:
  """Returns bytes that the backward pass of a micro-batch has to find.

  What the forward pass leaves to it, the parameters not counted; nothing is
  computed or compiled. The step's peak is higher by what a layer needs while
  it runs, and lower by what the compiler fuses away.

  Args:
    model, mtp_weight: see `make_train_step`.
    params, router, batch: shapes are enough; the batch of one micro-batch.
  """
  nats_of = make_loss(model, balance_lib.Settings(), mtp_weight)
  rngs = {"noise": jax.random.key(0)} if model.router_noise > 0 else {}

  def pull(params, router, batch):
    def loss(params):
      return nats_of(params, router, batch, _weights(batch), _tokens(batch),
                     rngs)
    return jax.vjp(loss, params, has_aux=True)[1]

  saved = jax.eval_shape(pull, params, router, batch)
  return max(0, tree.size_bytes(saved) - tree.size_bytes(params))


def _features(model, batch, ahead: bool):
  """Hidden states and, to look one token further ahead, the draft's."""
  documents = batch["segment_ids"], batch["positions"], None
  looked = vision.look(model, batch)
  hidden_BTD, _ = model.features(batch["tokens"], *documents, **looked)
  if not ahead:
    return hidden_BTD, None
  return hidden_BTD, model.draft(hidden_BTD, _ahead(batch)[0], *documents,
                                 **vision.ahead(looked))[0]


def _weights(batch):
  """Sums of loss weights, by the loss that they are of."""
  # A batch of padding only has a gradient of zero, not of 0 / 0.
  return {name: jnp.maximum(jnp.sum(weights_BT), 1e-6)
          for name, weights_BT in (("loss", batch["weights"]),
                                   ("mtp_loss", _ahead(batch)[2]))}


def _ahead(batch):
  return multi_token.look_ahead(batch["tokens"], batch["targets"],
                                batch["weights"], batch["segment_ids"])


def _accumulate(function, batch, accumulate: int):
  """Sums function(part, its number) over the micro-batches of a batch."""
  if accumulate == 1:
    return function(batch, 0)
  rows = jax.tree.leaves(batch)[0].shape[0]
  if rows % accumulate:
    raise ValueError(f"{accumulate=} does not divide the batch of {rows} rows")
  # Part i takes rows i, i + accumulate, ...: rows that lie on one device stay
  # there, whereas consecutive ones would all be another device's.
  parts = jax.tree.map(
      lambda x: jnp.moveaxis(
          x.reshape(rows // accumulate, accumulate, *x.shape[1:]), 1, 0),
      batch)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts), 0)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def body(total, part):
    return tree.add(total, function(*part)), None

  return jax.lax.scan(body, zeros, (parts, jnp.arange(accumulate)))[0]


def _tokens(batch):
  """Real tokens, not padding, as a float32."""
  return jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32)


def _bytes(batch, byte_lengths):
  """Bytes that the counted targets stand for; at least one."""
  counted_BT = batch["weights"] > 0
  if byte_lengths is None:
    return jnp.maximum(jnp.sum(counted_BT, dtype=jnp.float32), 1)
  lengths_W = jnp.asarray(np.asarray(byte_lengths), jnp.float32)
  return jnp.maximum(jnp.sum(lengths_W[batch["targets"]] * counted_BT), 1)
