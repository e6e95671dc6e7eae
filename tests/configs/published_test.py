"""Published models have the published sizes; nothing is allocated."""
import importlib

import jax
import numpy as np
import pytest

from ultralong_jax import tree
from ultralong_jax.models import hybrid
from ultralong_jax.train import check
from ultralong_jax.train import flops


def counts(name, arg=None):
  """Parameters, and those that a token is multiplied with."""
  config = config_of(name, arg)
  model = hybrid.Hybrid(**config.model)
  params = jax.eval_shape(model.init, jax.random.key(0),
                          np.zeros((1, 1), np.int32))["params"]
  return tree.count(params), flops.active(
      params, config.model.experts, config.model.experts_per_token)


def config_of(name, arg=None):
  return importlib.import_module(f"configs.{name}").get_config(arg)


def test_hybrid_2800b_and_its_tower():
  total, active = counts("hybrid_2800b")
  assert round(total / 1e12, 3) == 2.779
  assert int(active / 1e7) / 100 == 104.18  # billions
  seeing, _ = counts("hybrid_2800b", "vision")
  tower, projector, last_norm = 401_214_464, 46_137_344, 7_168
  assert seeing - total == tower + projector + last_norm


def test_kimi_linear_48b():
  """Against the sum over its published config, term by term."""
  width, heads, value, rank, vocab = 2_304, 32, 128, 512, 163_840
  inner = heads * value
  delta = (
      4 * width * inner + 3 * 4 * inner  # q, k, v, out; convolutions
      + 2 * value * (width + inner) + width * heads  # decay, gate; write
      + heads + inner + value)  # a_log, dt_bias, norm
  latent = (width * heads * 192 + width * (rank + 64) + rank
            + rank * heads * 256 + inner * width)
  unit = 3 * width * 1_024
  routed, shared, dense = 256 * unit, unit, 3 * width * 9_216
  router = 256 * width
  norms = 27 * 2 * width + width
  rest = (20 * delta + 7 * latent + dense + 26 * (shared + router) + norms
          + vocab * width)
  total, active = counts("kimi_linear_48b")
  assert total == rest + 26 * routed + vocab * width
  assert active == rest + 26 * 8 * unit
  assert 48e9 < total < 50e9 and 3e9 < active < 3.2e9


@pytest.mark.parametrize("name", ["hybrid_2800b", "kimi_linear_48b"])
def test_tiny_versions_pass_the_checks_and_keep_the_forms(name):
  whole, tiny = config_of(name).model, config_of(name, "tiny").model
  check.check(config_of(name, "tiny"))
  for leaf in ("glu", "depth", "floor", "latent_gate", "dense_layers"):
    assert tiny[leaf] == whole[leaf]
  for leaf in ("gate_rank", "query_rank", "expert_latent"):
    assert bool(tiny[leaf]) == bool(whole[leaf])
  assert counts(name, "tiny")[0] < 2e7
