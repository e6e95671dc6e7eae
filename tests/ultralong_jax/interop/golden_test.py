"""A Kimi Linear checkpoint as transformers wrote it gives its figures here."""
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import ultralong_jax
from ultralong_jax import objectives, tree
from ultralong_jax.interop import huggingface, kimi_linear
from ultralong_jax.models import hybrid
from ultralong_jax.serve import decode

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module",
                params=["kimi_linear_tiny", "kimi_linear_tiny_qlora"])
def golden(request):
  """A folder, what is loaded from it, and what transformers computed."""
  folder = GOLDEN / request.param
  with np.load(folder / "expected.npz") as expected:
    return folder, ultralong_jax.load(folder), dict(expected)


def tensors_of(folder):
  """Returns {released name: (dtype, shape, bytes)} of a folder."""
  found = {}
  for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, "np") as shard:
      for name in shard.keys():
        x = shard.get_tensor(name)
        name = huggingface._released_name(name)
        found[name] = x.dtype, x.shape, x.tobytes()
  return found


def test_logits_loss_and_gradients(golden):
  _, m, expected = golden
  tokens_BT = jnp.asarray(expected["input_ids"], jnp.int32)

  def loss(params):
    hidden_BTD, _ = m.model.apply({**m.variables, "params": params},
                                  tokens_BT, method="features")
    w_DW = hybrid.unembedding(params)
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)
    weights_BT = jnp.ones(tokens_BT.shape).at[:, -1].set(0)
    nats, weight = objectives.next_token_loss(hidden_BTD, w_DW, targets_BT,
                                              weights_BT)
    logits_BTW = jnp.einsum("BTD,DW->BTW", hidden_BTD, w_DW)
    return nats / weight, logits_BTW

  (nats, logits_BTW), grads = jax.jit(
      jax.value_and_grad(loss, has_aux=True))(m.params)
  np.testing.assert_allclose(logits_BTW, expected["logits"], atol=1e-4)
  np.testing.assert_allclose(nats, expected["loss"], atol=1e-5)
  leaves = tree.named_leaves(jax.device_get({"params": grads}))
  got = {t.name: huggingface.join(
      [leaves[p.leaf][p.index] for p in t.pieces], t)
         for t in kimi_linear.tensors(m.model)
         if not t.pieces[0].leaf.startswith("router/")}
  names = [name for name in expected if name.startswith("grad:")]
  assert len(names) >= 22
  for name in names:
    want, hub = expected[name], name.removeprefix("grad:")
    hub = huggingface._released_name(hub.replace("forget_gate.", ""))
    if ".conv1d." in hub:  # transformers keeps the three in one
      have = np.concatenate([got[hub.replace("conv1d", f"{x}_conv1d")]
                             for x in "qkv"])
    else:
      have = got[hub]
    error = np.linalg.norm(have - want) / np.linalg.norm(want)
    assert have.shape == want.shape and error < 1e-3, (name, error)


def test_greedy_continuation_through_the_cache(golden):
  _, m, expected = golden
  prompts, new = np.split(expected["greedy"], [20], axis=1)
  assert new.shape == (2, 24)
  got = decode.generate(m.model, m.variables, prompts.tolist(), 24)
  assert got == new.tolist()


def test_export_has_the_same_bytes_and_imports_the_same(golden, tmp_path):
  folder, m, _ = golden
  hub = json.loads((folder / "config.json").read_text())
  huggingface.write(tmp_path / "a", m.model, m.variables, hub,
                    shard_bytes=100_000)
  assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
  assert tensors_of(tmp_path / "a") == tensors_of(folder)
  again = huggingface.read(tmp_path / "a")
  assert hybrid.Hybrid(**again.model) == m.model
  jax.tree.map(np.testing.assert_array_equal, again.variables, m.variables)
  huggingface.write(tmp_path / "b", m.model, again.variables, again.hub,
                    shard_bytes=100_000)
  files = sorted(x.name for x in (tmp_path / "a").iterdir())
  assert files == sorted(x.name for x in (tmp_path / "b").iterdir())
  for file in files:
    assert ((tmp_path / "a" / file).read_bytes()
            == (tmp_path / "b" / file).read_bytes())


@pytest.mark.parametrize("golden", [
    "kimi_linear_tiny",
    pytest.param("kimi_linear_tiny_qlora", marks=pytest.mark.slow)],
    indirect=True)
def test_front_door(golden):
  folder, m, expected = golden
  for ids in expected["greedy"].tolist():
    new, eos = ids[20:], 2  # which the stored continuation runs past
    new = new[:new.index(eos) + 1] if eos in new else new
    assert m.generate(ids[:20], max_new_tokens=24) == new
  tokens_BT = expected["input_ids"][:1, :9]
  np.testing.assert_allclose(m.logits(tokens_BT), expected["logits"][:1, :9],
                             atol=1e-4)
  with pytest.raises(huggingface.Refusal, match="tokenizer.json.*token ids"):
    m.generate("text")
