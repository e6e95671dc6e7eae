"""The decoder with prototypes: splits, padding, walls, evaluation, noise."""
import chex
import jax
import numpy as np
import pytest

from tests.ultralong_jax.models import hybrid_test
from ultralong_jax.models import hybrid

T, SEGMENTS = hybrid_test.T, hybrid_test.SEGMENTS


@pytest.fixture(scope="module")
def setup():
  model = hybrid.Hybrid(**hybrid_test.sizes(
      layers=2, pattern="m", dense_layers=0, depth="residual",
      router="prototype", router_similarity="distance", routing_width=8,
      balance="load_quantile", glu_input_norm=True, router_noise=1.,
      capacity_factor=.5))
  assert model.plan()[0][1][0][2] == 2  # a scan
  tokens = jax.random.randint(jax.random.key(0), (2, T), 0, 40)
  variables = jax.tree.map(jax.numpy.asarray,
                           hybrid_test.settled(model, tokens))
  apply = jax.jit(lambda *args: model.apply(variables, *args))
  return model, variables, tokens, apply


def test_prototypes_give_the_same_however_split(setup):
  model, _, tokens, apply = setup
  whole, end = apply(tokens, SEGMENTS, None, hybrid.empty_state(model, 2, T))
  alone, _ = apply(tokens, SEGMENTS, None, None)
  np.testing.assert_allclose(
      hybrid_test.real(whole), hybrid_test.real(alone),
      atol=hybrid_test.CLOSE)
  for size in (20, 1):
    state, parts = hybrid.empty_state(model, 2, T), []
    for start in range(0, T, size):
      logits, state = apply(tokens[:, start:start + size],
                            SEGMENTS[:, start:start + size], None, state)
      parts.append(logits)
    np.testing.assert_allclose(
        hybrid_test.real(np.concatenate(parts, 1)), hybrid_test.real(whole),
        atol=hybrid_test.CLOSE)
    chex.assert_trees_all_close(state, end, atol=hybrid_test.CLOSE)


def test_padding_changes_nothing_and_other_documents_have_no_gradient(setup):
  model, variables, tokens, apply = setup
  logits, _ = apply(tokens, SEGMENTS, None, None)
  changed, _ = apply(tokens.at[1, 33:].set(5), SEGMENTS, None, None)
  np.testing.assert_array_equal(hybrid_test.real(logits),
                                hybrid_test.real(changed))
  x_BTD = variables["params"]["w_embed_WD"][tokens]

  @jax.jit
  @jax.grad
  def slope(x_BTD):
    hidden, _ = model.apply(variables, x_BTD, SEGMENTS, method="decode")
    return jax.numpy.sum(hidden[0, 15] ** 2)

  d_BTD = np.array(slope(x_BTD))
  assert np.abs(d_BTD[0, 11:16]).max() > 0
  d_BTD[0, 11:16] = 0
  assert not d_BTD.any()


def test_only_training_draws_noise_and_drops(setup):
  model, variables, tokens, apply = setup
  plain = model.clone(router_noise=0., capacity_factor=0.)
  np.testing.assert_array_equal(
      apply(tokens, SEGMENTS, None, None)[0],
      jax.jit(plain.apply)(variables, tokens, SEGMENTS)[0])
  training = model.clone(training=True)

  @jax.jit
  def train(key):
    _, written = training.apply(variables, tokens, SEGMENTS,
                                mutable=["statistics"], rngs={"noise": key})
    return written["statistics"]["stack"]["block_0"]["layers_0"]["layer_0"][
        "experts"]

  one, other = train(jax.random.key(0)), train(jax.random.key(1))
  chex.assert_trees_all_equal(one, train(jax.random.key(0)))
  assert one["load_E"].shape == (2, 4) and (one["dropped"] > 0).all()
  assert (one["load_E"] != other["load_E"]).any(axis=1).all()
