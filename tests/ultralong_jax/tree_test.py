"""Names, masks and norms of trees."""

import jax
import jax.numpy as jnp
import numpy as np

from ultralong_jax import tree

TREE = {"block": {"w_in_DF": jnp.full((2, 3), 2.), "scale_D": jnp.ones(2)},
        "w_embed_WD": jnp.full((1, 2), 3., jnp.bfloat16)}


def test_names_are_paths():
  assert list(tree.named_leaves(TREE)) == [
      "block/scale_D", "block/w_in_DF", "w_embed_WD"]


def test_mask_searches_the_whole_name():
  mask = tree.mask(TREE, r"block/.*|embed")
  assert mask == {"block": {"w_in_DF": True, "scale_D": True},
                  "w_embed_WD": True}
  assert tree.mask(TREE, "scale") == {
      "block": {"w_in_DF": False, "scale_D": True}, "w_embed_WD": False}


def test_norm_is_over_all_leaves():
  np.testing.assert_allclose(tree.norm(TREE), (6 * 4 + 2 + 2 * 9)**0.5,
                             rtol=1e-6)
  assert tree.norm({}) == 0


def test_count_needs_only_shapes():
  assert tree.count(jax.eval_shape(lambda: TREE)) == 10


def test_one_bad_element_is_not_finite():
  assert tree.finite(TREE) and tree.finite({})
  bad = {**TREE, "x": jnp.array([0., jnp.nan])}
  assert not tree.finite(bad)


def test_choose_takes_one_side_whole():
  other = jax.tree.map(jnp.zeros_like, TREE)
  for take in (True, False):
    chosen = tree.choose(jnp.array(take), TREE, other)
    jax.tree.map(np.testing.assert_array_equal, chosen,
                 TREE if take else other)
