import pytest

from configs import common
from ultralong_jax.data import synthetic
from ultralong_jax.train import check


def config(**leaves):
  c = common.get_config()
  c.update_from_flattened_dict(leaves)
  return c


@pytest.mark.parametrize("leaves, says", [
    ({"model.pattern": "ddx"}, r"pattern=\"ddx\".*\['x'\] are not"),
    ({"model.pattern": ""}, "model.pattern"),
    ({"model.pattern": "ddf", "model.latent_heads": 8},
     "heads=4 and model.latent_heads=8 differ.*set model.latent_heads=4"),
    ({"model.pattern": "f", "model.value_width": 64},
     "value_width=64 and .*set model.latent_value_width=64"),
    ({"model.latent_gate": "key"}, "choose from output, latent, none"),
    ({"model.position": "sine"}, "choose from none, rope"),
    ({"model.rope_base": 1.0}, "rope_base=1.0: has to be above 1"),
    ({"model.rope_factor": 0.5}, "rope_factor=0.5: has to be 1 or more"),
    ({"model.rope_factor": 2.0}, "rope_factor=2.0 is not read .*linear or"),
    ({"model.rope_scaling": "yarn"}, "yarn.* scales nothing .*position=rope"),
    ({"model.position": "rope", "model.latent_shared_width": 5},
     "latent_shared_width=5: .*turns pairs of these channels; set 6"),
    ({"model.position": "rope", "model.pattern": "d"}, "no layer of .*has a"),
    ({"model.fusion": "both"}, "choose from layer, head, token"),
    ({"model.pattern": "dddmd"}, "longer than model.layers=4"),
    ({"model.width": 250}, "width=250.*heads=4; set model.width=252"),
    ({"model.latent_heads": 3}, "latent_heads=3; set model.width=258"),
    ({"model.floor": -9.0}, "model.floor: .*float32"),
    ({"model.floor": 0.0}, "model.floor: "),
    ({"model.vocab": 256}, "below the tokenizer's 272 ids"),
    ({"model.experts_per_token": 8}, "below model.experts=8"),
    ({"model.experts_per_token": 0}, "experts_per_token=0"),
    ({"model.experts": 1}, "model.experts=1"),
    ({"model.expert_groups": 3}, "expert_groups=3; set model.experts=9"),
    ({"model.expert_groups": 4}, "expert_groups_per_token=1 of .*groups=4"),
    ({"model.expert_groups_per_token": 2}, "token=2 of .*groups=1.*most all"),
    ({"model.gate_rank": -1}, "gate_rank=-1: has to be 0 or more"),
    ({"model.dense_layers": 5}, "dense_layers=5 exceeds"),
    ({"model.glu": "relu"}, 'glu="relu": choose from situ, swiglu'),
    ({"model.dtype": "float16"}, 'dtype="float16": choose'),
    ({"model.remat": "full"}, "model.remat"),
    ({"model.depth": "dense"}, "model.depth"),
    ({"model.injection_stride": -1}, "injection_stride=-1: has to be 0 or"),
    ({"model.injection_stride": 2, "model.injection_span": 3},
     "injection_span=3: has to be from 1 to model.injection_stride=2"),
    ({"model.injection_stride": 2, "model.injection_span": 0}, "span=0: has"),
    ({"model.injection_stride": 1, "model.layers": 1, "model.pattern": "d"},
     "there is no later layer"),
    ({"model.share": "gate"}, 'share="gate": choose from none, latent, gates'),
    ({"model.share": "latent"}, "has two latent .*raise model.block_layers"),
    ({"model.share": "latent+gates", "model.pattern": "m"},
     'has two delta .*leave out "gates"'),
    ({"model.heads": 0}, "model.heads=0: has to be at least 1"),
    ({"model.query_rank": -1}, "query_rank=-1: has to be 0 or more"),
    ({"model.balance": "loss"}, 'model.balance="loss": choose from quantile'),
    ({"balance.load_low": 0.95}, "load_low=0.95 exceeds .*high=0.9; swap"),
    ({"balance.load_high": 1.5}, "load_high=1.5: has to be from 0 to 1"),
    ({"balance.load_steps": 0}, "load_steps=0: has to be at least 1"),
    ({"model.router": "latent"}, 'router="latent": choose from hidden, proto'),
    ({"model.router_similarity": "dot"}, 'similarity="dot": choose from cos'),
    ({"model.router_noise": -1.0}, "router_noise=-1.0: has to be 0 or more"),
    ({"model.capacity_factor": -1.0}, "factor=-1.0: has to be 0 or more"),
    ({"context": 500}, "context=500.*64 tokens; set context=512"),
    ({"data.validation_context": 100}, "set data.validation_context=128"),
    ({"data.validation_bytes": 64}, "fill no row"),
    ({"data.validation_fraction": 1.0}, "between 0 and 1"),
    ({"batch": 6}, "batch=6 rows do not split over 4 devices; set batch=8"),
    ({"accumulate": 3}, "batch=8 rows do not split over 3 accumulate"),
    ({"accumulate": 4}, "leaves 2 rows for 4 devices; set batch=16"),
    ({"steps": 0}, "steps=0: has to be at least 1"),
    ({"optim.name": "sgd"}, "optim.name"),
    ({"optim.muon": "heads"}, "choose from per_head, full_matrix"),
    ({"optim.schedule": "linear"}, 'schedule="linear": choose from cosine'),
    ({"optim.schedule": "wsd"}, "decay_steps=0.*try 200"),
    ({"optim.schedule": "wsd", "optim.decay_steps": 990}, "exceed steps=1000"),
    ({"optim.warmup_steps": 1000}, "leaves none of steps=1000"),
    ({"optim.lr": 0.0}, "optim.lr=0.0: has to be above 0"),
    ({"optim.b2": 1.0}, "optim.b2=1.0"),
    ({"optim.final_fraction": 2.0}, "from 0 to 1"),
])
def test_error_names_field_value_and_fix(leaves, says):
  with pytest.raises(check.Refusal, match=says):
    check.check(config(**{"batch": 8, **leaves}), vocab=272, devices=4,
                processes=2)


