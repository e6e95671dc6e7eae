"""A step: micro-batches, balancing, skipping, devices."""

import functools
import os
import pathlib
import subprocess
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from configs import common
from ultralong_jax import optim
from ultralong_jax import sharding
from ultralong_jax import tree
from ultralong_jax.layers import experts
from ultralong_jax.models import hybrid
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

VOCAB = 24


class Toy(nn.Module):
  """What a step sees of Hybrid, in a layer of experts: compiles in no time.

  Attributes:
    experts_per_token: of four.
    balance, router, router_similarity, router_noise, training: of Hybrid.
  """
  experts_per_token: int = 2
  balance: str = "quantile"
  router: str = "hidden"
  router_similarity: str = "cosine"
  router_noise: float = 0.
  training: bool = False

  def setup(self):
    normal = nn.initializers.normal(0.1)
    self.w_embed_WD = self.param("w_embed_WD", normal, (VOCAB, 16))
    self.w_unembed_DW = self.param("w_unembed_DW", normal, (16, VOCAB))
    self.experts = experts.LatentExperts(
        4, self.experts_per_token, hidden=8, balance=self.balance,
        router=self.router, routing_width=8, similarity=self.router_similarity,
        noise=self.router_noise, training=self.training)

  def __call__(self, tokens_BT):
    ones_BT = jnp.ones_like(tokens_BT)
    hidden_BTD, _ = self.features(tokens_BT, ones_BT, ones_BT, None)
    return jnp.einsum("BTD,DW->BTW", hidden_BTD, self.w_unembed_DW)

  def features(self, tokens_BT, segment_ids_BT, positions_BT, state):
    """As Hybrid's; says it has a decay of -0.5 in one channel, -2 in one."""
    del positions_BT
    x_BTD = self.w_embed_WD[tokens_BT]
    tokens = jnp.float32(tokens_BT.size)
    for name, x in (("decay_sum_HK", tokens * jnp.array([[-0.5, -2.]])),
                    ("sampled", tokens)):
      if not self.is_initializing():
        self.sow("statistics", name, x, init_fn=lambda: 0,
                 reduce_fn=lambda a, b: a + b)
    return x_BTD + self.experts(x_BTD, segment_ids_BT > 0), state


def tiny_hybrid():
  c = common.get_config().model
  c.update(dict(
      vocab=VOCAB, width=16, layers=2, pattern="dm", heads=2, key_width=8,
      value_width=8, latent_heads=2, latent_key_width=8, latent_shared_width=4,
      latent_value_width=8, latent_rank=8, dense_hidden=16, experts=4,
      expert_hidden=8, expert_latent=8))
  return hybrid.Hybrid(**c)


# Hybrid compiles for most of a minute.
MODELS = ["toy", pytest.param("hybrid", marks=pytest.mark.slow)]


@functools.cache
def parts(name="toy", optimizer="muon", **fields):
  """A state before the first step, and a function that makes steps."""
  model = {"toy": Toy, "hybrid": tiny_hybrid}[name](**fields)
  variables = jax.jit(model.init)(jax.random.key(0),
                                  jnp.zeros((1, 1), jnp.int32))
  c = common.get_config().optim
  c.update(dict(name=optimizer, lr=0.01, adam_lr=0.01, warmup_steps=2))
  optimizer = optim.make(c, variables["params"], steps=100)
  state = state_lib.create({"params": variables["params"],
                            "router": variables["router"]},
                           optimizer, jax.random.PRNGKey(0))
  return state, functools.partial(step_lib.make_train_step, model, optimizer)


@functools.cache
def compiled(accumulate, name):
  """The state, and a step whose tokens stand for 0, 1 or 2 bytes."""
  state, make = parts(name)
  return state, jax.jit(make(accumulate=accumulate,
                             byte_lengths=np.arange(VOCAB) % 3))


def make_batch(rows=8, tokens=24, seed=0):
  """Two documents a row and padding; other lengths in every row."""
  random = np.random.default_rng(seed)
  ids = random.integers(0, VOCAB, (rows, tokens + 1), np.int32)
  cut_B = random.integers(1, tokens // 2, (rows, 1))
  end_B = random.integers(tokens // 2, tokens + 1, (rows, 1))
  index_T = np.arange(tokens)[None]
  segment_ids = 1 + (index_T >= cut_B).astype(np.int32)
  segment_ids = np.where(index_T < end_B, segment_ids, 0)
  return {"tokens": ids[:, :-1], "targets": ids[:, 1:],
          "segment_ids": segment_ids.astype(np.int32),
          "positions": np.where(index_T < cut_B, index_T,
                                index_T - cut_B).astype(np.int32),
          "weights": (segment_ids > 0).astype(np.float32)}


def assert_close(x, y, **tolerance):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance),
               x, y)


def assert_same(x, y):
  jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_add_up(name):
  batch = make_batch()
  states, metrics = [], []
  for accumulate in (1, 4):
    state, train_step = compiled(accumulate, name)
    for _ in range(2):
      state, figures = train_step(state, batch)
    states.append(state)
    metrics.append(figures)
  assert_close(metrics[0], metrics[1], rtol=1e-4)
  # Counts are integers: thresholds agree unless a score crosses a bin's edge.
  assert_close(states[0].router, states[1].router, atol=1e-4)
  # Adam divides tiny gradients by their own size; compare to the rate's 0.01.
  assert_close(states[0].params, states[1].params, atol=5e-4)


