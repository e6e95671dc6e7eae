"""The blocked loss is the plain one, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax import objectives


def plain_loss(hidden_BTD, w_DW, targets_BT, weights_BT):
  """Log-softmax over all tokens at once."""
  logits_BTW = jnp.einsum("BTD,DW->BTW", hidden_BTD.astype(jnp.float32), w_DW)
  log_BTW = jax.nn.log_softmax(logits_BTW)
  log_BT = jnp.take_along_axis(log_BTW, targets_BT[..., None], -1)[..., 0]
  return -jnp.sum(log_BT * weights_BT), jnp.sum(weights_BT)


def inputs(batch, tokens, width, vocab, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden_BTD = jax.random.normal(keys[0], (batch, tokens, width)).astype(dtype)
  w_DW = jax.random.normal(keys[1], (width, vocab)) / width**0.5
  targets_BT = jax.random.randint(keys[2], (batch, tokens), 0, vocab)
  weights_BT = jax.random.uniform(keys[3], (batch, tokens))
  weights_BT *= weights_BT > 0.3  # some tokens do not count
  return hidden_BTD, w_DW, targets_BT, weights_BT


def value_and_gradients(loss, args):
  def scalar(hidden_BTD, w_DW, weights_BT):
    nats, weight = loss(hidden_BTD, w_DW, args[2], weights_BT)
    return 3 * nats / weight  # a cotangent that is not 1
  return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2)))(
      args[0], args[1], args[3])


def relative(x, y):
  x, y = np.float64(x), np.float64(y)
  return np.sqrt(np.sum((x - y)**2) / np.sum(y**2))


@pytest.mark.parametrize("tokens, elements", [
    (1, 2**20), (37, 2**20), (24, 16), (37, 200)])
def test_equals_the_plain_loss(monkeypatch, tokens, elements):
  monkeypatch.setattr(objectives, "BLOCK_ELEMENTS", elements)
  monkeypatch.setattr(objectives, "BLOCK_MIN_TOKENS", 1)
  args = inputs(2, tokens, 8, 19)
  ours = value_and_gradients(objectives.next_token_loss, args)
  plain = value_and_gradients(plain_loss, args)
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)):
    assert relative(x, y) < 1e-6
  # The value alone takes another path than under differentiation.
  nats, weight = objectives.next_token_loss(*args)
  assert relative(3 * nats / weight, plain[0]) < 1e-6


def test_bfloat16_hidden_states():
  args = inputs(2, 40, 64, 50, jnp.bfloat16)
  ours = value_and_gradients(objectives.next_token_loss, args)
  plain = value_and_gradients(plain_loss, args)
  assert ours[1][0].dtype == jnp.bfloat16 and ours[1][1].dtype == jnp.float32
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)):
    assert relative(x, y) < 1e-2


def test_a_wrong_gradient_is_seen():
  args = inputs(2, 24, 8, 19)
  _, (hidden_grad_BTD, *_) = value_and_gradients(
      objectives.next_token_loss, args)
  assert relative(hidden_grad_BTD[:, ::-1], hidden_grad_BTD) > 0.5


def test_large_logits_stay_finite():
  hidden_BTD, *rest = inputs(1, 8, 8, 19)
  value, gradients = value_and_gradients(
      objectives.next_token_loss, (1e4 * hidden_BTD, *rest))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  assert np.isfinite(value)


def test_never_holds_tokens_by_vocabulary():
  batch, tokens, width, vocab = 1, 8192, 64, 32768
  shapes = jax.eval_shape(lambda: inputs(batch, tokens, width, vocab))
  loss = jax.grad(lambda *args: objectives.next_token_loss(*args)[0],
                  argnums=(0, 1))
  memory = jax.jit(loss).lower(*shapes).compile().memory_analysis()
  logits_bytes = 4 * tokens * vocab  # 1 GiB
  block_bytes = 4 * vocab * objectives.BLOCK_MIN_TOKENS  # 32 MiB
  # Beside three arrays of a block's size: copies of what the loss reads.
  copies_bytes = 4 * 4 * (tokens * width + width * vocab)
  assert memory.temp_size_in_bytes < 3 * block_bytes + copies_bytes
  assert memory.temp_size_in_bytes < logits_bytes / 6


@pytest.mark.parametrize("batch, tokens, vocab, largest_bytes", [
    (1, 2048, 272, 4 * 2**20), (8, 512, 272, 4 * 2**20),
    (1, 2**20, 163840, 2**28), (64, 2**17, 163840, 2**28)])
def test_blocks_are_bounded(batch, tokens, vocab, largest_bytes):
  blocks = objectives.block_count(batch, tokens, vocab)
  block = -(-tokens // blocks)
  assert 4 * batch * block * vocab <= largest_bytes
  # Not needlessly small either: that many blocks are not far from needed.
  assert blocks == 1 or 8 * batch * block * vocab >= 4 * 2**20 / 2
