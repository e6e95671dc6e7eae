import json

import pytest

from configs import common
from ultralong_jax.train import check
from ultralong_jax.train import workdir


def test_config_comes_back_from_json(tmp_path):
  config = common.get_config()
  config.optim.lr = 0.1 + 0.2
  workdir.write_config(tmp_path / "run", config)
  back = workdir.read_config(tmp_path / "run")
  assert back.to_dict() == config.to_dict()
  assert workdir.config_hash(back) == workdir.config_hash(config)
  assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize("old, new", [(True, "output"), (False, "none")])
def test_a_gate_that_was_a_boolean_has_a_name_now(tmp_path, old, new):
  written = common.get_config().to_dict()
  written["model"]["latent_gate"] = old
  (tmp_path / "config.json").write_text(json.dumps(written))
  assert workdir.read_config(tmp_path).model.latent_gate == new


def test_a_run_from_before_some_leaves_goes_on(tmp_path):
  now = common.get_config()
  written = now.to_dict()
  del written["mtp_weight"], written["optim"]["muon"]
  del written["data"]["synthetic"], written["stages"], written["stage_order"]
  written["evaluate"] = {"every_steps": 500}
  for name in ("gate_rank", "tied_embedding", "fusion", "position",
               "rope_factor", "mtp"):
    del written["model"][name]
  (tmp_path / "config.json").write_text(json.dumps(written))
  check.check(workdir.read_config(tmp_path))
  assert workdir.read_config(tmp_path).to_dict() == now.to_dict()
  workdir.adopt(tmp_path, now, allow_change=False)


def test_folder_of_no_run_is_said(tmp_path):
  with pytest.raises(check.Refusal, match="not the folder of a run"):
    workdir.read_config(tmp_path)


def test_other_config_is_refused_by_its_leaves(tmp_path):
  config = common.get_config()
  workdir.adopt(tmp_path, config, allow_change=False)
  other = common.get_config()
  other.model.heads, other.seed, other.log.every_steps = 8, 1, 99
  with pytest.raises(check.Refusal) as refusal:
    workdir.adopt(tmp_path, other, allow_change=False)
  text = str(refusal.value)
  assert "model.heads: 4 there, 8 here" in text
  assert "seed: 0 there, 1 here" in text
  assert "log.every_steps" not in text
  assert "--allow_config_change" in text
  assert workdir.read_config(tmp_path).model.heads == 4
  workdir.adopt(tmp_path, other, allow_change=True)
  assert workdir.read_config(tmp_path).model.heads == 8


def test_harmless_leaves_may_change(tmp_path):
  config = common.get_config()
  workdir.adopt(tmp_path, config, allow_change=False)
  config.log.every_steps, config.checkpoint.keep = 1, 7
  config.evaluate.every_steps, config.model.remat = 3, "layer"
  workdir.adopt(tmp_path, config, allow_change=False)
  assert workdir.read_config(tmp_path).checkpoint.keep == 7


def test_config_of_another_version_is_refused(tmp_path):
  config = common.get_config()
  workdir.write_config(tmp_path, config)
  saved = json.loads(workdir.config_file(tmp_path).read_text())
  del saved["model"]["glu"]
  workdir.config_file(tmp_path).write_text(json.dumps(saved))
  with pytest.raises(check.Refusal, match="model.glu: absent there, 'situ'"):
    workdir.adopt(tmp_path, config, allow_change=False)


@pytest.mark.parametrize("balance", ["quantile", "none"])
def test_config_from_before_a_leaf_has_what_it_had_then(tmp_path, balance):
  config = common.get_config()
  old = config.to_dict()
  old["balance"] = balance  # a name, before the forms had numbers
  for leaf in ("balance", "router", "routing_width", "gate_rank",
               "tied_embedding"):
    del old["model"][leaf]
  workdir.config_file(tmp_path).write_text(json.dumps(old))
  config.model.balance = balance
  assert workdir.read_config(tmp_path).to_dict() == config.to_dict()
  check.check(workdir.read_config(tmp_path))
  workdir.adopt(tmp_path, config, allow_change=False)


def test_summary_shows_what_differs_from_the_base():
  config = common.get_config()
  assert workdir.summary(config) == "config: as in the base"
  config.model.layers = 5
  assert workdir.summary(config) == "config: model.layers=5"
