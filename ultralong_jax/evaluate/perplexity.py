"""Bits per byte on held-out text."""
import math

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax import objectives
from ultralong_jax.models import hybrid


class Perplexity:
  """Measures the loss over one pass of held-out rows.

  Bits of every target, the end of a document included, are divided by the
  bytes that the targets stand for, so that tokenizers can be compared.
  """

  def __init__(self, model, batches, byte_lengths, put,
               stop=lambda: False):
    """Prepares; the first run compiles.

    Args:
      model: Hybrid.
      batches: function that returns a finite iterator of batches.
      byte_lengths: bytes of each token, 0 for special ones.
      put: function that lays a batch out over the devices.
      stop: polled before each batch; a run that stops yields nothing.
    """
    self._batches, self._put, self._stop = batches, put, stop
    bytes_W = jnp.asarray(np.asarray(byte_lengths), jnp.float32)

    @jax.jit
    def sums(params, router, batch):
      hidden_BTD, _ = model.apply(
          {"params": params, "router": router}, batch["tokens"],
          batch["segment_ids"], batch["positions"], None, method="features")
      nats, _ = objectives.next_token_loss(
          hidden_BTD, hybrid.unembedding(params), batch["targets"],
          batch["weights"])
      counted_BT = batch["weights"] > 0
      return (nats, jnp.sum(counted_BT),
              jnp.sum(bytes_W[batch["targets"]] * counted_BT))

    self._sums = sums

  def run(self, params, router):
    """Yields (name, value) of the loss, and how much text it is over."""
    totals = np.zeros(3)  # float64: a sum over millions of tokens
    for batch in self._batches():
      if self._stop():
        return
      totals += jax.device_get(self._sums(params, router, self._put(batch)))
    nats, tokens, size_bytes = totals.tolist()
    yield "validation_loss", nats / tokens
    yield "validation_bits_per_byte", nats / math.log(2) / size_bytes
    yield "validation_tokens", int(tokens)
    yield "validation_bytes", int(size_bytes)
