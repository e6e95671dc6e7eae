"""Decoding with carried state is decoding without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from ultralong_jax.models import hybrid
from ultralong_jax.serve import decode

PROMPTS = [[1, 2, 5, 4, 7, 9], [1], [1, 8, 8]]


def tiny_model(**leaves):
  c = common.get_config().model
  c.update(dict(vocab=24, width=16, layers=2, pattern="dm", heads=2,
                key_width=8, value_width=8, latent_heads=2,
                latent_key_width=8, latent_shared_width=4,
                latent_value_width=8, latent_rank=8, dense_hidden=16,
                experts=4, expert_hidden=8, expert_latent=8))
  c.update(leaves)
  return hybrid.Hybrid(**c)


@functools.cache
def model_and_variables():
  model = tiny_model()
  variables = jax.jit(model.init)(jax.random.key(1),
                                  jnp.zeros((1, 1), jnp.int32))
  # Larger weights: at the initial ones all tokens are about equally likely.
  params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x,
                        variables["params"])
  return model, {"params": params, "router": variables["router"]}


@functools.cache
def forward():
  model, variables = model_and_variables()
  return jax.jit(lambda tokens_BT, segment_ids_BT: model.apply(
      variables, tokens_BT, segment_ids_BT, None, None)[0])


def greedy_without_state(prompt, max_new_tokens, eos=None):
  """Runs the whole prefix again for each token."""
  ids = list(prompt)
  for _ in range(max_new_tokens):
    tokens_BT = np.zeros((1, 32), np.int32)
    tokens_BT[0, :len(ids)] = ids
    real_BT = (np.arange(32) < len(ids))[None].astype(np.int32)
    ids.append(int(jnp.argmax(forward()(tokens_BT, real_BT)[0, len(ids) - 1])))
    if ids[-1] == eos:
      break
  return ids[len(prompt):]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
  """Prompts of six tokens already come in two segments."""
  monkeypatch.setattr(decode, "SEGMENT_TOKENS", 4)
  monkeypatch.setattr(decode, "SEGMENT_MIN_TOKENS", 4)


def test_equals_running_the_prefix_again_for_each_token():
  new = decode.generate(*model_and_variables(), PROMPTS, 12)
  expected = [greedy_without_state(prompt, 12) for prompt in PROMPTS]
  assert new == expected
  # The test would be empty if all rows said one thing.
  assert len({tuple(row) for row in new}) == len(new)
  assert all(len(set(row)) > 1 for row in new)


def test_rows_of_a_batch_do_not_see_each_other():
  together = decode.generate(*model_and_variables(), PROMPTS, 8)
  for prompt, row in zip(PROMPTS, together):
    assert decode.generate(*model_and_variables(), [prompt], 8) == [row]


def test_a_row_ends_at_eos_and_the_others_go_on():
  free = decode.generate(*model_and_variables(), PROMPTS, 8)
  eos = free[0][2]
  stopped = decode.generate(*model_and_variables(), PROMPTS, 8, eos=eos)
  for row, whole in zip(stopped, free):
    assert row == (whole[:whole.index(eos) + 1] if eos in whole else whole)
  assert len(stopped[0]) <= 3


def test_sampling_follows_the_logits():
  logits_W = jax.random.normal(jax.random.key(0), (24,))
  logits_BW = jnp.repeat(logits_W[None], 4000, axis=0)
  token_B = decode.choose(logits_BW, 0.7, jax.random.key(1), 0)
  share_W = np.bincount(token_B, minlength=24) / 4000
  expected_W = jax.nn.softmax(logits_W / 0.7)
  assert np.abs(share_W - expected_W).max() < 0.03
  assert np.abs(expected_W - jax.nn.softmax(logits_W)).max() > 0.05
  assert np.any(token_B != decode.choose(logits_BW, 0.7, jax.random.key(1), 1))
  assert np.all(decode.choose(logits_BW, 0., jax.random.key(1), 0)
                == jnp.argmax(logits_W))


def test_a_key_decides_the_text():
  def run(seed):
    return decode.generate(*model_and_variables(), PROMPTS[:1], 8, 1.,
                           jax.random.key(seed))
  assert run(0) == run(0) != run(1)


def test_prefill_goes_on_from_a_state():
  model, variables = model_and_variables()
  whole = jax.tree.map(jnp.copy, hybrid.empty_state(model, 1, 64))
  expected_BW, _ = decode.prefill(model, variables, [PROMPTS[0]], whole)
  state = jax.tree.map(jnp.copy, hybrid.empty_state(model, 1, 64))
  _, state = decode.prefill(model, variables, [PROMPTS[0][:3]], state)
  logits_BW, state = decode.prefill(model, variables, [PROMPTS[0][3:]], state)
  np.testing.assert_allclose(logits_BW, expected_BW, rtol=1e-4, atol=1e-4)
  assert state.length_B[0] == len(PROMPTS[0])


def test_capacity_just_fits():
  assert len(decode.generate(*model_and_variables(), [[1, 2, 3]], 62,
                             capacity=64)[0]) == 62
  with pytest.raises(ValueError, match="need a capacity of 65; it is 64"):
    decode.generate(*model_and_variables(), [[1, 2, 3]], 63, capacity=64)


@pytest.mark.parametrize("leaves, message", [
    ({"prompts": [[1], []]}, "every prompt needs a token"),
    ({"prompts": []}, "every prompt needs a token"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"temperature": -1.}, "temperature=-1.0"),
    ({"temperature": 1.}, "with an rng")])
def test_says_what_cannot_be_decoded(leaves, message):
  with pytest.raises(ValueError, match=message):
    decode.generate(*model_and_variables(),
                    **{"prompts": [[1]], "max_new_tokens": 1, **leaves})


def test_broken_parameters_do_not_write_text():
  model, variables = model_and_variables()
  broken = jax.tree.map(lambda x: x * jnp.nan, variables)
  with pytest.raises(FloatingPointError, match="row 0"):
    decode.generate(model, broken, [[1]], 4)


def test_delta_layers_cost_the_same_at_any_length():
  model = tiny_model(pattern="d", layers=2)
  small, large = [jax.eval_shape(lambda: hybrid.empty_state(model, 1, size))
                  for size in (64, 2**20)]
  assert jax.tree.leaves(small) == jax.tree.leaves(large)
