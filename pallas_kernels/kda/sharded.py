"""KDA over several devices: batch rows and heads apart, each kernel local.

The compiler cannot partition a kernel, but rows and heads never meet in it, so
`shard_map` around the call is all that it takes, for every backend. A sequence
over several devices is another matter (context parallelism).
"""
import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import api


def kda_sharded(q, k, v, decay, beta, *, mesh, batch=None, heads=None,
                a_log=None, dt_bias=None, initial_state=None,
                segment_ids=None, **options):
  """Runs api.kda with batch rows and heads spread over a mesh.

  Args:
    q: and k, v, decay, beta, a_log, dt_bias, initial_state, segment_ids: as
      in api.kda, whole.
    mesh: whose axes `batch` and `heads` name.
    batch: mesh axis, or axes, of the batch; None: on every device.
    heads: of the heads of q and of v; both counts must divide.
    **options: the other arguments of api.kda.

  Returns:
    o: and final_state, as api.kda does, sharded like v and the state.
  """
  token = P(batch, None, heads, None)
  state = P(batch, heads, None, None)
  arrays = dict(q=q, k=k, v=v, decay=decay, beta=beta, a_log=a_log,
                dt_bias=dt_bias, initial_state=initial_state,
                segment_ids=segment_ids)
  specs = dict(q=token, k=token, v=token, decay=token,
               beta=P(batch, None, heads), a_log=P(heads),
               dt_bias=P(heads, None), initial_state=state,
               segment_ids=P(batch, None))
  arrays = {name: x for name, x in arrays.items() if x is not None}
  specs = {name: specs[name] for name in arrays}

  def local(arrays):
    return api.kda(**arrays, **options)

  # Kernels do not say over which axes their results vary.
  return jax.shard_map(local, mesh=mesh, in_specs=(specs,),
                       out_specs=(token, state), check_vma=False)(arrays)
