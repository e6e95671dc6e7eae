import math

import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.evaluate import perplexity


class Uniform:
  """A model that thinks every one of four tokens as likely."""

  def apply(self, variables, tokens_BT, segment_ids_BT, positions_BT, state,
            method):
    assert method == "features" and state is None
    return jnp.zeros((*tokens_BT.shape, 2)), None


PARAMS = {"w_unembed_DW": jnp.ones((2, 4))}


def batch(targets_BT, weights_BT):
  targets_BT = np.array(targets_BT, np.int32)
  return {"tokens": targets_BT, "targets": targets_BT,
          "segment_ids": np.ones_like(targets_BT),
          "positions": np.zeros_like(targets_BT),
          "weights": np.array(weights_BT, np.float32)}


def test_bits_are_shared_by_the_bytes_of_the_targets():
  batches = [batch([[0, 1, 2, 0]], [[1, 1, 1, 0]]),
             batch([[3, 3, 0, 0]], [[1, 1, 0, 0]])]
  evaluator = perplexity.Perplexity(Uniform(), lambda: iter(batches),
                                    [1, 3, 0, 2], put=lambda x: x)
  figures = dict(evaluator.run(PARAMS, {}))
  # Five targets of two bits, one of them a special token without bytes.
  assert figures["validation_loss"] == pytest.approx(math.log(4))
  assert figures["validation_bits_per_byte"] == pytest.approx(
      5 * 2 / (1 + 3 + 0 + 2 + 2))
  assert figures["validation_tokens"] == 5
  assert figures["validation_bytes"] == 8
  assert dict(evaluator.run(PARAMS, {})) == figures


def test_stopped_evaluation_gives_no_figure():
  stops = iter([False, True])
  evaluator = perplexity.Perplexity(
      Uniform(), lambda: iter(2 * [batch([[0]], [[1]])]), [1, 1, 1, 1],
      put=lambda x: x, stop=lambda: next(stops))
  assert dict(evaluator.run(PARAMS, {})) == {}
