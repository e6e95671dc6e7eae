"""`ultralong_jax.load`: from a folder to logits and text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
import ultralong_jax
from ultralong_jax import optim
from ultralong_jax.data import tokenizer
from ultralong_jax.models import hybrid
from ultralong_jax.train import checkpoint
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import workdir as workdir_lib


def tiny_config():
  c = common.get_config()
  c.model.update(dict(
      width=16, layers=2, pattern="dm", heads=2, key_width=8, value_width=8,
      latent_heads=2, latent_key_width=8, latent_shared_width=4,
      latent_value_width=8, latent_rank=8, dense_hidden=16, experts=4,
      expert_hidden=8, expert_latent=8))
  return c


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A folder as a run leaves it, with two checkpoints, and the newer state."""
  workdir = tmp_path_factory.mktemp("run")
  c = tiny_config()
  workdir_lib.write_config(workdir, c)
  model = hybrid.Hybrid(**c.model)
  variables = jax.jit(model.init)(jax.random.key(3),
                                  jnp.zeros((1, 1), jnp.int32))
  optimizer = optim.make(c.optim, variables["params"], c.steps)
  state = state_lib.create(variables, optimizer, jax.random.PRNGKey(0))
  checkpoints = checkpoint.Checkpoints(workdir, keep=2)
  for step in (1, 2):
    state = state.replace(
        step=jnp.int32(step),
        params=jax.tree.map(lambda x: step * x, variables["params"]),
        router=jax.tree.map(lambda x: x + step, variables["router"]))
    checkpoints.save(state, {"position": 0})
  checkpoints.close()
  return workdir, state


@pytest.fixture(scope="module")
def loaded(run):
  return ultralong_jax.load(run[0])


def test_loads_the_newest_checkpoint(run, loaded):
  _, state = run
  assert loaded.step == 2
  for ours, saved in ((loaded.params, state.params),
                      (loaded.router, state.router)):
    jax.tree.map(np.testing.assert_array_equal, ours, saved)
  assert loaded.config.to_dict() == tiny_config().to_dict()


def test_logits_are_the_models(loaded):
  tokens_BT = np.array([[256, 65, 66], [256, 67, 68]])
  logits_BTW = loaded.logits(tokens_BT)
  assert logits_BTW.shape == (2, 3, 272) and logits_BTW.dtype == jnp.float32
  # Rows are documents of their own, and the past alone counts.
  np.testing.assert_allclose(loaded.logits(tokens_BT[1:, :2]),
                             logits_BTW[1:, :2], rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match=r"\[B, T\], not \(3,\)"):
    loaded.logits(tokens_BT[0])


def test_greedy_text_is_the_likeliest_by_the_logits(loaded):
  text = loaded.generate("def ", max_new_tokens=1)
  ids = [loaded.tokenizer.bos, *b"def "]
  best = int(jnp.argmax(loaded.logits(np.array([ids]))[0, -1]))
  assert text == tokenizer.load("byte").decode([best])
  long = loaded.generate("def ", max_new_tokens=6)
  assert isinstance(long, str) and long.startswith(text)


def test_samples_differ_by_seed(loaded):
  one, same, other = [loaded.generate("", 8, temperature=2., seed=seed)
                      for seed in (0, 0, 1)]
  assert one == same != other


def test_says_what_is_missing(tmp_path):
  with pytest.raises(Exception, match="nowhere.*not the folder of a run"):
    ultralong_jax.load(tmp_path / "nowhere")
  workdir_lib.write_config(tmp_path, tiny_config())
  with pytest.raises(Exception, match="nothing was saved"):
    ultralong_jax.load(tmp_path)