READS = {"model.vision": "tower", "data.source": "digits", "context": 1024,
         "data.patches": 1024, "data.validation_context": 1024}


@pytest.mark.parametrize("leaves, says", [
    ({"model.vision": "none"}, "does not read; set model.vision=tower"),
    ({"model.vision": "vit"}, 'vision="vit": choose from none, tower, direct'),
    ({"data.source": "web"}, 'source="web": choose from text, interleaved'),
    ({"model.vision_channels": 4}, r"channels=4: has to be 1 .* or 3"),
    ({"model.vision_key_width": 6}, "key_width=6 is not a multiple of 4"),
    ({"data.decoded_pixels": 10**9}, "above Pillow's own limit; set at most"),
    ({"data.image_pixels": 63}, "less than one token of 8 x 8"),
    ({"data.patches": 1023}, "multiple of 4.*set at least 1024"),
    ({"data.patches": 512}, "patches=512.*set at least 1024"),
    ({"context": 128}, "context=128 holds no image.* takes 256 tokens"),
])
def test_error_says_what_images_need(leaves, says):
  check.check(config(**READS))
  with pytest.raises(check.Refusal, match=says):
    check.check(config(**{**READS, **leaves}))


@pytest.mark.parametrize("leaves, says", [
    ({"data.synthetic.distance_low": 127},
     "distance_low=127 may not hold .*statements=4; set at least 128"),
    ({"data.synthetic.distance_high": 100}, "high=100 is below .*low=128; sw"),
    ({"data.synthetic.distance_high": 400},
     "^.*\n  context=512 cuts documents .* 594 tokens; set context=640 or"),
    ({"data.validation_context": 128}, "set data.validation_context=512"),
    ({"data.synthetic.statements": 0}, "statements=0: has to be at least 1"),
    ({"data.synthetic.documents": 0}, "documents=0: has to be at least 1"),
    ({"data.synthetic.shares.pairs": -1.0}, "shares.pairs=-1.0: has to be 0"),
    ({"data.synthetic.weights.text": -1.0}, "weights.text=-1.0: has to be 0"),
    ({f"data.synthetic.shares.{task}": 0.0 for task in synthetic.TASKS},
     "data.synthetic.shares are all 0; raise one"),
    ({"evaluate.recall_lengths": (512, 321)}, "321 tokens .* at least 322"),
    ({"evaluate.recall_depths": (0.0, 1.5)}, "1.5 is no depth; set it from 0"),
    ({"evaluate.recall_lengths": (512,), "evaluate.recall_depths": ()},
     "measures nothing"),
    ({"evaluate.recall_samples": 0}, "recall_samples=0: has to be at least"),
])
def test_error_says_what_generated_tasks_need(leaves, says):
  check.check(config(**{"data.source": "synthetic"}))
  with pytest.raises(check.Refusal, match=says):
    check.check(config(**{"data.source": "synthetic", **leaves}))


def test_unbounded_decay_and_grouped_experts_pass():
  c = config(**{"model.expert_groups": 4, "model.expert_groups_per_token": 2})
  c.model.floor = None
  check.check(c)


def test_all_errors_are_said_at_once():
  with pytest.raises(check.Refusal) as refusal:
    check.check(config(**{"context": 3, "model.width": 130, "steps": 10}))
  for name in ("context=3", "model.width=130", "optim.warmup_steps=20"):
    assert name in str(refusal.value)


def test_dense_model_needs_no_experts():
  check.check(config(**{"model.dense_layers": 4, "model.experts": 0,
                        "model.experts_per_token": 0}))
