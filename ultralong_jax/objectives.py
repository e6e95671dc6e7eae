"""Next-token loss that never holds tokens x vocabulary in float32."""

import math

import jax
import jax.numpy as jnp

# Logits alive at once: 4 MiB of float32 stay near the cache; under 256 tokens
# a block's matmul with a large vocabulary would be bound by reading weights.
BLOCK_ELEMENTS = 2**20
BLOCK_MIN_TOKENS = 256


def next_token_loss(hidden_BTD, w_DW, targets_BT, weights_BT):
  """Sums the weighted cross-entropy of the next token.

    nats = sum_t weights_t * (logsumexp(h_t w) - (h_t w)[target_t])

  Logits exist for a block of tokens at a time. Under differentiation the
  gradients are computed in that same pass (the sum's cotangent is a scalar
  that can be multiplied in later), so logits are never computed twice.

  Args:
    hidden_BTD: final hidden states; their dtype is the matmuls' input dtype.
    w_DW: unembedding, float32.
    targets_BT: next tokens; any valid id where the weight is 0.
    weights_BT: loss weights, 0 on padding.

  Returns:
    nats: float32 scalar, the weighted sum in nats.
    weight: float32 scalar, the sum of the weights.
  """
  weights_BT = weights_BT.astype(jnp.float32)
  return _nats(hidden_BTD, w_DW, targets_BT, weights_BT), jnp.sum(weights_BT)


def likeliest(hidden_BTD, w_DW):
  """Returns the token of the largest logit, a block of logits at a time."""
  def body(carry, block):
    logits_BTW = jnp.einsum("BTD,DW->BTW", block[0], w_DW,
                            preferred_element_type=jnp.float32)
    return carry, jnp.argmax(logits_BTW, axis=-1)

  tokens = hidden_BTD.shape[1]
  w_DW = w_DW.astype(hidden_BTD.dtype)
  blocks = block_count(*hidden_BTD.shape[:2], w_DW.shape[1])
  arrays = [_to_blocks(hidden_BTD, blocks)]
  return _from_blocks(_over_blocks(body, None, arrays)[1], tokens)


def block_count(batch: int, tokens: int, vocab: int) -> int:
  """Returns into how many blocks along T the loss is split."""
  block = max(BLOCK_ELEMENTS // vocab, BLOCK_MIN_TOKENS) // batch
  return math.ceil(tokens / max(block, 1))


def _to_blocks(x, blocks: int):
  """[B, T, ...] -> [N, B, T / N, ...]; T is padded with zeros.

  The batch stays an axis of each block, so that rows sharded over devices
  stay where they are.
  """
  size = math.ceil(x.shape[1] / blocks)
  padding = [(0, 0)] * x.ndim
  padding[1] = (0, blocks * size - x.shape[1])
  x = jnp.pad(x, padding)
  x = x.reshape(x.shape[0], blocks, size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _from_blocks(x, tokens: int):
  """The inverse of _to_blocks."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def _over_blocks(function, carry, arrays):
  """lax.scan over blocks; one block needs no loop."""
  if arrays[0].shape[0] > 1:
    return jax.lax.scan(function, carry, arrays)
  carry, y = function(carry, [x[0] for x in arrays])
  return carry, jax.tree.map(lambda leaf: leaf[None], y)


def _block_loss(hidden_BTD, w_DW, targets_BT):
  """Returns shifted logits, their logsumexp, and nats per token."""
  logits_BTW = jnp.einsum("BTD,DW->BTW", hidden_BTD, w_DW,
                          preferred_element_type=jnp.float32)
  logits_BTW -= jax.lax.stop_gradient(
      jnp.max(logits_BTW, axis=-1, keepdims=True))
  normal_BT = jnp.log(jnp.sum(jnp.exp(logits_BTW), axis=-1))
  target_BT = jnp.take_along_axis(
      logits_BTW, targets_BT[..., None], axis=-1)[..., 0]
  return logits_BTW, normal_BT, normal_BT - target_BT


@jax.custom_vjp
def _nats(hidden_BTD, w_DW, targets_BT, weights_BT):
  blocks = block_count(*targets_BT.shape, w_DW.shape[1])
  w_DW = w_DW.astype(hidden_BTD.dtype)

  def body(nats, block):
    hidden_BTD, targets_BT, weights_BT = block
    *_, nats_BT = _block_loss(hidden_BTD, w_DW, targets_BT)
    return nats + jnp.sum(nats_BT * weights_BT), None

  arrays = [_to_blocks(x, blocks)
            for x in (hidden_BTD, targets_BT, weights_BT)]
  return _over_blocks(body, jnp.float32(0), arrays)[0]


def _nats_forward(hidden_BTD, w_DW, targets_BT, weights_BT):
  tokens = targets_BT.shape[1]
  blocks = block_count(*targets_BT.shape, w_DW.shape[1])
  cast_DW = w_DW.astype(hidden_BTD.dtype)

  def body(carry, block):
    nats, grad_DW = carry
    hidden_BTD, targets_BT, weights_BT = block
    logits_BTW, normal_BT, nats_BT = _block_loss(
        hidden_BTD, cast_DW, targets_BT)
    delta_BTW = jnp.exp(logits_BTW - normal_BT[..., None])
    vocabulary_W = jnp.arange(delta_BTW.shape[-1])
    delta_BTW -= targets_BT[..., None] == vocabulary_W[None, None]
    delta_BTW *= weights_BT[..., None]
    delta_BTW = delta_BTW.astype(hidden_BTD.dtype)
    hidden_grad_BTD = jnp.einsum("BTW,DW->BTD", delta_BTW, cast_DW)
    grad_DW += jnp.einsum("BTD,BTW->DW", hidden_BTD, delta_BTW,
                          preferred_element_type=jnp.float32)
    nats += jnp.sum(nats_BT * weights_BT)
    return (nats, grad_DW), (hidden_grad_BTD, nats_BT)

  arrays = [_to_blocks(x, blocks)
            for x in (hidden_BTD, targets_BT, weights_BT)]
  start = jnp.float32(0), jnp.zeros(w_DW.shape, jnp.float32)
  (nats, grad_DW), per_token = _over_blocks(body, start, arrays)
  hidden_grad_BTD, nats_BT = [_from_blocks(x, tokens) for x in per_token]
  # An empty array carries w's dtype to the backward pass.
  return nats, (hidden_grad_BTD, grad_DW, nats_BT, w_DW[:0])


def _nats_backward(residuals, cotangent):
  hidden_grad_BTD, grad_DW, nats_BT, like_w = residuals
  scale = cotangent.astype(hidden_grad_BTD.dtype)
  return (scale * hidden_grad_BTD, (cotangent * grad_DW).astype(like_w.dtype),
          None, cotangent * nats_BT)


_nats.defvjp(_nats_forward, _nats_backward)
