"""Stages of a run: what each is, which come, and how one passes to the next."""
import json
import shutil

import chex
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import common
from ultralong_jax import optim
from ultralong_jax import tree
from ultralong_jax.layers import balance
from ultralong_jax.models import hybrid
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import loop
from ultralong_jax.train import stages
from ultralong_jax.train import step as step_lib
from ultralong_jax.train import validate
from ultralong_jax.train import workdir


def staged(order="short,long", **of_stages):
  c = common.get_config()
  c.stage_order = order
  c.stages = ConfigDict(of_stages)
  return c


def test_a_run_without_stages_is_one():
  c = common.get_config()
  stage, = stages.resolve(c)
  assert stage.name == "" and stage.config.to_dict() == c.to_dict()


def test_a_stage_is_the_run_with_what_differs():
  c = staged(short={}, long={"context": 2_048, "optim": {"lr": 0.5},
                             "model": {"remat": "layer"}})
  short, long = stages.resolve(c)
  assert [short.name, long.name] == ["short", "long"]
  assert short.config.context == c.context
  base = workdir.leaves(short.config)
  assert {leaf: x for leaf, x in workdir.leaves(long.config).items()
          if base[leaf] != x} == {
              "context": 2_048, "optim.lr": 0.5, "model.remat": "layer"}


def test_tokens_become_rows_and_steps():
  c = staged(short={}, long={"context": 1_024, "total_tokens": 9_000})
  c.batch_tokens = 2_048
  short, long = (stage.config for stage in stages.resolve(c))
  assert (short.batch, short.steps) == (4, c.steps)
  assert (long.batch, long.steps) == (2, 5)


@pytest.mark.parametrize("order, of_stages, message", [
    ("short", {"short": {}, "long": {}}, "stages.long: is not in stage_order"),
    ("short,long", {"short": {}}, '"long" is not in stages'),
    ("short,short", {"short": {}}, "occurs twice"),
    ("a", {"a": {"contxt": 3}}, 'did you mean "context"'),
    ("a", {"a": {"model": {"width": 64}}}, "the same in all stages"),
    ("a", {"a": {"optim": {"name": "adamw"}}}, "the same in all stages"),
    ("a", {"a": {"data": {"tokenizer": "x"}}}, "the same in all stages"),
    ("a", {"a": {"context": "long"}}, "of another type"),
    ("a", {"a": {"batch_tokens": 1_000}}, "a.batch_tokens=1000 is no multiple"),
])
def test_a_wrong_stage_is_refused(order, of_stages, message):
  with pytest.raises(check.Refusal, match=message):
    stages.resolve(staged(order, **of_stages))


def test_what_is_wrong_inside_a_stage_names_it():
  plan = stages.resolve(staged(short={}, long={"context": 100}))
  with pytest.raises(check.Refusal, match="stage long: .*\n.*context=100"):
    stages.check(plan, 0, 1, 1)
  c = common.get_config()
  c.flat_evaluations, c.evaluate.every_steps = 3, 0
  with pytest.raises(check.Refusal, match="evaluate.every_steps=0"):
    stages.check(stages.resolve(c), 0, 1, 1)


@pytest.mark.parametrize("losses, flat", [
    ([3., 2., 1.], False),
    ([3., 2., 1., 1., 1., 1.], True),  # the latest alone count
    ([1., 1., 1.], False),  # too few
    ([4., 3.89, 3.82, 3.69], False),  # 0.1 nats each
    ([4., 3.96, 3.88, 3.83], True),
    ([1., 2., 3., 4.], True),
])
def test_flat_is_a_line_that_falls_too_little(losses, flat):
  c = ConfigDict(dict(flat_evaluations=4, flat_fall=0.09))
  assert stages.is_flat(losses, c) == (flat and len(losses) >= 4)
  assert not stages.is_flat(losses, ConfigDict(
      dict(flat_evaluations=0, flat_fall=1e9)))


