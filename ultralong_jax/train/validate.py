"""Held-out figures, the same in a run and in --mode evaluate."""
import itertools
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from ultralong_jax import sharding
from ultralong_jax.data import images
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.evaluate import perplexity
from ultralong_jax.evaluate import recall
from ultralong_jax.models import hybrid
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import stages


def open_validation(config, tokenizer):
  """Returns the validation slice, in batches of about a step's tokens."""
  devices = jax.device_count()
  rows = config.batch * config.context // config.data.validation_context
  return loader.open_data(
      config.data, tokenizer, context=config.context,
      batch=max(1, rows // devices) * devices, seed=config.seed,
      split="validation", form=images.form(config))


def evaluator(config, model, data, tokenizer, mesh, stop):
  """Returns (params, router) -> iterator of the (name, value) of all figures.

  Args:
    config: of the run, or of a stage of it.
    model: Hybrid.
    data: of `open_validation`.
    tokenizer: see `tokenizer.load`.
    mesh: of `sharding.data_mesh`.
    stop: polled; once it is true, no further figure comes.
  """
  def batches():
    return data.batches(process_index=jax.process_index(),
                        process_count=jax.process_count())

  loss = perplexity.Perplexity(
      model, batches, tokenizer.byte_lengths,
      lambda batch: sharding.put(batch, mesh), stop)
  found = recall.Recall(
      recall.Segmented(model, config.evaluate.recall_segment, mesh, stop),
      data.documents, tokenizer, config.evaluate,
      tokens=config.batch * config.context, devices=mesh.size, stop=stop)
  return lambda params, router: itertools.chain(
      loss.run(params, router), found.run(params, router))


def evaluate(config, workdir, stop=lambda: False) -> dict:
  """Returns the figures of the newest checkpoint of a run."""
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  mesh = sharding.data_mesh()
  saved = restore(config, workdir, sharding.whole(mesh))
  check.check(saved.config, tokenizer.vocab)
  data = open_validation(saved.config, tokenizer)
  figures = evaluator(saved.config, saved.model, data, tokenizer, mesh, stop)
  return {"step": saved.step, **dict(figures(saved.params, saved.router))}


class Saved(NamedTuple):
  """The newest checkpoint of a run, without its optimizer.

  Attributes:
    step: of the run.
    config: the run's, as it was in the stage of this step.
    model: Hybrid of that config.
    params, router: its arrays.
  """
  step: int
  config: ConfigDict
  model: hybrid.Hybrid
  params: Any
  router: Any


def restore(config, workdir, placed) -> Saved:
  """Returns the newest checkpoint of a run.

  Args:
    config: of the run's config.json.
    workdir: the run's folder.
    placed: sharding of every array.
  """
  plan = stages.resolve(config)
  checkpoints = checkpoint.Checkpoints(workdir, read_only=True)
  step = checkpoints.latest()
  if step is None:
    raise check.Refusal(f"{checkpoints.folder} holds no checkpoint: this run "
                        "has saved nothing yet")
  record = stages.follow(plan, checkpoints.record(step), step)
  c, = (stage.config for stage in plan if stage.name == record["stage"])
  model = hybrid.Hybrid(**c.model)
  shapes = sharding.with_sharding(jax.eval_shape(
      model.init, jax.random.key(0), np.zeros((1, 1), np.int32)), placed)
  router = shapes["router"] if "router" in shapes else {}
  (params, router), _ = checkpoints.restore_model(
      step, shapes["params"], router)
  checkpoints.close()
  return Saved(step, c, model, params, router)
