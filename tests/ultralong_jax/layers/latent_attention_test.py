"""Latent attention: no split and no form of it changes the result."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import latent_attention, position

WIDTH, TOKENS, CAPACITY = 16, 24, 27
# Rows with a document border, with ragged padding, and with padding alone.
DOCUMENTS = [[1] * 8 + [2] * 16, [1] * 3 + [2] * 5 + [4] * 9 + [0] * 7,
             [0] * 24]
# Of the document, of padding whatever.
POSITIONS = jnp.asarray([[*range(8), *range(16)],
                         [*range(3), *range(5), *range(16)], [*range(24)]])
FORMS = [dict(), dict(query_rank=5), dict(gate="none"), dict(gate="latent"),
         dict(rotary=position.Rotary(50., "yarn", 3., 100)),
         dict(rotary=position.Rotary(50.), gate="latent")]


def make(**form):
  """A layer, parameters large enough to matter, inputs and documents."""
  layer = latent_attention.LatentAttention(
      heads=3, key_width=8, shared_width=4, value_width=6, rank=10, **form)
  x_BTD = jax.random.normal(jax.random.key(0), (3, TOKENS, WIDTH))
  documents_BT = jnp.asarray(DOCUMENTS, jnp.int32)
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
      lambda w: jnp.asarray(rng.normal(scale=.4, size=w.shape), jnp.float32),
      jax.eval_shape(layer.init, jax.random.key(1), x_BTD, documents_BT,
                     POSITIONS, None, None))
  return layer, variables, x_BTD, documents_BT


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, variables, x_BTD, documents_BT, state=None, positions=None):
  y_BTD, state, _ = layer.apply(variables, x_BTD, documents_BT, positions,
                                None, state)
  return y_BTD, state


def empty(batch=3, capacity=CAPACITY):
  return latent_attention.empty_latent_state(batch, capacity, 10, 4,
                                             jnp.float32)


def by_hand(layer, variables, x_BTD, documents_BT):
  """The layer written out for one row, in float64, token by token."""
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
  x_BTD, documents_BT = np.asarray(x_BTD, np.float64), np.asarray(documents_BT)

  def turned(x, index):
    """The last 4 of the channels, as two complex numbers."""
    if layer.rotary is None:
      return x
    turn = np.exp(1j * np.asarray(POSITIONS)[b, index, None]
                  * layer.rotary.speeds(4))
    z = (x[..., -4:-2] + 1j * x[..., -2:]) * turn
    return np.concatenate([x[..., :-4], z.real, z.imag], -1)

  def normed(x, scale):
    return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

  y_BTD = np.zeros_like(x_BTD)
  for b, t in zip(*np.nonzero(documents_BT)):
    seen = np.nonzero(documents_BT[b, :t + 1] == documents_BT[b, t])[0]
    x_D, x_SD = x_BTD[b, t], x_BTD[b, seen]
    latent_SR = normed(x_SD @ w["w_down_DR"], w["latent_scale_R"])
    if layer.query_rank:
      q_Q = normed(x_D @ w["w_q_down_DQ"], w["query_scale_Q"])
      q_HK = np.tensordot(q_Q, w["w_q_up_QHK"], 1)
    else:
      q_HK = np.tensordot(x_D, w["w_q_DHK"], 1)
    o_HV = np.zeros((3, 6))
    if layer.gate == "latent":
      latent_SR = latent_SR / (1 + np.exp(-x_D @ w["w_gate_DR"]))
    for h in range(3):
      k_SK = np.concatenate([latent_SR @ w["w_k_up_RHK"][:, h],
                             turned(x_SD @ w["w_shared_DU"], seen)], -1)
      scale = 12 ** -0.5 * (
          layer.rotary.logit_scale() if layer.rotary else 1)
      p_S = np.exp(scale * k_SK @ turned(q_HK[h:h + 1], [t])[0])
      o_HV[h] = p_S @ (latent_SR @ w["w_v_up_RHV"][:, h]) / p_S.sum()
    if layer.gate == "output":
      o_HV /= 1 + np.exp(-np.tensordot(x_D, w["w_gate_DHV"], 1))
    y_BTD[b, t] = np.tensordot(o_HV, w["w_out_HVD"], 2)
  return y_BTD


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equals_the_formula(form):
  layer, variables, x_BTD, documents_BT = make(**form)
  y_BTD, state = apply(layer, variables, x_BTD, documents_BT,
                       positions=POSITIONS)
  assert state is None
  np.testing.assert_allclose(
      y_BTD, by_hand(layer, variables, x_BTD, documents_BT), atol=1e-4)


@pytest.mark.parametrize("gate, sizes", [
    *[("output", sizes) for sizes in (
        [24], [8, 16], [5, 3, 16], [16] + [1] * 8, [1] * 24)],
    ("latent", [5, 3, 16]), ("latent", [1] * 24)], ids=str)
def test_no_split_changes_the_result(gate, sizes):
  """One at a document's border, one token by token (absorbed) included."""
  layer, variables, x_BTD, documents_BT = make(gate=gate)
  y_BTD, _ = apply(layer, variables, x_BTD, documents_BT)
  parts, state, begin = [], empty(), 0
  for size in sizes:
    part = slice(begin, begin + size)
    begin += size
    y, state = apply(layer, variables, x_BTD[:, part], documents_BT[:, part],
                     state)
    parts.append(y)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), y_BTD, atol=1e-5)
  whole = apply(layer, variables, x_BTD, documents_BT, empty())[1]
  np.testing.assert_array_equal(state.length_B, [24, 17, 0])
  for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole)):
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_rows_may_hold_different_lengths():
  """Ragged rows: each goes on at its own place."""
  layer, variables, x_BTD, documents_BT = make()
  y_BTD, _ = apply(layer, variables, x_BTD, documents_BT)
  ragged_BT = documents_BT.at[0, 16:].set(0)
  _, state = apply(layer, variables, x_BTD, ragged_BT, empty())
  np.testing.assert_array_equal(state.length_B, [16, 17, 0])
  late_BT = documents_BT[:, 16:].at[1:].set(0)
  y_late_BTD, state = apply(layer, variables, x_BTD[:, 16:], late_BT, state)
  np.testing.assert_allclose(y_late_BTD[0], y_BTD[0, 16:], atol=1e-5)
  np.testing.assert_array_equal(state.length_B, [24, 17, 0])


