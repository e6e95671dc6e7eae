"""What a hub's folder may look like, and what is refused."""
import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import common
from ultralong_jax import tree
from ultralong_jax.interop import huggingface, kimi_linear, safetensors_file
from ultralong_jax.models import hybrid

# As released, with 1-based lists; sizes of moonshotai/Kimi-Linear-48B-A3B.
LARGE = dict(
    model_type="kimi_linear", vocab_size=163840, hidden_size=2304,
    num_hidden_layers=27, num_attention_heads=32, num_key_value_heads=32,
    intermediate_size=9216, moe_intermediate_size=1024, num_experts=256,
    num_experts_per_token=8, num_shared_experts=1, first_k_dense_replace=1,
    moe_layer_freq=1, moe_renormalize=True, num_expert_group=1, topk_group=1,
    moe_router_activation_func="sigmoid", routed_scaling_factor=2.446,
    use_grouped_topk=True, kv_lora_rank=512, q_lora_rank=None,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    mla_use_nope=True, hidden_act="silu", rms_norm_eps=1e-5,
    num_nextn_predict_layers=0, rope_scaling=None, rope_theta=1e4,
    tie_word_embeddings=False, dtype="bfloat16", linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
        kda_layers=[i for i in range(1, 27) if i % 4], head_dim=128,
        num_heads=32, short_conv_kernel_size=4))
SMALL = LARGE | dict(
    vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, intermediate_size=6, num_experts=4,
    moe_intermediate_size=2, num_experts_per_token=1, kv_lora_rank=3,
    qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2,
    tie_word_embeddings=True, linear_attn_config=dict(
        full_attn_layers=[], kda_layers=[1], head_dim=2, num_heads=3,
        short_conv_kernel_size=4))
A_LOG = "model.layers.0.self_attn.A_log"


def model_of(hub):
  return hybrid.Hybrid(**kimi_linear.to_model(hub, "config.json"))


def values_of(hub, dtype=np.float32):
  rng = np.random.default_rng(0)
  return {t.name: rng.standard_normal(t.shape).astype(dtype)
          for t in kimi_linear.tensors(model_of(hub))}


def save(folder, hub, values):
  """Writes a checkpoint in two shards with an index."""
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(hub))
  names, weight_map = list(values), {}
  for i, part in enumerate((names[:3], names[3:])):
    file = f"model-{i + 1:05}-of-00002.safetensors"
    save_file({name: values[name] for name in part}, folder / file)
    weight_map |= dict.fromkeys(part, file)
  (folder / huggingface.INDEX).write_text(json.dumps(
      {"weight_map": weight_map}))
  return folder


@pytest.fixture
def folder(tmp_path):
  return save(tmp_path / "released", SMALL, values_of(SMALL))


def test_reads_the_released_config():
  m = model_of(LARGE)
  assert (m.pattern * 27)[:27] == "dddm" * 6 + "ddm"
  assert m.floor is None and m.gate_rank == 128 and m.routed_scale == 2.446
  tensors = kimi_linear.tensors(m)
  total = sum(int(np.prod(t.shape)) for t in tensors)
  assert 48e9 < total < 50e9
  # Each element of each parameter is in exactly one tensor.
  shapes = tree.named_leaves(huggingface._shapes(m))
  filled = dict.fromkeys(shapes, 0)
  for t in tensors:
    for p in t.pieces:
      rows = p.heads * (p.stop - p.start)
      filled[p.leaf] += int(np.prod(t.shape)) // t.shape[0] * rows
  assert filled == {name: x.size for name, x in shapes.items()}


def test_both_spellings_are_one_model():
  other = {name: value for name, value in LARGE.items()
           if name not in ("linear_attn_config", "first_k_dense_replace")}
  for first, second in kimi_linear.SPELLINGS:
    if first in other:
      other[second] = other.pop(first)
  other |= dict(
      linear_head_dim=128, linear_num_heads=32, linear_conv_kernel_dim=4,
      layer_types=["linear_attention" if k == "d" else "full_attention"
                   for k in "dddm" * 6 + "ddm"],
      mlp_layer_types=["dense"] + ["sparse"] * 26)
  assert model_of(other) == model_of(LARGE)
  again = kimi_linear.to_hub(model_of(other), other)
  assert model_of(again) == model_of(LARGE)
  assert again["linear_attn_config"] == LARGE["linear_attn_config"]


