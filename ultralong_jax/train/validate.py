"""Held-out figures, the same in a run and in --mode evaluate."""
import jax
import numpy as np

from ultralong_jax import sharding
from ultralong_jax.data import images
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.evaluate import perplexity
from ultralong_jax.models import hybrid
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint


def open_validation(config, tokenizer):
  """Returns the validation slice, in batches of about a step's tokens."""
  devices = jax.device_count()
  rows = config.batch * config.context // config.data.validation_context
  return loader.open_data(
      config.data, tokenizer, context=config.context,
      batch=max(1, rows // devices) * devices, seed=config.seed,
      split="validation", form=images.form(config))


def evaluator(model, data, tokenizer, mesh, stop):
  """Returns the evaluator whose run(params, router) gives the figures."""
  def batches():
    return data.batches(process_index=jax.process_index(),
                        process_count=jax.process_count())

  return perplexity.Perplexity(
      model, batches, tokenizer.byte_lengths,
      lambda batch: sharding.put(batch, mesh), stop)


def evaluate(config, workdir, stop=lambda: False) -> dict:
  """Returns the figures of the newest checkpoint of a run."""
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  check.check(config, tokenizer.vocab)
  mesh = sharding.data_mesh()
  model = hybrid.Hybrid(**config.model)
  step, params, router = restore_model(model, workdir, sharding.whole(mesh))
  data = open_validation(config, tokenizer)
  figures = evaluator(model, data, tokenizer, mesh, stop).run(params, router)
  return {"step": step, **dict(figures)}


def restore_model(model, workdir, placed):
  """Returns (step, params, router) of a run's newest checkpoint.

  Args:
    model: Hybrid, as the run's config.json describes it.
    workdir: the run's folder.
    placed: sharding of every array.
  """
  checkpoints = checkpoint.Checkpoints(workdir, read_only=True)
  step = checkpoints.latest()
  if step is None:
    raise check.Refusal(f"{checkpoints.folder} holds no checkpoint: this run "
                        "has saved nothing yet")
  shapes = sharding.with_sharding(jax.eval_shape(
      model.init, jax.random.key(0), np.zeros((1, 1), np.int32)), placed)
  router = shapes["router"] if "router" in shapes else {}
  (params, router), _ = checkpoints.restore_model(
      step, shapes["params"], router)
  checkpoints.close()
  return step, params, router