def test_absorbed_equals_expanded():
  layer, variables, x_BTD, documents_BT = make()
  _, state = apply(layer, variables, x_BTD, documents_BT, empty())
  w = variables["params"]
  rng = jax.random.key(3)
  q_BTHK = jax.random.normal(rng, (3, 5, 3, 12))
  index_BT = jnp.asarray([[3, 7, 8, 9, 23], [0, 3, 7, 12, 16], [0] * 5])
  query = (q_BTHK, jnp.take_along_axis(documents_BT, index_BT, 1), index_BT,
           state, w["w_k_up_RHK"], w["w_v_up_RHV"], 0.3)
  attend = functools.partial(jax.jit, static_argnums=6)
  absorbed_BTHV = attend(latent_attention.absorbed)(*query)
  assert jnp.abs(absorbed_BTHV).max() > 0.1
  np.testing.assert_allclose(
      absorbed_BTHV, attend(latent_attention.expanded)(*query), atol=1e-5)


def test_padding_and_overflow_write_nothing():
  layer, variables, x_BTD, documents_BT = make()
  _, state = apply(layer, variables, x_BTD, documents_BT, empty())
  assert not np.asarray(state.latent_BSR)[1, 17:].any()
  _, after = apply(layer, variables, x_BTD, jnp.zeros_like(documents_BT), state)
  jax.tree.map(np.testing.assert_array_equal, after, state)
  _, after = apply(layer, variables, x_BTD, documents_BT + 4 * (
      documents_BT > 0), state)
  np.testing.assert_array_equal(after.documents_BS[0, -3:], [5] * 3)
  np.testing.assert_array_equal(after.length_B, [48, 34, 0])


@pytest.mark.parametrize("gate", ["output", "latent"])
def test_gradients_do_not_depend_on_the_form(gate):
  """Also through the state, whose keys are expanded block by block."""
  layer, variables, x_BTD, documents_BT = make(gate=gate)

  def gradients(state):
    def loss(variables, x_BTD):
      y_BTD, _ = apply(layer, variables, x_BTD, documents_BT, state)
      return jnp.sum(y_BTD * jax.random.normal(jax.random.key(5), y_BTD.shape))
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x_BTD)
  for one, other in zip(jax.tree.leaves(gradients(None)),
                        jax.tree.leaves(gradients(empty()))):
    np.testing.assert_allclose(one, other, atol=2e-5 * jnp.abs(one).max())
    assert jnp.abs(one).max() > 0