@pytest.mark.parametrize("change, says", [
    (dict(model_type="llama"), "model_type='llama': only 'kimi_linear'"),
    (dict(hidden_act="relu"), "hidden_act='relu': only 'silu'"),
    (dict(kv_lora_rank=None), "kv_lora_rank is missing"),
    (dict(num_key_value_heads=2), "num_key_value_heads=2: only"),
    (dict(dtype="float16"), "dtype='float16': float32 and"),
    (dict(layer_types=["linear"]), r"layer_types=\['linear'\]"),
    (dict(mlp_layer_types=["sparse", "dense"]), "mlp_layer_types"),
    (dict(linear_attn_config=dict(full_attn_layers=[0], kda_layers=[])),
     r"full_attn_layers=\[0\].*from 1 to 1 once")])
def test_says_which_field_has_no_counterpart(change, says):
  with pytest.raises(huggingface.Refusal, match=says):
    model_of(SMALL | change)


def test_refuses_to_export_another_architecture(tmp_path):
  m = model_of(SMALL).clone(floor=-5.0, latent_gate="output", pattern="f",
                            share="latent", injection_stride=2)
  with pytest.raises(
      huggingface.Refusal,
      match="(?s)floor=-5.*latent_gate.*injection.*share.*pattern='f'"):
    huggingface.write(tmp_path / "x", m, {})


@pytest.mark.parametrize("tower", [common.published_tower(),
                                   dict(vision="direct")],
                         ids=["tower", "direct"])
def test_images_have_no_place_in_the_hubs_text_model(tmp_path, tower):
  with pytest.raises(huggingface.Refusal,
                     match=f"model.vision='{tower['vision']}': has to be"):
    huggingface.write(tmp_path / "x", model_of(SMALL).clone(**tower), {})
  assert not (tmp_path / "x").exists()
  with pytest.raises(huggingface.Refusal, match="vision_config=.*only None"):
    model_of(SMALL | dict(vision_config={"vt_hidden_size": 1024}))


def test_no_parameter_is_left_behind(tmp_path):
  model = model_of(SMALL)
  variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype),
                           huggingface._shapes(model))
  variables["params"]["images"] = {"w_patch_FD": np.zeros((4, 4))}
  with pytest.raises(huggingface.Refusal, match="params/images/w_patch_FD"):
    huggingface.write(tmp_path / "x", model, variables)


def test_the_checkpoint_decides_all_that_makes_parameters():
  """What a run's config says of its model does not matter to an import."""
  hub = SMALL | dict(num_hidden_layers=2, linear_attn_config=SMALL[
      "linear_attn_config"] | dict(kda_layers=[1, 2]))
  c = dict(common.model())
  c.update(vision="tower", injection_stride=1, share="gates", mtp=True,
           router="prototype", position="rope", glu_input_norm=True,
           latent_gate="latent")
  c.update(kimi_linear.to_model(hub, "config.json"))
  model, wanted = hybrid.Hybrid(**c), model_of(hub)
  assert model.plan() == wanted.plan()
  shapes = [jax.tree.map(lambda x: x.shape, huggingface._shapes(m))
            for m in (model, wanted)]
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize("form", [(3,), (1, 1, 3, 1), (8,), (1, 1, 8, 1)])
def test_a_log_comes_flat_deep_and_padded(tmp_path, form):
  values = values_of(SMALL)
  want = values[A_LOG].reshape(3)
  values[A_LOG] = np.pad(want, (0, max(form) - 3)).reshape(form)
  x = huggingface._entries(save(tmp_path, SMALL, values))[A_LOG]
  assert huggingface._fits(A_LOG, form, (1, 1, 3, 1))
  got = huggingface._value(A_LOG, x, (1, 1, 3, 1))
  np.testing.assert_array_equal(got.reshape(-1), want)


