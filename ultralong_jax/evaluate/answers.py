"""Which answers in held-out text the model would have written itself."""
import jax
import jax.numpy as jnp

from ultralong_jax import objectives
from ultralong_jax.data import interleave


def count(hidden_BTD, w_DW, batch):
  """Counts answers that greedy decoding gives, from their question on.

  Each token is predicted after the true ones before it; where all of an
  answer's are right, greedy decoding would have written just these.

  Args:
    hidden_BTD: final hidden states.
    w_DW: unembedding.
    batch: with targets and, of data that has answers, `answers`.

  Returns:
    [tasks, 2]: answers that are right, answers.
  """
  tasks = len(interleave.TASKS)
  if "answers" not in batch:
    return jnp.zeros((tasks, 2), jnp.int32)
  marks_BT = batch["answers"]
  wrong_BT = objectives.likeliest(hidden_BTD, w_DW) != batch["targets"]
  # Answers of a row are numbered; text goes to a number past all of them.
  most = marks_BT.shape[1]
  number_BT = jnp.where(marks_BT > 0, (marks_BT - 1) // tasks, most)

  def of_rows(x_BT, reduce):
    sums = jax.vmap(lambda x, n: reduce(x, n, num_segments=most + 1))
    return sums(x_BT, number_BT)[:, :most]

  mark = of_rows(marks_BT, jax.ops.segment_max)
  right = (mark > 0) & ~of_rows(wrong_BT.astype(bool), jax.ops.segment_max)
  is_task = (mark > 0)[..., None] & (
      ((mark - 1) % tasks)[..., None] == jnp.arange(tasks)[None, None])
  return jnp.stack([jnp.sum(is_task & right[..., None], (0, 1)),
                    jnp.sum(is_task, (0, 1))], axis=-1)
