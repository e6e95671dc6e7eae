"""A scan over blocks that each append to a list and read the list so far.

Differentiating `lax.scan` keeps every step's carry for the backward pass. Here
that is the list, M arrays long: N blocks would keep N M of them. But an entry
is written once, and a block masks those that are not written yet, so the list
at the end serves every block as well as the list that it saw. The backward
pass here reads that one, and adds up one list of cotangents in place. Of each
block it keeps what differentiating the block alone keeps; it runs none twice.
"""
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan(block, repeats, sources, tokens, xs):
  """Appends the sums of `repeats` equal blocks to `sources`.

  Args:
    block: (x, sources, valid, tokens) -> (sum_BTD, y). `sources` are all that
      there will be; those whose `valid` is False are finite and must count for
      nothing, in the gradient too. Closes over no traced array.
    repeats: how many blocks.
    sources: tuple of arrays [B, T, D].
    tokens: what all blocks read besides; integers, which have no gradient.
    xs: what each block has for itself, such as parameters, stacked.

  Returns:
    sources: tuple of all, the new ones last.
    ys: stacked.
  """
  sources, slots = _slots(sources, repeats)

  def step(sources, own):
    slot, x = own
    sum_BTD, y = block(x, sources, _before(slot, sources), tokens)
    return _write(sources, slot, sum_BTD), y

  return jax.lax.scan(step, sources, (slots, xs))


def _fwd(block, repeats, sources, tokens, xs):
  if jax.tree.leaves(_real(tokens)):
    raise TypeError("tokens have no gradient here: pass integers")
  sources, slots = _slots(sources, repeats)

  def run(sources, others):
    x, valid, tokens = others
    sum_BTD, y = block(x, sources, valid, tokens)
    return (sum_BTD, _real(y)), y

  def step(sources, own):
    slot, x = own
    others = x, _before(slot, sources), tokens
    # Arguments are not saved: the backward pass has them, stacked or final.
    (sum_BTD, _), pull, y = jax.vjp(run, sources, others, has_aux=True,
                                    saveable_args=False)
    return _write(sources, slot, sum_BTD), (y, pull)

  sources, (ys, pulls) = jax.lax.scan(step, sources, (slots, xs))
  return (sources, ys), (sources, tokens, xs, pulls)


def _bwd(block, repeats, residuals, cotangents):
  del block
  sources, tokens, xs, pulls = residuals
  dsources, dys = cotangents
  _, slots = _slots(sources[:-repeats], repeats)
  dsources = tuple(jax.new_ref(d_BTD) for d_BTD in dsources)

  def step(_, own):
    slot, x, pull, dy = own
    others = x, _before(slot, sources), tokens
    pull.args_res = [sources, others]
    # Later blocks have added all that they will to this block's cotangent.
    dsum_BTD = jax.lax.select_n(slot, *[d_BTD[...] for d_BTD in dsources])
    returned = jax.tree.map(lambda _: jax.ad.GradValue(), others)
    _, (dx, *_) = pull.with_refs(dsources, returned)((dsum_BTD, dy))
    return None, _real(dx)

  _, dxs = jax.lax.scan(step, None, (slots, xs, pulls, _real(dys)),
                        reverse=True)
  return tuple(d_BTD[...] for d_BTD in dsources[:-repeats]), None, dxs


scan.defvjp(_fwd, _bwd)


def _slots(sources, repeats):
  """Sources with zeros for those to come, and which one each block writes."""
  slots = len(sources) + jnp.arange(repeats, dtype=jnp.int32)
  return (*sources, *[jnp.zeros_like(sources[0])] * repeats), slots


def _before(slot, sources):
  return tuple(m < slot for m in range(len(sources)))


def _write(sources, slot, sum_BTD):
  return tuple(jnp.where(m == slot, sum_BTD, v_BTD)
               for m, v_BTD in enumerate(sources))


def _real(tree):
  """None in place of leaves that have no gradient."""
  return jax.tree.map(
      lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)
