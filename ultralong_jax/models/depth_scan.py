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
def scan(block, repeats, sources, carry, tokens, xs):
  """Appends the sums of `repeats` equal blocks to `sources`.

  Args:
    block: (x, sources, valid, carry, tokens) -> (sum_BTD, carry, y). `sources`
      are all that there will be; those whose `valid` is False are finite and
      must count for nothing, in the gradient too. Closes over no traced array.
    repeats: how many blocks.
    sources: tuple of arrays [B, T, D].
    carry: what a block hands to the next besides, or None; kept once a block
      for the backward pass.
    tokens: what all blocks read besides; integers, which have no gradient.
    xs: what each block has for itself, such as parameters, stacked.

  Returns:
    sources: tuple of all, the new ones last.
    carry: of the last block.
    ys: stacked.
  """
  sources, slots = _slots(sources, repeats)

  def step(state, own):
    (sources, carry), (slot, x) = state, own
    sum_BTD, carry, y = block(x, sources, _before(slot, sources), carry,
                              tokens)
    return (_write(sources, slot, sum_BTD), carry), y

  (sources, carry), ys = jax.lax.scan(step, (sources, carry), (slots, xs))
  return sources, carry, ys


def _fwd(block, repeats, sources, carry, tokens, xs):
  if jax.tree.leaves(_real(tokens)):
    raise TypeError("tokens have no gradient here: pass integers")
  sources, slots = _slots(sources, repeats)

  def run(sources, others):
    x, carry, valid, tokens = others
    sum_BTD, carry, y = block(x, sources, valid, carry, tokens)
    return (sum_BTD, carry, _real(y)), y

  def step(state, own):
    (sources, before), (slot, x) = state, own
    others = x, before, _before(slot, sources), tokens
    # Arguments are not saved: the backward pass has them, stacked or final.
    (sum_BTD, carry, _), pull, y = jax.vjp(run, sources, others, has_aux=True,
                                           saveable_args=False)
    return (_write(sources, slot, sum_BTD), carry), (y, before, pull)

  (sources, carry), (ys, carries, pulls) = jax.lax.scan(
      step, (sources, carry), (slots, xs))
  return (sources, carry, ys), (sources, carries, tokens, xs, pulls)


def _bwd(block, repeats, residuals, cotangents):
  del block
  sources, carries, tokens, xs, pulls = residuals
  dsources, dcarry, dys = cotangents
  _, slots = _slots(sources[:-repeats], repeats)
  dsources = tuple(jax.new_ref(d_BTD) for d_BTD in dsources)

  def step(dcarry, own):
    slot, x, before, pull, dy = own
    others = x, before, _before(slot, sources), tokens
    pull.args_res = [sources, others]
    # Later blocks have added all that they will to this block's cotangent.
    dsum_BTD = jax.lax.select_n(slot, *[d_BTD[...] for d_BTD in dsources])
    returned = jax.tree.map(lambda _: jax.ad.GradValue(), others)
    _, (dx, dcarry, *_) = pull.with_refs(dsources, returned)(
        (dsum_BTD, dcarry, dy))
    return dcarry, _real(dx)

  dcarry, dxs = jax.lax.scan(
      step, dcarry, (slots, xs, carries, pulls, _real(dys)), reverse=True)
  return tuple(d_BTD[...] for d_BTD in dsources[:-repeats]), dcarry, None, dxs


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
