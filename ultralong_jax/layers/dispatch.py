"""Tokens to the rows of their experts, and back, weighted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def block_rows(pairs, experts):
  """Rows in a block. Padding costs half a block an expert, a block a copy of
  its expert's weights; between 32 and 128 the first has the say."""
  share = max(pairs // experts, 1)
  return min(128, max(8, 1 << (share // 4).bit_length()))


class Layout(NamedTuple):
  """Rows sorted by expert, each expert's first at a multiple of the block.

  A pair is a token and one of its experts, number token * A + slot.

  Attributes:
    pair_I: pair in each row; the number of pairs where a row is empty.
    row_XA: row of each pair.
    size_E: rows of each expert, empty ones included.
  """
  pair_I: jax.Array
  row_XA: jax.Array
  size_E: jax.Array


def arrange(choice_XA, experts, block):
  """Sorts pairs by expert. The number of rows is static: pairs + E * block."""
  tokens, top = choice_XA.shape
  pairs = tokens * top
  expert_I = choice_XA.reshape(pairs)
  real_E = jnp.bincount(expert_I, length=experts)
  size_E = (real_E + block - 1) // block * block
  end_E = jnp.cumsum(size_E)
  shift_E = (end_E - size_E) - (jnp.cumsum(real_E) - real_E)
  sorted_I = jnp.argsort(expert_I, stable=True)
  row_I = jnp.arange(pairs) + shift_E[expert_I[sorted_I]]
  row_XA = jnp.zeros(pairs, jnp.int32).at[sorted_I].set(
      row_I, unique_indices=True, mode="promise_in_bounds")
  rows = pairs if block == 1 else (pairs // block + experts) * block
  pair_I = jnp.full(rows, pairs, jnp.int32).at[row_I].set(
      sorted_I, unique_indices=True, mode="promise_in_bounds")
  return Layout(pair_I, row_XA.reshape(tokens, top), size_E)


@jax.custom_vjp
def to_experts(x_XD, layout):
  """Copies each token to its rows; empty rows are zero."""
  top = layout.row_XA.shape[1]
  return x_XD.at[layout.pair_I // top].get(mode="fill", fill_value=0)


def _to_experts_fwd(x_XD, layout):
  return to_experts(x_XD, layout), layout


def _to_experts_bwd(layout, d_ID):
  # Transposing the copy would scatter; every pair knows its row, so gather.
  # Slot by slot: a sum over an axis of two costs a CPU five times as much.
  d_XD = sum(d_ID.at[row_X].get(mode="promise_in_bounds").astype(jnp.float32)
             for row_X in layout.row_XA.T)
  return d_XD.astype(d_ID.dtype), None


to_experts.defvjp(_to_experts_fwd, _to_experts_bwd)


@jax.custom_vjp
def combine(y_ID, weight_XA, layout):
  """Weighted sum of each token's rows, in float32."""
  y_XAD = y_ID.at[layout.row_XA].get(mode="promise_in_bounds")
  return jnp.einsum("XAD,XA->XD", y_XAD.astype(jnp.float32), weight_XA)


def _combine_fwd(y_ID, weight_XA, layout):
  return combine(y_ID, weight_XA, layout), (y_ID, weight_XA, layout)


def _combine_bwd(residuals, d_XD):
  y_ID, weight_XA, layout = residuals
  top = weight_XA.shape[1]
  y_XAD = y_ID.at[layout.row_XA].get(mode="promise_in_bounds")
  d_weight_XA = jnp.einsum("XAD,XD->XA", y_XAD.astype(jnp.float32), d_XD)
  weight_I = weight_XA.reshape(-1).at[layout.pair_I].get(
      mode="fill", fill_value=0.)
  d_ID = d_XD.at[layout.pair_I // top].get(mode="fill", fill_value=0.)
  d_ID = (weight_I[:, None] * d_ID).astype(y_ID.dtype)
  return d_ID, d_weight_XA, None


combine.defvjp(_combine_fwd, _combine_bwd)
