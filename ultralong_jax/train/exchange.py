"""A run from a released checkpoint, and a released checkpoint from a run."""
import jax
import jax.numpy as jnp

from ultralong_jax import optim, sharding
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.interop import huggingface
from ultralong_jax.layers import balance
from ultralong_jax.train import checkpoint, stages, validate
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import workdir as workdir_lib


def import_run(config, released_folder, workdir, allow_config_change=False):
  """Makes a run of a released checkpoint, at step 0; --mode train goes on.

  Args:
    config: all but `model`, which the checkpoint decides, and which is
      replaced in place.
    released_folder: see `huggingface.read`.
    workdir: of the run. Parameters are float32 there, as a run trains them.
    allow_config_change: see `workdir.adopt`.
  """
  whole = sharding.whole(sharding.data_mesh())
  released = huggingface.read(released_folder, whole, jnp.float32)
  for name, value in released.model.items():
    config.model[name] = value
  workdir_lib.adopt(workdir, config, allow_config_change)
  first = stages.resolve(config)[0].config
  optimizer = optim.make(first.optim, released.variables["params"],
                         first.steps)

  def create(variables, rng):
    if "router" in variables:
      variables = dict(variables, router=balance.remembering(
          variables["router"], config.model.balance))
    return state_lib.create(variables, optimizer, rng)

  create = jax.jit(create, donate_argnums=0, out_shardings=whole)
  state = create(released.variables, jax.random.PRNGKey(config.seed))
  checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep)
  checkpoints.save(state, {
      "position": 0, "skipped": [], "train_seconds": 0., "data": None,
      "config": workdir_lib.config_hash(config)})
  checkpoints.wait()
  checkpoints.close()


def export_run(workdir, folder, dtype=None):
  """Writes the newest checkpoint of a run in the hub's format.

  Args:
    workdir: of the run.
    folder: new; see `huggingface.write`. The tokenizer is not written.
    dtype: of the matrices; None: float32, as they are.
  """
  config = workdir_lib.read_config(workdir)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  saved = validate.restore(config, workdir,
                           sharding.whole(sharding.data_mesh()))
  ids = {f"{name}_token_id": getattr(tokenizer, name)
         for name in tokenizer_lib.SPECIALS}
  huggingface.write(folder, saved.model,
                    {"params": saved.params, "router": saved.router}, ids,
                    dtype)
