"""Bits per byte on held-out text, and answers that are read right."""
import math

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax import objectives
from ultralong_jax.data import interleave
from ultralong_jax.evaluate import answers
from ultralong_jax.models import hybrid
from ultralong_jax.models import vision


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
      variables = {"params": params, "router": router}
      hidden_BTD, _ = model.apply(
          variables, batch["tokens"], batch["segment_ids"],
          batch["positions"], None, method="features",
          **vision.see(model, variables, batch))
      nats, _ = objectives.next_token_loss(
          hidden_BTD, hybrid.unembedding(params), batch["targets"],
          batch["weights"])
      counted_BT = batch["weights"] > 0
      read = answers.count(hidden_BTD, hybrid.unembedding(params), batch)
      return (nats, jnp.sum(counted_BT),
              jnp.sum(bytes_W[batch["targets"]] * counted_BT)), read

    self._sums = sums

  def run(self, params, router):
    """Yields (name, value) of the loss, and how much text it is over.

    Of data with answers also, for each of `interleave.TASKS` that occurs, the
    share that is right to the last token.
    """
    totals = np.zeros(3)  # float64: a sum over millions of tokens
    reads = np.zeros((len(interleave.TASKS), 2))
    for batch in self._batches():
      if self._stop():
        return
      total, read = jax.device_get(
          self._sums(params, router, self._put(batch)))
      totals += total
      reads += read
    nats, tokens, size_bytes = totals.tolist()
    yield "validation_loss", nats / tokens
    yield "validation_bits_per_byte", nats / math.log(2) / size_bytes
    yield "validation_tokens", int(tokens)
    yield "validation_bytes", int(size_bytes)
    for task, (right, asked) in zip(interleave.TASKS, reads.tolist()):
      if asked:
        yield f"validation_{task}_right", right / asked
        yield f"validation_{task}_asked", int(asked)