def test_a_log_padded_by_values_is_refused(tmp_path):
  values = values_of(SMALL)
  values[A_LOG] = np.ones(8, np.float32)
  with pytest.raises(huggingface.Refusal, match="8 values for 3 heads"):
    huggingface.read(save(tmp_path, SMALL, values))


def test_bfloat16_is_kept_in_its_bits_and_mlp_is_read(tmp_path):
  values = values_of(SMALL, ml_dtypes.bfloat16)
  hub = {name.replace(".mlp.", ".block_sparse_moe."): x
         for name, x in values.items()}
  assert hub.keys() != values.keys()
  released = huggingface.read(save(tmp_path / "a", SMALL, hub))
  assert {x.dtype for x in jax.tree.leaves(released.variables)} == {
      np.dtype(ml_dtypes.bfloat16)}
  huggingface.write(tmp_path / "b", model_of(SMALL), released.variables)
  for name, x in load_file(tmp_path / "b" / "model.safetensors").items():
    assert x.tobytes() == values[name].tobytes() and x.dtype == values[
        name].dtype
  with pytest.raises(huggingface.Refusal, match="give a new folder"):
    huggingface.write(tmp_path / "b", model_of(SMALL), released.variables)


def test_lists_all_that_does_not_fit_at_once(tmp_path):
  values = values_of(SMALL)
  name = "model.layers.0.self_attn.{}.weight".format
  del values[name("q_proj")]
  values[name("k_proj")] = np.zeros((2, 2), np.float32)
  values[name("v_proj")] = np.zeros((6, 4), np.int32)
  values[name("g_b_proj").replace("weight", "bias")] = np.zeros(6, np.float32)
  with pytest.raises(huggingface.Refusal) as refusal:
    huggingface.read(save(tmp_path, SMALL, values))
  for says in (r"q_proj.weight: missing, [6, 4]", "k_proj.weight: float32[2, "
               "2] in model-00001-of-00002.safetensors: has to be [6, 4]",
               "v_proj.weight: int32[6, 4]", "g_b_proj.bias: float32[6]"):
    assert says in str(refusal.value)


def change_index(folder, change):
  path = folder / huggingface.INDEX
  index = json.loads(path.read_text())
  change(index["weight_map"])
  path.write_text(json.dumps(index))


@pytest.mark.parametrize("file, says", [
    ("../x.safetensors", "no plain file name"),
    ("/etc/x.safetensors", "no plain file name"),
    ("a\\x.safetensors", "no plain file name"),
    (7, "no plain file name"),
    ("pytorch_model.bin", "'pytorch_model.bin' is a pickle"),
    ("absent.safetensors", "absent.safetensors: not in")])
def test_index_leads_only_to_safetensors_beside_it(folder, file, says):
  change_index(folder, lambda index: index.update({A_LOG: file}))
  with pytest.raises(huggingface.Refusal, match=says):
    huggingface.read(folder)


def test_index_and_shards_have_to_agree(folder):
  def change(index):
    index["ghost"] = index.pop(A_LOG)
  change_index(folder, change)
  with pytest.raises(huggingface.Refusal,
                     match="(?s)A_log: in model-0.*ghost: not in model-0"):
    huggingface.read(folder)


