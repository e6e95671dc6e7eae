"""Fused attention against its formula over the two layers it is made of."""
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultralong_jax.layers import delta_attention, fused_attention
from ultralong_jax.layers import latent_attention, norm

HEADS, VALUE, TOKENS = 2, 4, 20
WIDTH = HEADS * VALUE  # so that an output projection can be the identity
DELTA = dict(heads=HEADS, key_width=8, value_width=VALUE,
             implementation="reference")
LATENT = dict(heads=HEADS, key_width=6, shared_width=4, value_width=VALUE,
              rank=10)
DOCUMENTS_BT = jnp.asarray([[1] * 8 + [2] * 12, [1] * 3 + [2] * 9 + [0] * 8])
REAL = np.asarray(DOCUMENTS_BT) > 0


class Heads(nn.Module):
  """Stands for a path: heads that look at nothing but their token.

  Attributes:
    heads: how many.
  """
  heads: int = HEADS

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared):
    w_DHV = self.param("w_DHV", nn.initializers.normal(),
                       (WIDTH, self.heads, VALUE))
    return jnp.sin(jnp.einsum("BTD,DHV->BTHV", x_BTD, w_DHV)), state, {}


def stubs(fusion, **changes):
  return fused_attention.FusedAttention(Heads, Heads, fusion, **changes)


def inputs():
  x_BTD = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
  positions_BT = jnp.broadcast_to(jnp.arange(TOKENS), DOCUMENTS_BT.shape)
  return x_BTD, DOCUMENTS_BT, positions_BT, jnp.zeros(2, bool)


def settled(layer):
  """Parameters large enough to matter, also those that start at zero."""
  shapes = jax.eval_shape(layer.init, jax.random.key(1), *inputs(), None)
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda w: jnp.asarray(rng.normal(scale=.4, size=w.shape), jnp.float32),
      shapes["params"])


def heads_of(layer, params, x_BTD, **more):
  """What a single layer's heads give: its output, which mixes none of them."""
  eye_HVD = jnp.eye(WIDTH).reshape(HEADS, VALUE, WIDTH)
  y_BTD, *_ = layer.apply(
      {"params": {**params, "w_out_HVD": eye_HVD, **more}}, x_BTD,
      *inputs()[1:], None)
  return y_BTD.reshape(2, TOKENS, HEADS, VALUE)


def by_layers(params, x_BTD):
  """Normed heads' outputs of both paths, by a delta and a latent layer."""
  # A gate of zero logits halves.
  delta_BTHV = 2 * heads_of(
      delta_attention.KimiDeltaAttention(**DELTA), params["delta"], x_BTD,
      scale_V=params["delta_scale_V"],
      w_gate_DHV=jnp.zeros((WIDTH, HEADS, VALUE)))
  latent_BTHV = heads_of(
      latent_attention.LatentAttention(**LATENT, gate="none"),
      params["latent"], x_BTD)
  return delta_BTHV, norm.rms_norm(latent_BTHV, params["latent_scale_V"], 1e-5)


def by_stubs(params, x_BTD):
  return [norm.rms_norm(
      Heads().apply({"params": params[name]}, x_BTD, *[None] * 5)[0],
      params[f"{name}_scale_V"], 1e-5) for name in ("delta", "latent")]


def formula(paths, fusion, params, x_BTD):
  """The layer, written out over what its two paths give."""
  delta_BTHV, latent_BTHV = paths(params, x_BTD)
  if fusion == "token":
    logits_BTHM = jnp.einsum("BTD,DHM->BTHM", x_BTD, params["w_fusion_DHM"])
  elif fusion == "head":
    logits_BTHM = params["fusion_bias_HM"][None, None]
  else:
    logits_BTHM = params["fusion_bias_M"][None, None, None]
  # Of two logits, softmax is the logistic function of their difference.
  p_BTH1 = 1 / (1 + jnp.exp(logits_BTHM[..., 1:] - logits_BTHM[..., :1]))
  o_BTHV = p_BTH1 * delta_BTHV + (1 - p_BTH1) * latent_BTHV
  gate_BTHV = jnp.einsum("BTD,DHV->BTHV", x_BTD, params["w_gate_DHV"])
  return jnp.einsum("BTHV,HVD->BTD", o_BTHV / (1 + jnp.exp(-gate_BTHV)),
                    params["w_out_HVD"])


REAL_LAYERS = fused_attention.FusedAttention(
    functools.partial(fused_attention.DeltaPath, **DELTA),
    functools.partial(fused_attention.LatentPath, **LATENT), "token")


@pytest.mark.parametrize("layer, paths", [
    (REAL_LAYERS, by_layers),
    *[(stubs(fusion), by_stubs) for fusion in ("layer", "head", "token")]],
    ids=["real", "layer", "head", "token"])
def test_equals_the_formula(layer, paths):
  params, (x_BTD, *rest) = settled(layer), inputs()
  cotangent_BTD = jnp.where(REAL[..., None], jnp.cos(x_BTD), 0)

  def with_gradients(function):
    def loss(params, x_BTD):
      y_BTD = function(params, x_BTD)
      return jnp.sum(cotangent_BTD * y_BTD), y_BTD
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        params, x_BTD)

  (_, y_BTD), gradients = with_gradients(
      lambda params, x_BTD: layer.apply({"params": params}, x_BTD, *rest,
                                        None)[0])
  (_, want_BTD), wanted = with_gradients(
      functools.partial(formula, paths, layer.fusion))
  np.testing.assert_allclose(y_BTD[REAL], want_BTD[REAL], atol=1e-5)
  for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted),
                        strict=True):
    assert np.abs(other).max() > 0
    np.testing.assert_allclose(one, other, atol=3e-5 * np.abs(other).max())


def test_starts_as_the_mean_of_both_paths():
  for fusion, new in (("layer", "fusion_bias_M"), ("head", "fusion_bias_HM"),
                      ("token", "w_fusion_DHM")):
    params = stubs(fusion).init(jax.random.key(1), *inputs(), None)["params"]
    assert not params[new].any() and params[new].shape[-1] == 2


def test_bfloat16_stays_bfloat16():
  layer = stubs("token", gate_rank=3)
  x_BTD, *rest = inputs()
  y_BTD, *_ = jax.eval_shape(layer.apply, {"params": settled(layer)},
                             x_BTD.astype(jnp.bfloat16), *rest, None)
  assert y_BTD.dtype == jnp.bfloat16


def test_says_what_does_not_fit():
  other = fused_attention.FusedAttention(
      Heads, functools.partial(Heads, 3), "head")
  with pytest.raises(ValueError, match=r"\(2, 4\) on the delta .*\(3, 4\)"):
    settled(other)
  with pytest.raises(ValueError, match="fusion='both' is none of"):
    settled(stubs("both"))
