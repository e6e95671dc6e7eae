"""The training loop: train() sets a run up, _stage() is a stage of it.

Both are in the order in which things happen.
"""
import contextlib
import pathlib
import time
from typing import Callable, NamedTuple

import jax
import numpy as np

from ultralong_jax import optim
from ultralong_jax import sharding
from ultralong_jax import tree
from ultralong_jax.data import baseline
from ultralong_jax.data import images
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.models import hybrid
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import flops
from ultralong_jax.train import progress
from ultralong_jax.train import stages
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib
from ultralong_jax.train import validate
from ultralong_jax.train import workdir as workdir_lib


class Run(NamedTuple):
  """What is the same in all stages of a run.

  Attributes:
    workdir: its folder.
    config_hash: of the leaves that decide what is computed.
    tokenizer: see `tokenizer.load`.
    mesh: all devices; the rows of a batch are split over them.
    shapes: TrainState as ShapeDtypeStructs with shardings.
    checkpoints: where states are saved.
    log: where figures go.
    stop: polled; True once somebody asked to stop.
    profile: (first, last) step of an xprof trace, or None.
  """
  workdir: pathlib.Path
  config_hash: str
  tokenizer: tokenizer_lib.Tokenizer
  mesh: jax.sharding.Mesh
  shapes: state_lib.TrainState
  checkpoints: checkpoint.Checkpoints
  log: progress.Log
  stop: Callable[[], bool]
  profile: tuple[int, int] | None


def train(config, workdir, *, stop=lambda: False, profile=None,
          allow_config_change=False):
  """Trains in `workdir`, or goes on with what is there.

  Args:
    config: every leaf of configs/common.py.
    workdir: folder of config.json, checkpoints/ and metrics.jsonl.
    stop: polled at every step; once it is true, the loop saves and returns.
    profile: (first, last) step of an xprof trace, or None.
    allow_config_change: go on although config.json says otherwise.
  """
  began = time.monotonic()
  workdir = pathlib.Path(workdir)

  # Check: all that can be known before anything compiles.
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  plan = stages.resolve(config)
  stages.check(plan, tokenizer.vocab, jax.device_count(), jax.process_count())
  workdir_lib.adopt(workdir, config, allow_config_change)

  # Devices: the rows of a batch are split, everything else is on each.
  mesh = sharding.data_mesh()
  whole = sharding.whole(mesh)

  # Data of every stage: what is missing is missed now, not after days.
  data = {stage.name: open_data(number, stage.config, tokenizer)
          for number, stage in enumerate(plan)}

  # Model and optimizer, as shapes; no stage changes those.
  first = plan[0].config
  model = hybrid.Hybrid(**first.model)

  def init(rng):
    variables = model.init(rng, np.zeros((1, 1), np.int32))
    optimizer = optim.make(first.optim, variables["params"], first.steps)
    return state_lib.create(variables, optimizer, rng)

  # An untyped key: a plain array, saved and compared like any other.
  seed = jax.random.PRNGKey(config.seed)
  shapes = sharding.with_sharding(jax.eval_shape(init, seed), whole)
  if len(plan) > 1:
    print(stages.table(plan, data, shapes, jax.device_count()), flush=True)

  # State, in this order:
  # 1. the newest checkpoint of the workdir that verifies; it has to have these
  #    shapes, and to come from this data;
  # 2. if there is none, the seed.
  # Where none verifies the run ends: nothing starts over unasked.
  checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep)
  latest = checkpoints.latest()
  if latest is not None:
    state, record = checkpoints.restore(latest, shapes)
    record = stages.follow(plan, record, latest)
    if record["data"] is not None:  # an imported model comes without
      refuse_other_data(record["data"], data[record["stage"]].fingerprint)
  elif checkpoints.folders():
    raise check.Refusal(
        f"no checkpoint in {checkpoints.folder} is whole, of steps "
        f"{checkpoints.folders()}; move these away to begin from the seed")
  else:
    # Runs once: unoptimised, it compiles in a third of the time.
    options = ({"xla_backend_optimization_level": 0}
               if jax.default_backend() == "cpu" else {})
    state = jax.jit(init, out_shardings=whole, compiler_options=options)(seed)
    record = stages.start(plan)
  checkpoints.prepare(state)

  # Log.
  peak = flops.peak(mesh.devices.flat[0])
  log = progress.Log(
      workdir, config.log, start=latest or 0,
      steps=sum(stage.config.steps for stage in plan),
      seconds=record["train_seconds"],
      peak=peak and peak * jax.device_count())
  log.say(f"{tree.count(shapes.params):,} parameters, "
          f"{hybrid.bytes_per_token(model):,} bytes of cache a token, "
          f"{jax.device_count()} x {mesh.devices.flat[0].device_kind}")
  begin = "from the seed" if latest is None else f"from step {latest}"
  log.say(f"{begin}; set up in {time.monotonic() - began:.1f} s")
  log.write(latest or 0, {"setup_seconds": time.monotonic() - began})

  run = Run(workdir, workdir_lib.config_hash(config), tokenizer, mesh, shapes,
            checkpoints, log, stop, profile)
  with contextlib.closing(log), contextlib.closing(checkpoints):
    for stage, record in stages.remaining(plan, record):
      state = _stage(run, stage, record, state, data[stage.name])
      if stop():
        break