def naive(query, gate_BTR):
  """Gated latents as they are defined: one for each pair of tokens."""
  q_BTHK, documents_BT, index_BT, state, w_k_up_RHK, w_v_up_RHV = query
  latent_BTSR = gate_BTR[:, :, None] * state.latent_BSR[:, None]
  k_BTSHK = jnp.einsum("BTSR,RHK->BTSHK", latent_BTSR, w_k_up_RHK)
  v_BTSHV = jnp.einsum("BTSR,RHV->BTSHV", latent_BTSR, w_v_up_RHV)
  width = w_k_up_RHK.shape[-1]
  logits_BHTS = jnp.einsum("BTHK,BTSHK->BHTS", q_BTHK[..., :width], k_BTSHK)
  logits_BHTS += jnp.einsum("BTHU,BSU->BHTS", q_BTHK[..., width:],
                            state.key_BSU)
  index_S = jnp.arange(documents_BT.shape[1])
  visible_BTS = (documents_BT[..., None] == state.documents_BS[:, None]) & (
      index_BT[..., None] >= index_S[None, None])
  p_BHTS = jax.nn.softmax(jnp.where(
      visible_BTS[:, None], logits_BHTS * q_BTHK.shape[-1] ** -0.5, -jnp.inf))
  return jnp.einsum("BHTS,BTSHV->BTHV", p_BHTS, v_BTSHV)


def test_gated_latents_need_not_exist():
  """Absorbed equals naive, forward and gradient, for a whole sequence."""
  rng = np.random.default_rng(1)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  documents_BT = jnp.asarray(DOCUMENTS[:1] + [[1] * 5 + [2] * 19])
  index_BT = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
  arrays = (normal(2, TOKENS, 3, 12), normal(2, TOKENS, 10),
            normal(2, TOKENS, 4), normal(10, 3, 8), normal(10, 3, 6),
            jax.nn.sigmoid(normal(2, TOKENS, 10)))

  def with_gradients(attend):
    def loss(q_BTHK, latent_BSR, key_BSU, w_k_up_RHK, w_v_up_RHV, gate_BTR):
      state = latent_attention.LatentState(latent_BSR, key_BSU, documents_BT,
                                           None)
      o_BTHV = attend((q_BTHK, documents_BT, index_BT, state, w_k_up_RHK,
                       w_v_up_RHV), gate_BTR)
      return jnp.sum(jnp.sin(3 * o_BTHV)), o_BTHV
    return jax.jit(jax.value_and_grad(loss, range(6), has_aux=True))(*arrays)

  wanted = with_gradients(naive)
  actual = with_gradients(
      lambda query, gate_BTR: latent_attention.absorbed(
          *query, 12 ** -0.5, gate_BTR))
  for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted)):
    assert np.abs(other).max() > 0.1
    np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


def test_gated_latents_take_memory_linear_in_context():
  """In training too: one a pair of tokens would be 512 MiB here."""
  layer = latent_attention.LatentAttention(
      heads=2, key_width=8, shared_width=4, value_width=8, rank=8,
      gate="latent")
  x_BTD = jax.ShapeDtypeStruct((1, 4096, 16), jnp.float32)
  documents_BT = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

  def loss(variables, x_BTD, documents_BT):
    y_BTD, *_ = layer.apply(variables, x_BTD, documents_BT, None, None, None)
    return jnp.sum(y_BTD**2)

  variables = jax.eval_shape(
      lambda *args: layer.init(jax.random.key(0), *args, None, None, None),
      x_BTD, documents_BT)
  memory = jax.jit(jax.grad(loss)).lower(
      variables, x_BTD, documents_BT).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * 4096 * 4096 * 8 / 50


def test_bfloat16_computes_in_bfloat16():
  layer, variables, x_BTD, documents_BT = make()
  want_BTD, _ = apply(layer, variables, x_BTD, documents_BT)
  y_BTD, _ = apply(layer, variables, x_BTD.astype(jnp.bfloat16), documents_BT)
  assert y_BTD.dtype == jnp.bfloat16
  # Six roundings of 2^-9 on the way, logits of a few units among them.
  error = jnp.sqrt(jnp.mean((y_BTD - want_BTD) ** 2) / jnp.mean(want_BTD ** 2))
  assert error < 2e-2


def test_a_decode_step_never_expands_keys():
  """Its temporaries are far from capacity x heads x (K + V)."""
  layer = latent_attention.LatentAttention(
      heads=16, key_width=64, shared_width=16, value_width=64, rank=32)
  shapes = jax.eval_shape(lambda: (
      jnp.zeros((1, 1, 64)), jnp.ones((1, 1), jnp.int32),
      latent_attention.empty_latent_state(1, 65_536, 32, 16, jnp.float32)))
  x_BTD, documents_BT, state = shapes
  variables = jax.eval_shape(
      lambda *args: layer.init(jax.random.key(0), *args, None, None, None),
      x_BTD, documents_BT)
  step = jax.jit(lambda *args: layer.apply(*args[:3], None, None, args[3]),
                 donate_argnums=3)
  memory = step.lower(variables, x_BTD, documents_BT,
                      state).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * 65_536 * 16 * (64 + 64) / 50
