"""The layer that predicts the token after the next."""
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from ultralong_jax import optim, tree
from ultralong_jax.models import hybrid, multi_token
from ultralong_jax.train import flops
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

T, VOCAB = 14, 40
# Each document has ids of its own.
SEGMENTS_BT = np.asarray([[1] * 6 + [2] * 8, [1] * 4 + [2] * 5 + [0] * 5])


def build(**changes):
  c = dict(common.model())
  c.update(vocab=VOCAB, width=16, layers=1, pattern="m", latent_heads=2,
           latent_key_width=4, latent_shared_width=4, latent_value_width=4,
           latent_rank=8, dense_hidden=16, dense_layers=1, experts=4,
           expert_hidden=8, expert_latent=8, mtp=True)
  c.update(changes)
  return hybrid.Hybrid(**c)


MODEL = build()


def make_batch():
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, 13, SEGMENTS_BT.shape) + 13 * SEGMENTS_BT
  # A document goes on after its last token in the row.
  targets_BT = np.roll(tokens_BT, -1, axis=1)
  for row, last in ((0, 5), (0, 13), (1, 3), (1, 8)):
    targets_BT[row, last] = 13 * SEGMENTS_BT[row, last] + 7
  real_BT = SEGMENTS_BT > 0
  weights_BT = np.where(real_BT, rng.uniform(0.5, 2, real_BT.shape), 0)
  return {"tokens": tokens_BT.astype(np.int32),
          "targets": np.where(real_BT, targets_BT, 0).astype(np.int32),
          "segment_ids": SEGMENTS_BT.astype(np.int32),
          "positions": np.zeros_like(SEGMENTS_BT, np.int32),
          "weights": weights_BT.astype(np.float32)}


BATCH = make_batch()
ASKED = multi_token.look_ahead(*(BATCH[name] for name in (
    "tokens", "targets", "weights", "segment_ids")))


@functools.cache
def settled():
  """Parameters, also those that start at zero or one, that count."""
  params = jax.eval_shape(MODEL.init, jax.random.key(0),
                          BATCH["tokens"])["params"]
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype),
      params)


@jax.jit
def features(params, tokens_BT, next_BT, segment_ids_BT, state=(None, None)):
  """Both predictions, each with its own state."""
  def run(model):
    hidden_BTD, own = model.features(tokens_BT, segment_ids_BT, None, state[0])
    ahead_BTD, draft = model.draft(hidden_BTD, next_BT, segment_ids_BT, None,
                                   state[1])
    return hidden_BTD, ahead_BTD, (own, draft)
  return MODEL.apply({"params": params}, method=run)


def test_looks_ahead_inside_documents_only():
  next_BT, targets_BT, weights_BT = ASKED
  for b, t in np.ndindex(*SEGMENTS_BT.shape):
    if not SEGMENTS_BT[b, t]:
      assert weights_BT[b, t] == 0
      continue
    assert next_BT[b, t] == BATCH["targets"][b, t]
    inside = t + 1 < T and SEGMENTS_BT[b, t + 1] == SEGMENTS_BT[b, t]
    assert weights_BT[b, t] == (BATCH["weights"][b, t + 1] if inside else 0)
    if inside:
      assert targets_BT[b, t] == BATCH["targets"][b, t + 1]
  # Where a target is not asked for, the token after it is known all the same.
  next_BT, _, weights_BT = multi_token.look_ahead(
      BATCH["tokens"], 0 * BATCH["targets"], 0 * BATCH["weights"], SEGMENTS_BT)
  assert next_BT[0, 2] == BATCH["tokens"][0, 3] and not weights_BT.any()


def test_nothing_but_the_draft_reads_the_layer():
  params = dict(settled())
  hidden_BTD, ahead_BTD, _ = features(params, BATCH["tokens"], ASKED[0],
                                      SEGMENTS_BT)
  ahead = params.pop("ahead")
  assert set(tree.named_leaves(ahead)) > {
      "w_hidden_DD", "w_next_DD", "hidden_norm/scale_D", "next_norm/scale_D"}
  plain = build(mtp=False)
  chex.assert_trees_all_equal_shapes(params, jax.eval_shape(
      plain.init, jax.random.key(0), BATCH["tokens"])["params"])
  plain_BTD, _ = jax.jit(functools.partial(plain.apply, method="features"))(
      {"params": params}, BATCH["tokens"], SEGMENTS_BT)
  np.testing.assert_array_equal(hidden_BTD, plain_BTD)
  assert np.abs(ahead_BTD - hidden_BTD).max() > 0.1


def test_drafts_from_a_state():
  """Whole, split anywhere and token by token: the same."""
  params = settled()
  whole = features(params, BATCH["tokens"], ASKED[0], SEGMENTS_BT)[:2]
  start = (hybrid.empty_state(MODEL, 2, T),
           hybrid.empty_draft_state(MODEL, 2, T))
  real = SEGMENTS_BT > 0
  ends = []
  for size in (T, 7, 1):
    state, parts = start, []
    for begin in range(0, T, size):
      part = np.s_[:, begin:begin + size]
      *hidden, state = features(params, BATCH["tokens"][part], ASKED[0][part],
                                SEGMENTS_BT[part], state)
      parts.append(hidden)
    ends.append(state)
    for one, other in zip(whole, zip(*parts)):
      np.testing.assert_allclose(
          np.concatenate(other, 1)[real], one[real], atol=1e-4)
    chex.assert_trees_all_close(state, ends[0], atol=1e-4)
  np.testing.assert_array_equal(ends[0][1].length_B, [14, 9])