def _stage(run, stage, record, state, data):
  """Trains one stage to its end, or until somebody stops it.

  Args:
    run: Run.
    stage: `stages.Stage`.
    record: where in the stage the state is; brought up to date.
    state: TrainState; donated.
    data: the stage's training data.

  Returns:
    state: TrainState after it.
  """
  c, mesh, log, stop = stage.config, run.mesh, run.log, run.stop
  began = time.monotonic()
  model = hybrid.Hybrid(**c.model)
  optimizer = optim.make(c.optim, run.shapes.params, c.steps)
  # The step of the run before which the stage began.
  start = int(state.step)
  before = start - record["stage_steps"]

  # Step, and what saves compute: compiled now, outside the training time.
  train_step = jax.jit(
      step_lib.make_train_step(model, optimizer, c.accumulate,
                               c.balance.to_dict(),
                               run.tokenizer.byte_lengths,
                               c.mtp_weight if model.mtp else 0.),
      donate_argnums=0, out_shardings=sharding.whole(mesh))
  train_step = train_step.lower(
      run.shapes, stages.batch_shapes(data, c.batch, sharding.rows(mesh))
  ).compile()
  batches = data.batches(record["position"], record["skipped"],
                         jax.process_index(), jax.process_count())
  if before and not record["stage_steps"]:
    state = _enter(run, c, model, state, data)
  compiled = time.monotonic()

  # Evaluation, and what it is to beat.
  validation = validate.open_validation(c, run.tokenizer)
  figures_of = validate.evaluator(c, model, validation, run.tokenizer, mesh,
                                  stop)
  beat = baseline.bits_per_byte(data.documents, validation.documents)

  flops_per_token = flops.train_per_token(
      model, run.shapes.params, c.context, c.data.patches)
  log.enter(stage.name, flops_per_token)
  name = f"stage {stage.name}: " if stage.name else ""
  log.say(f"{name}{flops_per_token / 1e6:,.1f} MFLOP a token, "
          f"{c.batch * c.context:,} tokens a step, {data.bytes:,} bytes of "
          f"text; compiled in {compiled - began:.1f} s")
  log.say(f"to beat: {beat['bigram']:.3f} bits/byte (bigram), "
          f"{beat['unigram']:.3f} (unigram)")
  log.write(start, {"compile_seconds": compiled - began,
                    "context": c.context,
                    "unigram_bits_per_byte": beat["unigram"],
                    "bigram_bits_per_byte": beat["bigram"]})

  def evaluate(step):
    log.pause()
    clock = time.monotonic()
    figures = dict(figures_of(state.params, state.router))
    if figures:
      record["evaluated"] = step
      record["losses"] = [*record["losses"], figures["validation_loss"]]
      seconds = time.monotonic() - clock
      log.write(step, {**figures, "evaluate_seconds": seconds,
                       "train_seconds": log.seconds})
      log.say(f"step {step}: {figures['validation_bits_per_byte']:.4f} bits/"
              f"byte on {figures['validation_bytes']:,} held-out bytes "
              f"(bigram {beat['bigram']:.3f}) after {log.seconds:.0f} s of "
              "training")
    log.resume()

  with contextlib.closing(batches):
    log.resume()
    # A signal in an evaluation left it undone.
    if (due(c.evaluate.every_steps, start) and record["stage_steps"]
        and record["evaluated"] != start):
      evaluate(start)
    waiting = None  # metrics of the step before, maybe still computed
    for step in range(start + 1, before + c.steps + 1):
      if stages.is_over(stage, record):
        break
      if run.profile and step == run.profile[0]:
        jax.profiler.start_trace(run.workdir / "profile")
      run.checkpoints.poll()  # raises what a save in the background failed of
      state, metrics = train_step(state, sharding.put(next(batches), mesh))
      record["stage_steps"] = step - before
      if waiting is not None:
        log.step(step - 1, jax.device_get(waiting))
      waiting = metrics
      if run.profile and run.profile[0] <= step == min(
          run.profile[1], before + c.steps):
        jax.block_until_ready(metrics)
        jax.profiler.stop_trace()
        log.say(f"wrote a trace to {run.workdir / 'profile'}")

      last = record["stage_steps"] == c.steps
      evaluates = not last and due(c.evaluate.every_steps, step)
      saves = last or stop() or due(c.checkpoint.every_steps, step)
      if evaluates or saves:
        log.step(step, jax.device_get(waiting))
        waiting = None
      if evaluates:
        evaluate(step)
      if saves or stop() or stages.is_over(stage, record):
        run.checkpoints.save(state, {
            **record, "position": record["stage_steps"] * c.batch,
            "train_seconds": log.seconds, "data": data.fingerprint,
            "config": run.config_hash})
      if stop():
        break
    if record["evaluated"] != int(state.step):
      evaluate(int(state.step))
    log.pause()
  return state


def _enter(run, c, model, state, data):
  """Returns the state as a later stage begins with it.

  The schedule starts again, the moments go on. Thresholds of experts are
  measured at the new context, since scores there are other ones.
  """
  state = state.replace(opt_state=optim.restart_schedule(state.opt_state))
  if model.balance != "quantile" or not state.router:
    return state
  measure = jax.jit(step_lib.make_measure(model, c.accumulate),
                    out_shardings=sharding.whole(run.mesh))
  with contextlib.closing(data.batches(
      0, (), jax.process_index(), jax.process_count())) as batches:
    batch = sharding.put(next(batches), run.mesh)
  return state.replace(router=measure(state.params, state.router, batch))


def open_data(number, c, tokenizer):
  """Returns the training data of the stage of this number."""
  # Another order in each stage: the first documents are not always the same.
  return loader.open_data(c.data, tokenizer, context=c.context, batch=c.batch,
                          seed=c.seed + number, form=images.form(c))


def due(every: int, step: int) -> bool:
  """Is `step` one of every so many? 0 is never."""
  return every > 0 and step % every == 0


def refuse_other_data(saved: dict, current: dict):
  """Raises, with the differences, if a checkpoint is of other data."""
  lines = loader.compare(saved, current)
  if lines:
    raise check.Refusal("the checkpoint was trained on other data:\n  "
                        + "\n  ".join(lines))
