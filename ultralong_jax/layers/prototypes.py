"""Latent routing: experts as prototypes in a space of their own.

A token is normed, projected to the routing width and put on the unit sphere;
an expert's logit grows with the similarity of its prototype to that vector.
Learned without this last step, the vector's length would decide all scores at
once, and they would end where the bins of balancing tell none apart.
"""

import math

from flax import traverse_util
import jax
import jax.numpy as jnp

# How much a similarity rises with the product of two unit vectors.
SLOPE = {"cosine": 1., "distance": 2.}
TEMPERATURE_RANGE = 4.  # learned within this factor, up and down


def dispersed(key, shape, dtype=jnp.float32):
  """Initial prototypes: unit vectors, as far apart as their number allows.

  Up to R of them are orthogonal; more come in groups of R, each of them
  orthogonal and turned at random against the others.

  Args:
    key: of jax.random.
    shape: E, R.
    dtype: of the result.

  Returns:
    prototype_ER.
  """
  experts, width = shape
  groups = -(-experts // width)
  square = jax.random.normal(key, (groups, width, width), jnp.float32)
  turned, _ = jnp.linalg.qr(square)
  return turned.reshape(-1, width)[:experts].astype(dtype)


def unit(x):
  """x / |x| along the last axis; a vector of zeros stays zero."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def similarity(z_XR, prototype_ER, kind):
  """Similarity of each token to each prototype, larger is nearer.

  Args:
    z_XR: float32, on the unit sphere.
    prototype_ER: float32.
    kind: "cosine", blind to the prototype's length, or "distance", the
      negative squared one.

  Returns:
    similarity_XE: float32.
  """
  if kind not in SLOPE:
    raise ValueError(f"router_similarity={kind!r} is none of {sorted(SLOPE)}")
  if kind == "cosine":
    prototype_ER = unit(prototype_ER)
  product_XE = jnp.einsum("XR,ER->XE", z_XR, prototype_ER,
                          precision=jax.lax.Precision.HIGHEST)
  if kind == "cosine":
    return product_XE
  square_E = jnp.sum(prototype_ER * prototype_ER, axis=1)
  return 2. * product_XE - square_E[None] - 1.


def logits(x_XD, w_DR, prototype_ER, temperature, kind):
  """temperature * similarity + offset, for `router.choose` and the weights.

  The offset puts the logit of a token at a right angle to a prototype of mean
  square length to 0, its score to 1/2: the middle of what balancing can move.
  It needs no learning, since it reaches neither choice nor weights. The
  temperature is learned, through the weights. Where it starts, prototypes at
  random have logits of unit variance; its range keeps a score's bins apart.

  Args:
    x_XD: normed tokens, any dtype; computed in float32 as `router.logits`.
    w_DR: down-projection to the routing width.
    prototype_ER: one an expert.
    temperature: scalar parameter, 0 at the start.
    kind: see `similarity`.

  Returns:
    logits_XE: float32.
  """
  z_XR = unit(jnp.einsum(
      "XD,DR->XR", x_XD.astype(jnp.float32), w_DR.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST))
  prototype_ER = prototype_ER.astype(jnp.float32)
  similarity_XE = similarity(z_XR, prototype_ER, kind)
  if kind == "distance":
    similarity_XE += 1. + jnp.mean(jnp.sum(prototype_ER ** 2, axis=1))
  factor = math.sqrt(w_DR.shape[1]) / SLOPE[kind]
  # Smooth, so that a bound that was reached can be left again.
  factor *= TEMPERATURE_RANGE ** jnp.tanh(temperature)
  return factor * similarity_XE


def drift(params, router):
  """How far prototypes are from where they started.

  Args:
    params: parameters with a prototype_ER wherever `router` has a start_ER.
    router: that collection.

  Returns:
    The mean of 1 - cosine over all prototypes of all layers, 0 to 2; None
    where there are none.
  """
  params = traverse_util.flatten_dict(params)
  turned = []
  for path, start_ER in traverse_util.flatten_dict(router).items():
    if path[-1] == "start_ER":
      prototype_ER = params[(*path[:-1], "prototype_ER")]
      turned.append(1. - jnp.sum(
          unit(start_ER) * unit(prototype_ER), axis=-1).reshape(-1))
  return jnp.mean(jnp.concatenate(turned)) if turned else None