def test_documents_are_walls_and_padding_is_nothing():
  """No gradient reaches the embedding of another document's tokens."""
  def loss(params, weight_BT):
    _, ahead_BTD, _ = features(params, BATCH["tokens"], ASKED[0], SEGMENTS_BT)
    return jnp.sum(ahead_BTD**2 * weight_BT[..., None])

  grad = jax.jit(jax.grad(loss))
  for row, last, ids in ((0, 5, range(13, 26)), (0, 13, range(26, 39)),
                         (1, 3, range(13, 26)), (1, 8, range(26, 39))):
    weight_BT = np.zeros(SEGMENTS_BT.shape, np.float32)
    weight_BT[row, last] = 1
    dw_WD = np.array(grad(settled(), weight_BT)["w_embed_WD"])
    assert np.abs(dw_WD[BATCH["targets"][row, last]]).max() > 0
    dw_WD[list(ids)] = 0
    assert not dw_WD.any()
  padded = [np.where(SEGMENTS_BT > 0, x, 5) for x in (BATCH["tokens"],
                                                      ASKED[0])]
  real = SEGMENTS_BT > 0
  np.testing.assert_array_equal(
      features(settled(), *padded, SEGMENTS_BT)[1][real],
      features(settled(), BATCH["tokens"], ASKED[0], SEGMENTS_BT)[1][real])


def make_step(model, params, **settings):
  c = common.get_config().optim
  c.update(name="adamw", warmup_steps=0)
  optimizer = optim.make(c, params, steps=10)
  return optimizer, step_lib.make_train_step(
      model, optimizer, mtp_weight=0.3, **settings)


def test_training_descends_both_losses():
  """Against softmax over all logits, forward and gradient, in two parts."""
  def losses(params):
    hidden_BTD, ahead_BTD, _ = features(params, BATCH["tokens"], ASKED[0],
                                        SEGMENTS_BT)
    found = []
    for x_BTD, targets_BT, weights_BT in (
        (hidden_BTD, BATCH["targets"], BATCH["weights"]),
        (ahead_BTD, *ASKED[1:])):
      log_p_BTW = jax.nn.log_softmax(x_BTD @ params["w_unembed_DW"])
      nats_BT = -jnp.take_along_axis(log_p_BTW, targets_BT[..., None], -1)[
          ..., 0]
      found.append(jnp.sum(weights_BT * nats_BT) / jnp.sum(weights_BT))
    return found[0] + 0.3 * found[1], found

  (_, wanted), gradient = jax.jit(
      jax.value_and_grad(losses, has_aux=True))(settled())
  optimizer, step = make_step(MODEL.clone(balance="none"), settled(),
                              accumulate=2)
  state = state_lib.create({"params": settled()}, optimizer,
                           jax.random.PRNGKey(0))
  after, metrics = jax.jit(step)(state, {**BATCH, "positions": None})
  np.testing.assert_allclose(metrics["loss"], wanted[0], rtol=1e-5)
  np.testing.assert_allclose(metrics["mtp_loss"], wanted[1], rtol=1e-5)
  np.testing.assert_allclose(metrics["grad_norm"], tree.norm(gradient),
                             rtol=1e-4)
  assert metrics["skipped"] == 0
  ahead = (after.params["ahead"], settled()["ahead"])
  assert all(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, ahead)))


def test_experts_of_the_layer_are_balanced_too():
  """Only its shapes: the thresholds are there and have their histograms."""
  model = build(dense_layers=0)

  def run(rng):
    variables = model.init(rng, BATCH["tokens"])
    optimizer, step = make_step(model, variables["params"], accumulate=2)
    return step(state_lib.create(variables, optimizer, rng), BATCH)

  state, metrics = jax.eval_shape(run, jax.random.PRNGKey(0))
  assert set(state.router) == {"ahead", "stack"}
  assert metrics["load"].shape == (2, 4)


def test_counts_include_the_layer():
  plain = build(mtp=False)
  shapes = {m: jax.eval_shape(m.init, jax.random.key(0),
                              BATCH["tokens"])["params"]
            for m in (MODEL, plain)}
  added = tree.count(shapes[MODEL]) - tree.count(shapes[plain])
  layer = shapes[plain]["stack"]["block_0"]["layer_0"]
  assert added > tree.count(layer)
  # The layer's matrices and attention, and the unembedding once more.
  context = 32
  more = (flops.train_per_token(MODEL, shapes[MODEL], context)
          - flops.train_per_token(plain, shapes[plain], context))
  attention = 2 * 2 * (4 + 4 + 4) * context / 2
  assert more == 3 * (2 * (added + 16 * VOCAB) + attention)
