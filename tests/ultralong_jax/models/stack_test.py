"""Blocks in a scan equal the same blocks one by one, and take little memory."""
import functools
import math

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from ultralong_jax.layers import cross_layer, depth_residual, norm
from ultralong_jax.models import depth_plan, stack

B, T, D = 2, 6, 8


class Attention(nn.Module):
  """Stands for one: a weighted sum of all tokens so far.

  Attributes:
    scale: tells the two kinds apart.
  """
  scale: float

  @nn.compact
  def __call__(self, x_BTD, documents_BT, positions_BT, continues_B, state,
               shared):
    w_DD = self.param("w_DD", nn.initializers.normal(1), (x_BTD.shape[-1],) * 2)
    s_BTD = jnp.cumsum(self.scale * x_BTD @ w_DD, axis=1)
    if state is not None:
      s_BTD += state[:, None]
      state = s_BTD[:, -1]
    return jnp.tanh(s_BTD), state, {}


class Experts(nn.Module):
  """Stands for them: reads its router, counts what it saw."""

  @nn.compact
  def __call__(self, x_BTD, real_BT):
    shape = 1, 1, x_BTD.shape[-1]
    scale_11D = self.param("scale_11D", nn.initializers.ones, shape)
    shift_11D = self.variable("router", "shift_11D", jnp.ones, shape).value
    y_BTD = jnp.sin(scale_11D * x_BTD + shift_11D)
    if not self.is_initializing():
      self.sow("statistics", "mean", jnp.mean(y_BTD))
      self.sow("statistics", "count", jnp.sum(real_BT))
    return y_BTD


def make(plan, remat=True, mixes=True, width=D):
  dense = functools.partial(nn.Dense, width)
  return stack.Stack(stack.Parts(
      delta=functools.partial(Attention, 0.2),
      latent=functools.partial(Attention, 0.3), dense=dense, experts=Experts,
      norm=norm.RMSNorm, mix=depth_residual.DepthMix if mixes else None,
      injection=cross_layer.Injection, remat=remat), plan)


def one_by_one(plan):
  """The plan of the same blocks, none of them scanned."""
  return tuple((f"{name}_{n}" if repeats > 1 else name, block, 1)
               for name, block, repeats in plan for n in range(repeats))


def scatter(plan, tree):
  """Variables or states of the blocks of `one_by_one`.

  Only the variables of scanned blocks have a level called "block".
  """
  if tree is None:
    return None
  tree = dict(tree)
  for name, _, repeats in plan:
    if repeats > 1:
      stacked = tree.pop(name)
      stacked = stacked.get("block", stacked)
      tree.update({f"{name}_{n}": jax.tree.map(lambda x, n=n: x[n], stacked)
                   for n in range(repeats)})
  return tree


def scatter_all(plan, trees):
  return {c: scatter(plan, tree) for c, tree in trees.items()}


def inputs():
  x_BTD = jax.random.normal(jax.random.key(0), (B, T, D))
  documents_BT = jnp.ones((B, T), jnp.int32).at[1, 4:].set(0)
  positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
  return x_BTD, (documents_BT, positions_BT, jnp.zeros(B, bool))


