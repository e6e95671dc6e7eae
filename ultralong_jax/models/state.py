"""What a row's tokens leave behind, and how documents move it on."""
import flax
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class State:
  """All that a row's tokens so far left behind; see `hybrid.empty_state`.

  Attributes:
    layers: each layer's own state, named like its parameters; None for a
      layer that uses another's latents.
    segment_id_B: of the last token; 0 before the first.
    document_B: how many documents began.
    position_B: of the last token inside its document.
    length_B: tokens taken in, padding not counted.
    capacity: tokens that the latent buffers hold.
  """
  layers: dict
  segment_id_B: jax.Array
  document_B: jax.Array
  position_B: jax.Array
  length_B: jax.Array
  capacity: int = flax.struct.field(pytree_node=False)


def number_documents(segment_ids_BT, state):
  """Gives documents ordinals that increase along a row, across calls too.

  Args:
    segment_ids_BT: a change starts a document; 0 is trailing padding.
    state: what precedes, or None.

  Returns:
    documents_BT: from 1 on; 0 for padding.
    continues_B: whether the first document goes on from `state`; True for a
      row of padding.
  """
  real_BT = segment_ids_BT > 0
  before_B = (jnp.zeros_like(segment_ids_BT[:, 0]) if state is None
              else state.segment_id_B)
  previous_BT = jnp.concatenate([before_B[:, None], segment_ids_BT[:, :-1]],
                                axis=1)
  starts_BT = real_BT & (segment_ids_BT != previous_BT)
  begun_B = 0 if state is None else state.document_B[:, None]
  documents_BT = begun_B + jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)
  return jnp.where(real_BT, documents_BT, 0), ~starts_BT[:, 0]


def count_positions(documents_BT, continues_B, state):
  """Positions inside documents, going on from `state`."""
  index_T = jnp.arange(documents_BT.shape[1], dtype=jnp.int32)[None]
  starts_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
  starts_BT = jnp.pad(starts_BT, ((0, 0), (1, 0)))
  first_BT = jax.lax.cummax(jnp.where(starts_BT, index_T, 0), axis=1)
  positions_BT = index_T - first_BT
  if state is None:
    return positions_BT
  offset_B = jnp.where(continues_B & (state.length_B > 0),
                       state.position_B + 1, 0)
  first_document_BT = documents_BT == documents_BT[:, :1]
  return positions_BT + jnp.where(first_document_BT, offset_B[:, None], 0)


def advance(state, layers, segment_ids_BT, documents_BT, positions_BT):
  """The state after a call's last real token."""
  real_B = jnp.sum(segment_ids_BT > 0, axis=1, dtype=jnp.int32)
  last_B1 = jnp.maximum(real_B - 1, 0)[:, None]

  def at_last(x_BT, old_B):
    x_B = jnp.take_along_axis(x_BT, last_B1, axis=1)[:, 0]
    return jnp.where(real_B > 0, x_B, old_B)

  return state.replace(
      layers=layers, segment_id_B=at_last(segment_ids_BT, state.segment_id_B),
      document_B=at_last(documents_BT, state.document_B),
      position_B=at_last(positions_BT, state.position_B),
      length_B=state.length_B + real_B)
