"""Kimi delta attention: the path that remembers, in a state of fixed size."""
from typing import NamedTuple

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import kda
from ultralong_jax.layers import linear, norm, short_conv

# Every how many tokens the decay is sampled for the statistics.
SAMPLE_TOKENS = 64


@flax.struct.dataclass
class DeltaState:
  """What a row's tokens so far left behind.

  Attributes:
    s_BHKV: the recurrent state, float32.
    tail_q_BIHK: the last inputs of the queries' convolution.
    tail_k_BIHK: of the keys'.
    tail_v_BIHV: of the values'.
  """
  s_BHKV: jax.Array
  tail_q_BIHK: jax.Array
  tail_k_BIHK: jax.Array
  tail_v_BIHV: jax.Array


class Gates(NamedTuple):
  """What sets decay and write strength; a layer's own or an earlier one's.

  Attributes:
    z_BTHK: decay logits.
    beta_BTH: logits of the write strength, float32.
    a_log_H: see `kda.log_decay`.
    dt_bias_HK: likewise.
  """
  z_BTHK: jax.Array
  beta_BTH: jax.Array
  a_log_H: jax.Array
  dt_bias_HK: jax.Array


def empty_delta_state(batch, heads, key_width, value_width, conv_width, dtype):
  """A state before the first token."""
  key_tail = jnp.zeros((batch, conv_width - 1, heads, key_width), dtype)
  value_tail = jnp.zeros((batch, conv_width - 1, heads, value_width), dtype)
  return DeltaState(
      jnp.zeros((batch, heads, key_width, value_width), jnp.float32),
      key_tail, key_tail, value_tail)


def init_dt_bias(rng, shape, dtype=jnp.float32):
  """Inverse softplus of dt, dt log-uniform in [0.001, 0.1].

  With a_log = 0 and floor -5 the log decay starts in [-0.476, -0.005].
  """
  low, high = jnp.log(1e-3), jnp.log(1e-1)
  dt = jnp.exp(jax.random.uniform(rng, shape, dtype, low, high))
  dt = jnp.maximum(dt, 1e-4)
  return dt + jnp.log(-jnp.expm1(-dt))


