"""Trees of arrays: names of leaves, regex masks, norms, counts."""

import re

import jax
import jax.numpy as jnp


def map_named(function, tree, *rest):
  """Maps `function(name, leaf, *others)` over the leaves.

  Args:
    function: takes a leaf's name, "decoder/delta/w_q_DHK", and the leaf.
    tree: any pytree.
    *rest: trees of the same structure.

  Returns:
    A tree of `tree`'s structure with the results.
  """
  def call(path, *leaves):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return function(name, *leaves)
  return jax.tree_util.tree_map_with_path(call, tree, *rest)


def named_leaves(tree) -> dict:
  """Returns {name: leaf} in the tree's own order."""
  leaves = {}
  map_named(leaves.__setitem__, tree)
  return leaves


def mask(tree, pattern: str):
  """Returns a tree of bools: does `pattern` occur in the leaf's name?"""
  return map_named(lambda name, _: bool(re.search(pattern, name)), tree)


def norm(tree):
  """Returns the Euclidean norm over all leaves, summed in float32."""
  squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32)))
             for leaf in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def count(tree) -> int:
  """Returns the number of elements; shapes are enough."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def size_bytes(tree) -> int:
  """Returns the bytes of all leaves; shapes are enough."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def finite(tree):
  """Returns one bool: are all elements of all leaves finite?"""
  checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(checks)) if checks else jnp.array(True)


def add(tree, other):
  """Returns the sum leaf by leaf; integer leaves stay exact."""
  return jax.tree.map(jnp.add, tree, other)


def choose(take, tree, other):
  """Returns `tree` where the scalar bool `take` holds, else `other`."""
  return jax.tree.map(lambda a, b: jnp.where(take, a, b), tree, other)