def test_pickles_alone_are_refused(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(SMALL))
  (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
  with pytest.raises(huggingface.Refusal, match="pytorch_model.bin is a pick"):
    huggingface.read(tmp_path)


def packed(header, data=b"", size=None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return (len(text) if size is None else size).to_bytes(8, "little") + (
      text + data)


def f32(*shape, at):
  return dict(dtype="F32", shape=shape, data_offsets=at)


@pytest.mark.parametrize("content, says", [
    (b"", "header length 0 of 0 bytes.*truncated"),
    (packed({}, size=99), "header length 99 of 10 bytes"),
    (b"PK\x03\x04" + bytes(90), "a pickle"),
    (packed(b"{"), "header: .*damaged"),
    (packed([]), "header is a list"),
    (packed(b'{"a": 1, "a": 2}'), '"a" occurs twice'),
    (packed({"a": 1}), '"a".*no dtype, shape and data_offsets'),
    (packed({"a": dict(f32(1, at=[0, 4]), dtype="F8")}), 'dtype "F8"'),
    (packed({"a": f32(-1, at=[0, 4])}), r"shape \[-1\].*from 0 on"),
    (packed({"a": f32(2, at=[0, 4])}, bytes(4)), r"F32\[2\] takes 8 bytes"),
    (packed({"a": f32(2, at=[0, 8])}, bytes(4)), "truncated"),
    (packed({"a": f32(1, at=[0, 4])}, bytes(9)), "damaged"),
    (packed({"a": f32(2, at=[0, 8]), "b": f32(1, at=[4, 8])}, bytes(8)),
     '"b".*byte 4, which overlaps "a" that ends at 8'),
    (packed({"a": f32(1, at=[0, 4]), "b": f32(1, at=[8, 12])}, bytes(12)),
     '"b".*byte 8, which leaves a hole after "a"')])
def test_headers_are_distrusted(tmp_path, content, says):
  file = tmp_path / "x.safetensors"
  file.write_bytes(content)
  with pytest.raises(huggingface.Refusal, match=f"(?s)x.safetensors.*{says}"):
    safetensors_file.entries(file)


MEMORY = """
import pathlib, sys
import jax
from ultralong_jax.interop import huggingface

def status(name):
  text = pathlib.Path("/proc/self/status").read_text()
  return int(text.split(name + ":")[1].split()[0]) * 1024

def read():
  return jax.block_until_ready(huggingface.read(sys.argv[1]).variables)

read()  # compiles, and is let go
before = status("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
arrays = sum(x.nbytes for x in jax.tree.leaves(read()))
print(arrays, status("VmHWM") - before - arrays)
"""


@pytest.mark.slow
def test_thirty_shards_need_less_than_one_beside_the_arrays(tmp_path):
  hub = LARGE | dict(
      num_hidden_layers=8, vocab_size=8192, hidden_size=256, num_experts=16,
      moe_intermediate_size=512, num_attention_heads=2, num_key_value_heads=2,
      intermediate_size=512, kv_lora_rank=64, dtype="float32",
      linear_attn_config=dict(
          full_attn_layers=[4, 8], kda_layers=[1, 2, 3, 5, 6, 7],
          head_dim=32, num_heads=2, short_conv_kernel_size=4))
  m = model_of(hub)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype),
                       huggingface._shapes(m))
  huggingface.write(tmp_path / "x", m, zeros, hub, shard_bytes=7_000_000)
  shards = [x.stat().st_size for x in (tmp_path / "x").glob("*.safetensors")]
  assert len(shards) >= 30
  done = subprocess.run(
      [sys.executable, "-c", MEMORY, str(tmp_path / "x")], text=True,
      capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(
          pathlib.Path(__file__).parents[3])})
  arrays, beside = map(int, done.stdout.split())
  assert arrays > 25 * max(shards) * 0.8
  assert beside < max(shards), (beside, max(shards))


TRANSFORMERS = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
expected = numpy.load(sys.argv[2])
with torch.no_grad():
  logits = model(torch.tensor(expected["input_ids"])).logits.numpy()
print(numpy.abs(logits - expected["logits"]).max())
"""


@pytest.mark.slow
@pytest.mark.skipif("TRANSFORMERS_PYTHON" not in os.environ,
                    reason="TRANSFORMERS_PYTHON names no Python that has it")
@pytest.mark.parametrize("name", ["kimi_linear_tiny",
                                  "kimi_linear_tiny_qlora"])
def test_transformers_loads_the_export(tmp_path, name):
  golden = pathlib.Path(__file__).parents[2] / "golden" / name
  released = huggingface.read(golden)
  huggingface.write(tmp_path / "x", hybrid.Hybrid(**released.model),
                    released.variables, released.hub, shard_bytes=100_000)
  done = subprocess.run(
      [os.environ["TRANSFORMERS_PYTHON"], "-c", TRANSFORMERS,
       str(tmp_path / "x"), str(golden / "expected.npz")],
      text=True, capture_output=True)
  assert done.returncode == 0, done.stderr
  assert float(done.stdout.split()[-1]) < 1e-4