class KimiDeltaAttention(nn.Module):
  """Gated delta rule with a bounded decay for each channel.

    q, k = unit(silu(conv(W x)));  v = silu(conv(W_v x))
    g = floor sigmoid(exp(a) (W_up W_down x + b));  beta = sigmoid(W_beta x)
    y = W_out (sigmoid(W_gate x) * norm_head(kda(q, k, v, g, beta)))

  Attributes:
    heads: heads of queries, keys and values.
    key_width: channels of a head's query and key.
    value_width: channels of a head's value.
    conv_width: taps of the short convolutions.
    floor: lower bound of the log decay in nats a token; None: unbounded.
    gate_rank: channels between the gate's two projections; 0: one projection.
    epsilon: of the output norm.
    implementation: of `pallas_kernels.kda`; "" lets it choose.

  Collections:
    statistics: written when mutable: `decay_sum_HK`, log decay summed over the
      sampled tokens, and `sampled`, how many those were; where the gates are
      the layer's own.
  """
  heads: int
  key_width: int
  value_width: int
  conv_width: int = 4
  floor: float | None = -5.0
  gate_rank: int = 0
  epsilon: float = 1e-5
  implementation: str = ""

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared=None):
    """Mixes tokens of the same document.

    Args:
      x_BTD: normed inputs.
      documents_BT: document ordinals; 0 is trailing padding.
      positions_BT: not looked at.
      continues_B: whether a row's first document goes on from `state`.
      state: a `DeltaState`, or None when nothing precedes or follows.
      shared: may have, as `gates`, the `Gates` of an earlier layer, which are
        then used instead of own ones.

    Returns:
      y_BTD: outputs.
      state: after the row's last real token; None for None.
      shared: the `Gates` that were used, as `gates`.
    """
    del positions_BT
    o_BTHV, state, shared = self.mix(x_BTD, documents_BT, continues_B, state,
                                     shared)
    scale_V = self.param("scale_V", nn.initializers.ones, (self.value_width,),
                         jnp.float32)
    o_BTHV = norm.rms_norm(o_BTHV, scale_V, self.epsilon)
    o_BTHV = linear.gate(self, o_BTHV, x_BTD, self.gate_rank)
    return linear.merge(self, o_BTHV, x_BTD.shape[-1]), state, shared

  def mix(self, x_BTD, documents_BT, continues_B, state, shared):
    """As `__call__`, up to the heads' outputs: o_BTHV, not normed yet."""
    width = x_BTD.shape[-1]
    heads, key, value = self.heads, self.key_width, self.value_width

    def project(x, name, *shape):
      return linear.linear(x, linear.weight(self, name, *shape))

    def conv(name, x, tail):
      w = self.param(name, short_conv.init, (self.conv_width, *x.shape[2:]),
                     jnp.float32)
      y, tail = short_conv.short_conv(x, w, documents_BT, continues_B, tail)
      return nn.silu(y), tail

    tails = (None,) * 3 if state is None else (
        state.tail_q_BIHK, state.tail_k_BIHK, state.tail_v_BIHV)
    q_BTHK = project(x_BTD, "w_q_DHK", width, heads, key)
    k_BTHK = project(x_BTD, "w_k_DHK", width, heads, key)
    v_BTHV = project(x_BTD, "w_v_DHV", width, heads, value)
    q_BTHK, tail_q_BIHK = conv("conv_q_IHK", q_BTHK, tails[0])
    k_BTHK, tail_k_BIHK = conv("conv_k_IHK", k_BTHK, tails[1])
    v_BTHV, tail_v_BIHV = conv("conv_v_IHV", v_BTHV, tails[2])

    if shared and "gates" in shared:
      gates = shared["gates"]
    else:
      gates = self._gates(x_BTD)
      self._count(gates, documents_BT)
    s_BHKV = None if state is None else jnp.where(
        continues_B[:, None, None, None], state.s_BHKV, 0)
    o_BTHV, s_BHKV = kda.kda(
        q_BTHK, k_BTHK, v_BTHV, gates.z_BTHK, gates.beta_BTH,
        a_log=gates.a_log_H, dt_bias=gates.dt_bias_HK, floor=self.floor,
        normalize_qk=True, sigmoid_beta=True, initial_state=s_BHKV,
        segment_ids=documents_BT, implementation=self.implementation or None)
    if state is not None:
      state = DeltaState(s_BHKV, tail_q_BIHK, tail_k_BIHK, tail_v_BIHV)
    return o_BTHV, state, {"gates": gates}

  def _gates(self, x_BTD):
    """The layer's own `Gates`."""
    width, heads, key = x_BTD.shape[-1], self.heads, self.key_width
    narrow_BTR = linear.linear(
        x_BTD, linear.weight(self, "w_decay_down_DR", width, key))
    z_BTHK = linear.linear(
        narrow_BTR, linear.weight(self, "w_decay_up_RHK", key, heads, key))
    a_log_H = self.param("a_log_H", nn.initializers.zeros, (heads,),
                         jnp.float32)
    dt_bias_HK = self.param("dt_bias_HK", init_dt_bias, (heads, key),
                            jnp.float32)
    # float32 from the product on: rounding the logits to bfloat16 makes the
    # write strength drift over long documents.
    w_beta_DH = linear.weight(self, "w_beta_DH", width, heads)
    beta_BTH = jnp.einsum("BTD,DH->BTH", x_BTD, w_beta_DH.astype(x_BTD.dtype),
                          preferred_element_type=jnp.float32)
    return Gates(z_BTHK, beta_BTH, a_log_H, dt_bias_HK)

  def _count(self, gates, documents_BT):
    """Samples the decay: enough to watch it, too little to cost."""
    if not self.is_mutable_collection("statistics") or self.is_initializing():
      return
    real_BT = documents_BT[:, ::SAMPLE_TOKENS] > 0
    g_BTHK = kda.log_decay(
        gates.z_BTHK[:, ::SAMPLE_TOKENS].astype(jnp.float32), gates.a_log_H,
        gates.dt_bias_HK, self.floor)
    decay_sum_HK = jnp.sum(jnp.where(real_BT[..., None, None], g_BTHK, 0),
                           axis=(0, 1))
    for name, x in (("decay_sum_HK", jax.lax.stop_gradient(decay_sum_HK)),
                    ("sampled", jnp.sum(real_BT, dtype=jnp.float32))):
      self.sow("statistics", name, x, init_fn=lambda: 0,
               reduce_fn=lambda a, b: a + b)