def test_remaining_begins_where_the_record_is():
  plan = stages.resolve(staged("a,b,c", a={"steps": 5}, b={"steps": 6}, c={}))

  def names(**record):
    record = stages.follow(plan, record, 5)
    return [(stage.name, own["stage_steps"])
            for stage, own in stages.remaining(plan, record)]

  assert names(stage="a", stage_steps=3) == [("a", 3), ("b", 0), ("c", 0)]
  assert names(stage="a", stage_steps=5) == [("b", 0), ("c", 0)]
  assert names(stage="b", stage_steps=5) == [("b", 5), ("c", 0)]
  assert names(stage="c", stage_steps=1_000) == [("c", 1_000)]
  assert names() == [("b", 0), ("c", 0)]  # of before there were stages
  with pytest.raises(check.Refusal, match='of stage "z"'):
    names(stage="z")


def test_a_schedule_restarts_and_moments_go_on():
  c = common.get_config().optim
  params = {"w_a_DF": jnp.ones((4, 4)), "scale_D": jnp.ones(4)}
  optimizer = optim.make(c, params, 100)
  opt_state = optimizer.init(params)
  _, opt_state = optimizer.update(params, opt_state, params)
  again = optim.restart_schedule(opt_state)
  chex.assert_trees_all_equal(again[:-1], opt_state[:-1])
  assert int(opt_state[-1].count) == 1 and int(again[-1].count) == 0
  assert jax.tree.structure(again) == jax.tree.structure(opt_state)


SMALL = dict(width=32, layers=2, pattern="dm", block_layers=1, heads=2,
             key_width=8, value_width=16, latent_heads=2, dense_hidden=64,
             experts=4, expert_hidden=16, expert_latent=16, position="rope",
             rope_scaling="linear")


def small(tmp_path):
  """A run of three stages; the last ends early, by being flat."""
  text = tmp_path / "text"
  text.mkdir(exist_ok=True)
  for i in range(40):
    (text / f"{i}.txt").write_text(f"document {i} says: " + 9 * f"{i * i} ")
  c = staged("short,long,flat", short={"steps": 5},
             long={"context": 128, "total_tokens": 6 * 128,
                   "model": {"rope_factor": 2.0}},
             flat={"steps": 20, "flat_evaluations": 2, "flat_fall": 1e9,
                   "evaluate": {"every_steps": 1}})
  c.context, c.batch_tokens = 64, 128
  c.model.update(SMALL)
  c.data.update(dict(path=str(text), validation_bytes=1_024,
                     validation_context=64))
  c.optim.warmup_steps, c.optim.schedule = 2, "constant"
  c.evaluate.every_steps, c.checkpoint.every_steps = 0, 4
  c.checkpoint.keep = 20
  c.log.every_steps = 1
  return c


class Stop:
  """Stops the run when its log has these many losses."""

  def __init__(self, folder, at):
    self._file, self._at = folder / "metrics.jsonl", at

  def __call__(self):
    if not self._file.exists():
      return False
    return self._file.read_text().count('"loss"') >= self._at