def test_metrics_say_what_they_say():
  batch = make_batch()
  state, train_step = compiled(1, "toy")
  _, metrics = train_step(state, batch)
  assert metrics["tokens"] == np.sum(batch["segment_ids"] > 0)
  # Near-zero logits at first.
  np.testing.assert_allclose(metrics["loss"], np.log(VOCAB), rtol=0.02)
  size_bytes = np.sum(batch["targets"] % 3 * batch["weights"])
  bits = metrics["loss"] * metrics["tokens"] / np.log(2)
  np.testing.assert_allclose(metrics["bits_per_byte"], bits / size_bytes,
                             rtol=1e-5)
  np.testing.assert_allclose(metrics["lr"], 0.005, rtol=1e-5)
  np.testing.assert_allclose(np.mean(metrics["load"]), 1., rtol=1e-5)
  assert metrics["load"].shape == (1, 4)  # one layer
  assert metrics["load_max_over_mean"] == np.max(metrics["load"])
  decays = [metrics[f"decay_{name}"] for name in ("min", "mean", "max")]
  np.testing.assert_allclose(decays, [-2., -1.25, -0.5], rtol=1e-5)
  assert metrics["skipped"] == 0
  assert all(x.dtype == jnp.float32 for x in metrics.values())


def test_a_step_starts_from_the_thresholds_of_the_one_before():
  batch = make_batch()
  state, train_step = compiled(1, "toy")
  first, _ = train_step(state, batch)
  assert_moved(state.router, first.router)
  second, metrics = train_step(first, batch)
  # Same parameters, thresholds forgotten: other routes.
  _, forgot = train_step(first.replace(router=state.router), batch)
  assert np.any(forgot["load"] != metrics["load"])
  assert_moved(first.router, second.router)


def assert_moved(old, new):
  assert all(np.any(x != y) for x, y in
             zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def test_a_skipped_step_changes_nothing():
  state, train_step = compiled(1, "toy")
  state, before = train_step(state, make_batch())
  batch = make_batch(seed=1)
  batch["weights"][batch["weights"] > 0] = np.inf
  after, metrics = train_step(state, batch)
  assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
  assert_same(after.params, state.params)
  assert_same(after.opt_state, state.opt_state)
  assert_same(after.router, state.router)
  assert after.step == state.step + 1 == 2
  assert metrics["lr"] == before["lr"]


def test_padding_alone_gives_zero_gradient_and_leaves_thresholds():
  state, train_step = compiled(1, "toy")
  batch = {k: np.zeros_like(x) for k, x in make_batch().items()}
  after, metrics = train_step(state, batch)
  assert metrics["grad_norm"] == 0 and metrics["loss"] == 0
  assert metrics["skipped"] == 0
  assert_same(after.router, state.router)


def test_loss_falls():
  state, train_step = compiled(1, "toy")
  batch = make_batch()
  losses = []
  for _ in range(60):
    state, metrics = train_step(state, batch)
    losses.append(metrics["loss"])
  assert losses[-1] < 0.9 * losses[0]


def test_refuses_rows_that_do_not_split():
  state, make = parts()
  with pytest.raises(ValueError, match="accumulate=3.*8 rows"):
    jax.eval_shape(make(accumulate=3), state, make_batch())
  with pytest.raises(ValueError, match="balance='sign'"):
    step_lib.make_train_step(Toy(balance="sign"), None, 1)
  with pytest.raises(TypeError, match="rate"):
    make(accumulate=1, balance={"rate": 1.})


def test_thresholds_can_stay(monkeypatch):
  def never(*_):
    raise AssertionError("thresholds moved")
  monkeypatch.setattr(step_lib.balance_lib, "update", never)
  state, make = parts(balance="none")
  jax.eval_shape(make(accumulate=1), state, make_batch())
  state, make = parts()
  with pytest.raises(AssertionError, match="thresholds moved"):
    jax.eval_shape(make(accumulate=1), state, make_batch())


@pytest.mark.parametrize("name", MODELS)
def test_eight_devices_equal_one(name):
  """In a process of its own: devices are counted when JAX starts."""
  root = pathlib.Path(__file__).parents[3]
  flags = (os.environ.get("XLA_FLAGS", "")
           + " --xla_force_host_platform_device_count=8")
  run = subprocess.run(
      [sys.executable, __file__, name], capture_output=True, text=True,
      cwd=root, env={**os.environ, "JAX_PLATFORMS": "cpu",
                     "PYTHONPATH": str(root), "XLA_FLAGS": flags})
  assert run.returncode == 0, run.stderr[-3000:]


def compare_devices(name):
  """The same two steps on one device and on eight."""
  assert jax.device_count() == 8
  batch = make_batch(rows=16)
  results = []
  for devices in (1, 8):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,),
                         devices=jax.devices()[:devices])
    whole = sharding.whole(mesh)
    state, make = parts(name)
    state = jax.device_put(state, whole)
    rows = jax.device_put(batch, sharding.rows(mesh))
    train_step = jax.jit(make(accumulate=2), out_shardings=whole)
    for _ in range(2):
      state, metrics = train_step(state, rows)
    results.append(jax.device_get((state.params, state.router, metrics)))
  assert_close(results[0][0], results[1][0], atol=1e-3)
  assert_close(results[0][1], results[1][1], atol=1e-4)
  assert_close(results[0][2], results[1][2], rtol=1e-3)
  assert tree.finite(results[1][0])


if __name__ == "__main__":
  compare_devices(sys.argv[1])
