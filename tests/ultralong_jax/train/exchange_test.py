"""A released checkpoint becomes a run, and a run a released checkpoint."""
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import common
import ultralong_jax
from ultralong_jax.interop import huggingface
from ultralong_jax.models import hybrid
from ultralong_jax.train import check, exchange


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
  """A released folder, the run made of it, and what that run exports."""
  c = common.get_config()
  c.model.update(dict(
      vocab=272, width=8, layers=1, pattern="d", heads=2, key_width=4,
      value_width=4, gate_rank=4, latent_heads=2, latent_gate="none",
      glu="swiglu", dense_hidden=8, expert_latent=0, depth="residual"))
  c.model.floor = None
  model = hybrid.Hybrid(**c.model)
  variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), int))
  at = tmp_path_factory.mktemp("exchange")
  huggingface.write(at / "released", model, variables)
  exchange.import_run(common.get_config(), at / "released", at / "run")
  exchange.export_run(at / "run", at / "exported")
  return at


def test_the_run_is_the_checkpoint(exchanged):
  tokens_BT = np.array([[256, 65, 66]])
  run, released = (ultralong_jax.load(exchanged / name)
                   for name in ("run", "released"))
  assert run.step == 0 and run.config.model.floor is None
  np.testing.assert_array_equal(run.logits(tokens_BT),
                                released.logits(tokens_BT))


def test_the_export_is_the_checkpoint(exchanged):
  before, after = (load_file(exchanged / name / "model.safetensors")
                   for name in ("released", "exported"))
  assert before.keys() == after.keys()
  for name, x in before.items():
    np.testing.assert_array_equal(after[name], x)
  hub = json.loads((exchanged / "exported" / "config.json").read_text())
  assert (hub["bos_token_id"], hub["eos_token_id"]) == (256, 257)


def test_export_rounds_matrices_alone_when_asked(exchanged):
  exchange.export_run(exchanged / "run", exchanged / "rounded", "bfloat16")
  x = load_file(exchanged / "rounded" / "model.safetensors")
  assert x["lm_head.weight"].dtype == "bfloat16"
  assert x["model.layers.0.self_attn.A_log"].dtype == "float32"
  assert ultralong_jax.load(
      exchanged / "rounded").config.model.dtype == "bfloat16"


def test_import_into_another_run_is_refused(exchanged):
  c = common.get_config()
  c.seed = 1
  with pytest.raises(check.Refusal, match="seed: 0 there, 1 here"):
    exchange.import_run(c, exchanged / "released", exchanged / "run")
