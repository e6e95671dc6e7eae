import types

import jax
import numpy as np
import pytest

from configs import common
from ultralong_jax.models import hybrid
from ultralong_jax.train import flops


def test_hand_counted_model():
  params = {"w_embed_WD": np.zeros((10, 4)), "w_unembed_DW": np.zeros((4, 10)),
            "experts": {"w_up_ERF": np.zeros((8, 4, 5)),
                        "threshold_E": np.zeros(8)}}
  assert flops.active(params, experts=8, experts_per_token=2) == 40 + 40 + 8
  tied = {"w_embed_WD": np.zeros((10, 4))}
  assert flops.active(tied, experts=8, experts_per_token=2) == 40
  model = types.SimpleNamespace(
      pattern="dm", layers=3, heads=2, key_width=4, value_width=5,
      latent_heads=3, latent_key_width=2, latent_shared_width=1,
      latent_value_width=2, latent_rank=6, latent_gate="output", mtp=False,
      experts=8, experts_per_token=2)
  matrices = 2 * 88
  delta = 2 * (6 * 2 * 4 * 5)  # layers d m d
  latent = 2 * 3 * 5 * 50
  assert flops.train_per_token(model, params, context=100) == 3 * (
      matrices + delta + latent)
  model.latent_gate = "latent"
  latent = 2 * 3 * (2 * 6 + 1) * 50
  assert flops.train_per_token(model, params, context=100) == 3 * (
      matrices + delta + latent)


def test_base_config_counts_about_six_operations_a_parameter():
  model = hybrid.Hybrid(**common.get_config().model)
  params = jax.eval_shape(model.init, jax.random.key(0),
                          np.zeros((1, 1), np.int32))["params"]
  active = flops.active(params, model.experts, model.experts_per_token)
  assert flops.train_per_token(model, params, 512) == pytest.approx(
      6 * active, rel=0.1)


def test_unknown_device_has_no_peak():
  assert flops.peak(jax.devices("cpu")[0]) is None
  assert flops.peak(types.SimpleNamespace(device_kind="NVIDIA H200")) == 989e12


def test_a_patch_meets_the_tower_and_its_share_of_the_projector():
  params = {"tower": {
      "w_patch_ID": np.zeros((7, 5)), "w_position_PD": np.zeros((9, 5)),
      "w_in_FF": np.zeros((20, 20)), "w_out_FD": np.zeros((20, 8)),
      "layers": {"w_up_DF": np.zeros((3, 5, 6))}}}
  assert flops.per_patch(params, merge=2) == 35 + (400 + 160) / 4 + 90