def settled(module, *args):
  """Variables, of which those that start at zero or one count too."""
  variables = jax.jit(module.init)(jax.random.key(1), *args)
  leaves, tree = jax.tree.flatten(variables)
  keys = jax.random.split(jax.random.key(2), len(leaves))
  return jax.tree.unflatten(tree, [
      x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def halves(plan):
  """States, shaped like `plan`; none is zero, so that gradients pass."""
  state = {}
  for name, block, repeats in plan:
    state[name] = {}
    for inner, group, count in block:
      lead = (repeats,) * (repeats > 1) + (count,) * (count > 1)
      one = {layer.name: jnp.full((*lead, B, D), 0.5) for layer in group}
      state[name][inner] = one if count > 1 else one["layer_0"]
  return state


# A dense block stands before the scan, or a short one after it.
FIRST = depth_plan.plan("dm", layers=6, dense_layers=1, block_layers=2)
LAST = depth_plan.plan("d", layers=5, dense_layers=0, block_layers=2)


@pytest.mark.parametrize("plan, remat, carries", [
    (FIRST, True, False), (LAST, True, True),
    pytest.param(LAST, False, False, marks=pytest.mark.slow)])
def test_scanned_blocks_equal_blocks_one_by_one(plan, remat, carries):
  module, (x_BTD, tokens) = make(plan, remat), inputs()
  variables = settled(module, x_BTD, tokens, None)

  def run(module, variables, state):
    def loss(params, x_BTD, state):
      (y_BTD, state), written = module.apply(
          {**variables, "params": params}, x_BTD, tokens, state,
          mutable=["statistics"])
      total = sum(jnp.sum(x**3) for x in jax.tree.leaves((y_BTD, state)))
      return total, {"state": state, **written}

    grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, after), (dparams, dx_BTD, dstate) = jax.jit(grad)(
        variables["params"], x_BTD, state)
    return value, dx_BTD, {"params": dparams, "dstate": dstate, **after}

  state = halves(plan) if carries else None
  *actual, trees = run(module, variables, state)
  assert len(one_by_one(plan)) == 3 > len(plan)
  *wanted, apart = run(make(one_by_one(plan), remat),
                       scatter_all(plan, variables), scatter(plan, state))
  chex.assert_trees_all_equal_structs(trees["params"], variables["params"])
  chex.assert_trees_all_close(actual, wanted, rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_close(scatter_all(plan, trees), apart, rtol=1e-4,
                              atol=1e-4)


def test_first_run_equals_the_next():
  """`init` makes the parameters by a scan of its own."""
  module, args = make(LAST), inputs()
  (y_BTD, _), variables = module.init_with_output(jax.random.key(1), *args,
                                                  None)
  assert set(variables) == {"params", "router"}
  again_BTD, _ = module.apply(variables, *args, None)
  chex.assert_trees_all_close(y_BTD, again_BTD, rtol=1e-5, atol=1e-5)


def test_backward_memory_is_that_of_plain_residuals_and_two_lists():
  shape = 1, 1024, 64
  one = 4 * math.prod(shape)  # bytes of B T D

  def peak(blocks, mixes):
    plan = depth_plan.plan("d", layers=2 * blocks, dense_layers=0,
                           block_layers=2 if mixes else 2 * blocks)
    module = make(plan, mixes=mixes, width=shape[-1])
    x_BTD = jax.ShapeDtypeStruct(shape, jnp.float32)
    int_BT = jnp.ones(shape[:2], jnp.int32)
    tokens = int_BT, int_BT, jnp.zeros(1, bool)
    variables = jax.eval_shape(module.init, jax.random.key(0), x_BTD, tokens,
                               None)

    def loss(variables, x_BTD):
      return jnp.sum(module.apply(variables, x_BTD, tokens, None)[0])

    grad = jax.jit(jax.grad(loss)).lower(variables, x_BTD).compile()
    return grad.memory_analysis().temp_size_in_bytes / one

  more = {blocks: peak(blocks, True) - peak(blocks, False)
          for blocks in (8, 16)}
  # The list of sums and that of their cotangents; a scan that keeps its carry
  # has 9 and 17 lists instead.
  assert more[8] < 2 * 9 + 8
  assert more[16] - more[8] < 2.3 * 8


class Noise(nn.Module):
  """Stands for experts that draw: what it draws is what it adds."""

  @nn.compact
  def __call__(self, x_BTD, real_BT):
    scale_11D = self.param("scale_11D", nn.initializers.ones,
                           (1, 1, x_BTD.shape[-1]))
    self.variable("router", "unused", lambda: jnp.float32(0))
    if not self.has_rng("noise"):  # to make the variables
      return x_BTD * scale_11D
    noise_BTD = jax.random.normal(self.make_rng("noise"), x_BTD.shape)
    self.sow("statistics", "noise_D", noise_BTD[0, 0])
    return jnp.sin(scale_11D * noise_BTD)


# A scan of blocks, and a scan of layers inside a block.
@pytest.mark.parametrize("block_layers", [1, 3])
def test_every_layer_draws_noise_of_its_own_and_keeps_it(block_layers):
  plan = depth_plan.plan("d", layers=3, dense_layers=0,
                         block_layers=block_layers)
  module = make(plan)
  module = module.clone(parts=module.parts._replace(experts=Noise))
  x_BTD, tokens = inputs()
  variables = settled(module, x_BTD, tokens, None)

  @jax.jit
  def run(params, key):
    def loss(params):
      (y_BTD, _), written = module.apply(
          {**variables, "params": params}, x_BTD, tokens, None,
          mutable=["statistics"], rngs={"noise": key})
      return jnp.sum(y_BTD ** 2), written["statistics"]
    return jax.value_and_grad(loss, has_aux=True)(params)

  params, key = variables["params"], jax.random.key(3)
  (_, statistics), d = run(params, key)
  drawn_LD = jax.tree.leaves(statistics)[0].reshape(-1, D)
  assert len({float(x) for x in drawn_LD[:, 0]}) == 3
  chex.assert_trees_all_equal(run(params, key)[0][1], statistics)
  other = run(params, jax.random.key(4))[0][1]
  assert not jnp.any(jax.tree.leaves(other)[0].reshape(-1, D) == drawn_LD)
  # Where layers are recomputed, and in blocks' own backward pass, the noise is
  # that of the forward pass: the slope along the gradient says so.
  ahead, behind = (run(jax.tree.map(lambda p, g: p + h * g, params, d),
                       key)[0][0] for h in (1e-4, -1e-4))
  square = sum(jnp.sum(g * g) for g in jax.tree.leaves(d))
  assert (ahead - behind) / 2e-4 == pytest.approx(
      float(square), rel=.02)
