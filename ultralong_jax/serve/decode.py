"""The decoder: prompts in segments, then one token after another.

Everything that writes text (the command line, notebooks, evaluators,
rollouts) goes through here. A row is one document, so its segment id is 1;
0 marks padding, which changes no state.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax.models import hybrid

# Prompts go in in segments of this many tokens; the rest is padded to a power
# of two, so that any prompt compiles at most log2(512 / 16) + 1 = 6 shapes.
SEGMENT_TOKENS = 512
SEGMENT_MIN_TOKENS = 16
CAPACITY_MIN_TOKENS = 64


def generate(model, variables, prompts: list[list[int]], max_new_tokens: int,
             temperature: float = 0., rng=None, capacity: int | None = None,
             eos: int | list[int] | None = None,
             images=None, index=None) -> list[list[int]]:
  """Continues prompts, all together; equals continuing each alone.

  Args:
    model: Hybrid.
    variables: collections params and, with experts, router.
    prompts: token ids, normally bos first; lengths may differ.
    max_new_tokens: most tokens that are added to each.
    temperature: of sampling; 0 takes the likeliest token.
    rng: a key; needed if temperature is positive.
    capacity: tokens that the state has room for; None makes enough.
    eos: a row ends with this token, or one of these, which is part of the
      result.
    images: `vision.Images` of the prompts, or None.
    index: for each prompt, which embedding of its images stands at each of
      its tokens, -1 for text; None without images.

  Returns:
    The new tokens of each prompt.
  """
  capacity = check(prompts, max_new_tokens, temperature, rng, capacity)
  if rng is None:
    rng = jax.random.key(0)  # greedy: never looked at
  # Copied: leaves may share an array, and what is donated has to be one's own.
  state = jax.tree.map(jnp.copy,
                       hybrid.empty_state(model, len(prompts), capacity))
  seen = None if images is None else (_see(model, variables, images), index)
  logits_BW, state = prefill(model, variables, prompts, state, seen)
  new = [[] for _ in prompts]
  active_B = np.ones(len(prompts), bool)
  ends = [] if eos is None else np.ravel(eos).tolist()
  for index in range(max_new_tokens):
    token_B = choose(logits_BW, temperature, rng, index)
    for row, token in enumerate(np.asarray(token_B).tolist()):
      if active_B[row]:
        if token < 0:
          raise FloatingPointError(f"logits of row {row} are not finite after "
                                   f"{len(new[row])} new tokens")
        new[row].append(token)
        active_B[row] = token not in ends
    if index + 1 == max_new_tokens or not active_B.any():
      break
    logits_BW, state = step(model, variables, token_B, active_B.copy(), state)
  return new


def check(prompts, max_new_tokens, temperature, rng, capacity) -> int:
  """Raises on what cannot be decoded; returns the capacity to use."""
  if not prompts or not all(prompts):
    raise ValueError("every prompt needs a token (bos); there are "
                     f"{len(prompts)} prompts of lengths "
                     f"{[len(p) for p in prompts]}")
  if max_new_tokens < 1:
    raise ValueError(f"{max_new_tokens=} must be at least 1")
  if temperature < 0 or (temperature > 0 and rng is None):
    raise ValueError(f"{temperature=} must be 0, or positive with an rng")
  # The last new token is not read back.
  needed = max(map(len, prompts)) + max_new_tokens - 1
  if capacity is None:
    # A power of two: the state's shape decides what is compiled anew.
    return max(CAPACITY_MIN_TOKENS, 1 << (needed - 1).bit_length())
  if needed > capacity:
    raise ValueError(
        f"the longest prompt ({max(map(len, prompts))} tokens) and "
        f"{max_new_tokens=} need a capacity of {needed}; it is {capacity}")
  return capacity


def prefill(model, variables, tokens: list[list[int]], state, seen=None):
  """Takes prompts into the state, segment by segment.

  Args:
    model: Hybrid.
    variables: collections params and, with experts, router.
    tokens: at least one token for each row of the state; the caller has
      checked the capacity.
    state: of `hybrid.empty_state`, or what an earlier call returned. Donated.
    seen: (media_BND, index), embeddings of all images and, for each row,
      which of them stands at each token, -1 for text; None without images.
      A prompt may be cut anywhere, inside of an image too.

  Returns:
    logits_BW: float32, after each row's last token.
    state: with the prompts taken in.
  """
  longest = max(map(len, tokens))
  logits_BW = None
  start = 0
  while start < longest:
    size = min(SEGMENT_TOKENS, max(
        SEGMENT_MIN_TOKENS, 1 << (longest - start - 1).bit_length()))
    def part(rows, fill):
      x_BT = np.full((len(rows), size), fill, np.int32)
      for row, ids in enumerate(rows):
        ids = ids[start:start + size]
        x_BT[row, :len(ids)] = ids
      return x_BT

    length_B = np.clip([len(ids) - start for ids in tokens], 0, size)
    new_BW, state = _segment(
        model, variables, part(tokens, 0), length_B.astype(np.int32), state,
        None if seen is None else (seen[0], part(seen[1], -1)))
    logits_BW = new_BW if logits_BW is None else jnp.where(
        length_B[:, None] > 0, new_BW, logits_BW)
    start += size
  return logits_BW, state


def step(model, variables, token_B, active_B, state):
  """Takes one more token into each row that is active.

  Args:
    model: Hybrid.
    variables: collections params and, with experts, router.
    token_B: next token.
    active_B: bool; other rows keep their state, and their logits mean
      nothing.
    state: donated.

  Returns:
    logits_BW: float32, after that token.
    state: with the token taken in.
  """
  return _segment(model, variables, token_B[:, None],
                  np.asarray(active_B, np.int32), state)


@functools.partial(jax.jit, static_argnums=0)
def _see(model, variables, images):
  return model.apply(variables, images, method="see")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _segment(model, variables, tokens_BT, length_B, state, seen=None):
  """Runs the first length_B tokens of each row; logits after the last."""
  tokens = tokens_BT.shape[1]
  segment_ids_BT = jnp.arange(tokens)[None] < length_B[:, None]
  hidden_BTD, state = model.apply(
      variables, tokens_BT, segment_ids_BT.astype(jnp.int32), None, state,
      method="features", **({} if seen is None else {"seen": seen}))
  # The unembedding sees one token a row, not the whole segment.
  last_B = jnp.maximum(length_B - 1, 0)
  hidden_BD = jnp.take_along_axis(
      hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
  w_DW = hybrid.unembedding(variables["params"]).astype(hidden_BD.dtype)
  logits_BW = jnp.einsum("BD,DW->BW", hidden_BD, w_DW,
                         preferred_element_type=jnp.float32)
  return logits_BW, state


@jax.jit
def choose(logits_BW, temperature, rng, index):
  """Returns the token of each row, -1 where logits are not finite.

  Args:
    logits_BW: float32.
    temperature: 0 takes the likeliest token.
    rng: a key of the whole text.
    index: number of the new token; draws differ from one to the next.
  """
  greedy_B = jnp.argmax(logits_BW, axis=-1)
  sampled_B = jax.random.categorical(
      jax.random.fold_in(rng, index),
      logits_BW / jnp.maximum(temperature, 1e-6))
  token_B = jnp.where(temperature > 0, sampled_B, greedy_B)
  return jnp.where(jnp.all(jnp.isfinite(logits_BW), axis=-1), token_B, -1)