def lines(folder):
  return [json.loads(line) for line in
          (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
  folder = tmp_path_factory.mktemp("stages")
  loop.train(small(folder), folder / "run")
  return folder / "run"


def test_a_run_crosses_its_stages(unbroken):
  of_steps = [(x["step"], x["stage"]) for x in lines(unbroken) if "loss" in x]
  assert of_steps == [
      *((i, "short") for i in range(1, 6)),
      *((i, "long") for i in range(6, 12)),
      (12, "flat"), (13, "flat")]
  rates = {x["step"]: x["lr"] for x in lines(unbroken) if "loss" in x}
  # The warm-up is each stage's own.
  assert rates[1] == rates[6] == rates[12] == rates[2] / 2
  checkpoints = checkpoint.Checkpoints(unbroken, read_only=True)
  assert checkpoints.steps() == [4, 5, 8, 11, 12, 13]
  last = checkpoints.record(13)
  assert (last["stage"], last["stage_steps"], last["position"]) == (
      "flat", 2, 4)
  assert checkpoints.record(11)["position"] == 6
  saved = validate.restore(workdir.read_config(unbroken), unbroken, None)
  assert saved.model.rope_factor == 1. and saved.config.context == 64


@pytest.mark.parametrize("at", [3, 5, 8, 11])
def test_a_run_stopped_in_or_between_stages_goes_on_the_same(
    unbroken, tmp_path, at):
  c = small(tmp_path)
  folder = tmp_path / "run"
  loop.train(c, folder, stop=Stop(folder, at))
  assert len(lines(folder)) < len(lines(unbroken))
  loop.train(c, folder)

  def figures(folder):
    return [(x["step"], x["loss"], x["grad_norm"]) for x in lines(folder)
            if "loss" in x]

  assert figures(folder) == figures(unbroken)
  one, two = (checkpoint.Checkpoints(x, read_only=True).record(13)
              for x in (folder, unbroken))
  for record in one, two:
    for name in "train_seconds", "config":
      record.pop(name)
  assert one == two  # the checksums of every array among it


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    unbroken, tmp_path):
  c, folder = small(tmp_path), tmp_path / "run"
  for step in 4, 13:
    shutil.copytree(unbroken / f"checkpoints/{step}",
                    folder / f"checkpoints/{step}")
    (folder / f"checkpoints/{step}/COMMITTED").unlink()
  with pytest.raises(check.Refusal, match=r"no checkpoint .* \[4, 13\]"):
    loop.train(c, folder)
  assert sorted(x.name for x in (folder / "checkpoints").iterdir()) == [
      "13", "4"]


def test_measured_thresholds_balance_the_batch():
  c = common.get_config().model
  c.update(dict(SMALL, experts=8))
  model = hybrid.Hybrid(**c)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 256, (4, 65), np.int32)
  ones = np.ones((4, 64), np.int32)
  batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ones,
               positions=np.tile(np.arange(64, dtype=np.int32), (4, 1)),
               weights=ones.astype(np.float32))
  variables = model.init(jax.random.key(0), np.zeros((1, 1), np.int32))
  params, router = variables["params"], variables["router"]
  # Scores as spread as those of a trained router.
  params = tree.map_named(
      lambda name, x: 30 * x if "w_router" in name else x, params)
  router = jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.shape[-1]), router)
  measure = jax.jit(step_lib.make_measure(model, accumulate=2))
  nats_of = step_lib.make_loss(model, balance.Settings())

  def worst(router):
    part = jax.tree.map(lambda x: x[::2], batch)
    _, (_, statistics) = nats_of(params, router, part, {"loss": 1.}, 1., {})
    load_E, = [x for name, x in tree.named_leaves(statistics).items()
               if name.endswith("load_E")]
    return float(np.max(load_E) / np.mean(load_E))

  measured = measure(params, router, batch)
  # Cutoffs are held fixed: one pass halves the excess of the fullest expert,
  # here from 0.97 to 0.41, and does not end it.
  assert worst(router) > 1.9 and worst(measured) < 1.45


def test_saved_bytes_follow_the_tokens():
  c = common.get_config().model
  c.update(SMALL)
  model = hybrid.Hybrid(**c)
  variables = jax.eval_shape(model.init, jax.random.key(0),
                             np.zeros((1, 1), np.int32))

  def saved(tokens, **leaves):
    names = {"tokens": jnp.int32, "targets": jnp.int32,
             "segment_ids": jnp.int32, "positions": jnp.int32,
             "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((1, tokens), dtype)
             for name, dtype in names.items()}
    return step_lib.saved_bytes(model.clone(**leaves), variables["params"],
                                variables["router"], batch)

  assert 1.7 < saved(2_048) / saved(1_024) < 2.1
  assert saved(2_048, remat="layer") < saved(2_048) / 2
