"""The training loop: one function, in the order in which things happen."""
import contextlib
import pathlib
import time

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
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib
from ultralong_jax.train import validate
from ultralong_jax.train import workdir as workdir_lib


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
  check.check(config, tokenizer.vocab, jax.device_count(),
              jax.process_count())
  workdir_lib.adopt(workdir, config, allow_config_change)

  # Devices: the rows of a batch are split, everything else is on each.
  mesh = sharding.data_mesh()
  whole, rows = sharding.whole(mesh), sharding.rows(mesh)

  # Data.
  data = loader.open_data(config.data, tokenizer, context=config.context,
                          batch=config.batch, seed=config.seed,
                          form=images.form(config))
  batch_shapes = {
      name: jax.ShapeDtypeStruct((config.batch, *x.shape), x.dtype,
                                 sharding=rows)
      for name, x in data.row(0).items()}

  # Model and optimizer, as shapes.
  model = hybrid.Hybrid(**config.model)

  def init(rng):
    variables = model.init(rng, np.zeros((1, 1), np.int32))
    optimizer = optim.make(config.optim, variables["params"], config.steps)
    return state_lib.create(variables, optimizer, rng)

  # An untyped key: a plain array, saved and compared like any other.
  seed = jax.random.PRNGKey(config.seed)
  shapes = sharding.with_sharding(jax.eval_shape(init, seed), whole)
  optimizer = optim.make(config.optim, shapes.params, config.steps)

  # State, in this order:
  # 1. the newest committed checkpoint of the workdir, which has to have these
  #    shapes, to verify, and to come from this data;
  # 2. if there is none, the seed.
  # A checkpoint that cannot be read ends the run: nothing starts over unasked.
  checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep)
  latest = checkpoints.latest()
  start = latest or 0
  if latest is not None:
    state, record = checkpoints.restore(start, shapes)
    if record["data"] is not None:  # an imported model comes without
      refuse_other_data(record["data"], data.fingerprint)
  else:
    # Runs once: unoptimised, it compiles in a third of the time.
    options = ({"xla_backend_optimization_level": 0}
               if jax.default_backend() == "cpu" else {})
    state = jax.jit(init, out_shardings=whole, compiler_options=options)(seed)
    record = {"position": 0, "skipped": [], "train_seconds": 0.}
  batches = data.batches(record["position"], record["skipped"],
                         jax.process_index(), jax.process_count())

  # Step, and what saves compute: compiled now, outside the training time.
  train_step = jax.jit(
      step_lib.make_train_step(model, optimizer, config.accumulate,
                               config.balance.to_dict(),
                               tokenizer.byte_lengths,
                               config.mtp_weight if model.mtp else 0.),
      donate_argnums=0, out_shardings=whole)
  prepared = time.monotonic()
  train_step = train_step.lower(shapes, batch_shapes).compile()
  checkpoints.prepare(state)
  compiled = time.monotonic()

  # Evaluation, and what it is to beat.
  validation = validate.open_validation(config, tokenizer)
  evaluator = validate.evaluator(model, validation, tokenizer, mesh, stop)
  beat = baseline.bits_per_byte(data.documents, validation.documents)

  # Log.
  flops_per_token = flops.train_per_token(
      model, shapes.params, config.context, config.data.patches)
  peak = flops.peak(mesh.devices.flat[0])
  log = progress.Log(
      workdir, config.log, start=start, steps=config.steps,
      seconds=record["train_seconds"], flops_per_token=flops_per_token,
      peak=peak and peak * jax.device_count())
  log.say(f"{tree.count(shapes.params):,} parameters, "
          f"{flops_per_token / 1e6:,.1f} MFLOP a token, "
          f"{config.batch * config.context:,} tokens a step, "
          f"{hybrid.bytes_per_token(model):,} bytes of cache a token, "
          f"{data.bytes:,} bytes of text, {jax.device_count()} x "
          f"{mesh.devices.flat[0].device_kind}")
  log.say(f"to beat: {beat['bigram']:.3f} bits/byte (bigram), "
          f"{beat['unigram']:.3f} (unigram)")
  begin = "from the seed" if latest is None else f"from step {start}"
  log.say(f"{begin}; set up in {prepared - began:.1f} s, compiled in "
          f"{compiled - prepared:.1f} s")
  log.write(start, {"setup_seconds": prepared - began,
                    "compile_seconds": compiled - prepared,
                    "unigram_bits_per_byte": beat["unigram"],
                    "bigram_bits_per_byte": beat["bigram"]})

  def evaluate(step):
    log.pause()
    clock = time.monotonic()
    figures = dict(evaluator.run(state.params, state.router))
    if figures:
      seconds = time.monotonic() - clock
      log.write(step, {**figures, "evaluate_seconds": seconds,
                       "train_seconds": log.seconds})
      log.say(f"step {step}: {figures['validation_bits_per_byte']:.4f} bits/"
              f"byte on {figures['validation_bytes']:,} held-out bytes "
              f"(bigram {beat['bigram']:.3f}) after {log.seconds:.0f} s of "
              "training")
    log.resume()

  with (contextlib.closing(log), contextlib.closing(checkpoints),
        contextlib.closing(batches)):
    log.resume()
    waiting = None  # metrics of the step before, maybe still computed
    for step in range(start + 1, config.steps + 1):
      if profile and step == profile[0]:
        jax.profiler.start_trace(workdir / "profile")
      state, metrics = train_step(state, sharding.put(next(batches), mesh))
      if waiting is not None:
        log.step(step - 1, jax.device_get(waiting))
      waiting = metrics
      if profile and profile[0] <= step == min(profile[1], config.steps):
        jax.block_until_ready(metrics)
        jax.profiler.stop_trace()
        log.say(f"wrote a trace to {workdir / 'profile'}")

      last = step == config.steps
      evaluates = not last and due(config.evaluate.every_steps, step)
      saves = last or stop() or due(config.checkpoint.every_steps, step)
      if evaluates or saves:
        log.step(step, jax.device_get(waiting))
        waiting = None
      if evaluates:
        evaluate(step)
      if saves or stop():
        checkpoints.save(state, {
            "position": step * config.batch, "skipped": record["skipped"],
            "train_seconds": log.seconds, "data": data.fingerprint,
            "config": workdir_lib.config_hash(config)})
      if stop():
        break
    evaluate(int(state.step))


def due(every: int, step: int) -> bool:
  """Is `step` one of every so many? 0 is never."""
  return every > 0 and step % every == 0


def refuse_other_data(saved: dict, current: dict):
  """Raises, with the differences, if a checkpoint is of other data."""
  lines = loader.compare(saved, current)
  if lines:
    raise check.Refusal("the checkpoint was trained on other data:\n  "
                        + "\n  ".join(lines))
