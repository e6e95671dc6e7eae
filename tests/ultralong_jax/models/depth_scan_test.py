"""The scan over blocks equals a loop over them, and keeps one list."""
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from ultralong_jax.models import depth_scan


def block(x, sources, valid, carry_BTD, tokens_BT):
  """A mix of what is valid, and beside it what has a gradient or none."""
  weights = [jnp.where(known, w, 0) for known, w in zip(valid, x["w_M"])]
  mixed_BTD = sum(w * v_BTD for w, v_BTD in zip(weights, sources))
  if carry_BTD is not None:
    mixed_BTD += jnp.cos(carry_BTD)
    carry_BTD = carry_BTD @ x["w_DD"] + mixed_BTD
  sum_BTD = jnp.sin(tokens_BT[..., None] * mixed_BTD @ x["w_DD"])
  return sum_BTD, carry_BTD, {
      "mean": jnp.mean(sum_BTD * mixed_BTD),
      "count": x["count"] + jnp.sum(tokens_BT), "empty": None}


def loop(block, repeats, sources, carry, tokens_BT, xs):
  ys = []
  for n in range(repeats):
    x = jax.tree.map(lambda leaf, n=n: leaf[n], xs)
    sum_BTD, carry, y = block(x, sources, (True,) * len(sources), carry,
                              tokens_BT)
    sources, ys = (*sources, sum_BTD), ys + [y]
  return sources, carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def inputs(known, repeats, shape=(2, 3, 4)):
  *keys, a, b = jax.random.split(jax.random.key(0), known + 2)
  sources = tuple(jax.random.normal(k, shape) for k in keys)
  xs = {"w_M": jax.random.normal(a, (repeats, known + repeats)),
        "w_DD": 0.3 * jax.random.normal(b, (repeats, shape[-1], shape[-1])),
        "count": jnp.arange(repeats)}
  return sources, jnp.ones(shape[:2], jnp.int32).at[0, 1].set(3), xs


@pytest.mark.parametrize("known, repeats, carries", [
    (1, 2, False), (3, 1, True), (2, 5, True)])
def test_equals_a_loop(known, repeats, carries):
  sources, tokens_BT, xs = inputs(known, repeats)
  count = xs.pop("count")
  carry_BTD = 0.5 * sources[0] if carries else None

  def loss(scan, sources, carry_BTD, xs):
    sources, carry_BTD, ys = scan(block, repeats, sources, carry_BTD,
                                  tokens_BT, {**xs, "count": count})
    # Each entry weighs its own, so that none can stand for another.
    total = sum(m * jnp.sum(v_BTD**2) for m, v_BTD in enumerate(sources, 1))
    if carries:
      total += 0.3 * jnp.sum(carry_BTD**3)
    return total + jnp.sum(ys["mean"]**3), (sources, carry_BTD, ys)

  def run(scan):
    grad = jax.value_and_grad(functools.partial(loss, scan),
                              argnums=(0, 1, 2), has_aux=True)
    return jax.jit(grad)(sources, carry_BTD, xs)

  wanted, actual = run(loop), run(depth_scan.scan)
  chex.assert_trees_all_close(actual, wanted, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_equal_dtypes(actual, wanted)
  alone = jax.jit(functools.partial(loss, depth_scan.scan))(
      sources, carry_BTD, xs)
  chex.assert_trees_all_close(alone, wanted[0], rtol=1e-5, atol=1e-5)


def test_gradients_batch():
  """As when a batch is taken in parts, or for a gradient an example."""
  sources, tokens_BT, xs = inputs(2, 3)

  def loss(sources):
    sources, *_ = depth_scan.scan(block, 3, sources, None, tokens_BT, xs)
    return jnp.sum(sources[-1]**2)

  grad = jax.grad(loss)
  many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), sources)
  each = [grad(jax.tree.map(lambda x, i=i: x[i], many)) for i in range(3)]
  wanted = jax.tree.map(lambda *x: jnp.stack(x), *each)
  for actual in (jax.lax.map(grad, many), jax.vmap(grad)(many)):
    chex.assert_trees_all_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_refuses_to_lose_a_gradient():
  sources, tokens_BT, xs = inputs(1, 2)
  def loss(tokens_BT):
    sums, *_ = depth_scan.scan(block, 2, sources, None, tokens_BT, xs)
    return jnp.sum(sums[-1])
  assert jnp.isfinite(loss(tokens_BT.astype(float)))
  with pytest.raises(TypeError, match="tokens have no gradient"):
    jax.grad(loss)(tokens_BT.astype(float))


@pytest.mark.parametrize("carries", [False, True])
def test_keeps_one_list_its_cotangent_and_the_carries(carries):
  one = 1024 * 64 * 4  # bytes of B T D

  def peak(repeats):
    sources, tokens_BT, xs = inputs(1, repeats, (1, 1024, 64))

    def loss(sources):
      sources, *_ = depth_scan.scan(
          jax.checkpoint(block), repeats, sources,
          sources[0] if carries else None, tokens_BT, xs)
      return jnp.sum(sources[-1])

    grad = jax.jit(jax.grad(loss)).lower(sources).compile()
    return grad.memory_analysis().temp_size_in_bytes / one

  few, some, many = peak(8), peak(16), peak(32)
  # With a carry XLA's CPU backend copies the list of sums once more.
  each = 4 if carries else 2
  assert few < each * 9 + 8
  assert some - few < (each + 0.1) * 8
  assert many - some < (each + 0.1) * 16
