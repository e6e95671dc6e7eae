"""Who injects, reads, leads and follows; and that scans hold equals only."""
import pytest

from ultralong_jax.models import depth_plan

PATTERN = "dmfdd"


def flat(**changes):
  fields = dict(pattern=PATTERN, layers=23, dense_layers=1, block_layers=4,
                injection=(0, 0), share=()) | changes
  plan = depth_plan.plan(**fields)
  return plan, list(depth_plan.all_layers(plan))


@pytest.mark.parametrize("block_layers", [1, 4, 5, 23])
@pytest.mark.parametrize("stride, span", [(1, 1), (3, 1), (3, 3), (5, 4),
                                          (30, 30)])
def test_a_source_reaches_the_next_layers_only(stride, span, block_layers):
  plan, layers = flat(injection=(stride, span), block_layers=block_layers)
  assert len(set(depth_plan.layer_paths(plan))) == len(layers) == 23
  for i, layer in enumerate(layers):
    assert layer.injects == (i % stride == 0 and i < 22)
    sources = [s for s in range(0, i, stride) if i - s <= span]
    assert layer.reads == bool(sources) and len(sources) <= 1


@pytest.mark.parametrize("block_layers", [1, 2, 7, 23])
@pytest.mark.parametrize("name, kinds", [("latent", "mf"), ("gates", "df")])
def test_the_first_of_a_block_leads_the_others(name, kinds, block_layers):
  _, layers = flat(share=(name,), block_layers=block_layers)
  for start in range(0, 23, block_layers):
    block = layers[start:start + block_layers]
    first, *others = [x for x in block if x.kind in kinds] or [None]
    assert first is None or (not first.follows
                             and first.leads == (name,) * bool(others))
    for layer in others:
      assert layer.follows == (name,) and not layer.leads
    assert not any(x.leads or x.follows for x in block if x.kind not in kinds)


def test_a_group_that_repeats_leads_nobody():
  """Its members would all lead, and nothing would carry what they give."""
  for pattern in ("d", "m", "f", "dm", "dddm", "mf"):
    plan, _ = flat(pattern=pattern, layers=24, block_layers=12,
                   share=("gates", "latent"), injection=(4, 2))
    groups = [(group, repeats) for _, block, _ in plan
              for _, group, repeats in block]
    assert any(repeats > 1 for _, repeats in groups)
    assert not any(x.leads for group, repeats in groups if repeats > 1
                   for x in group)


@pytest.mark.parametrize("stride, span", [(2, 1), (4, 3), (12, 11)])
def test_a_stride_that_divides_the_blocks_keeps_their_scan(stride, span):
  plan = depth_plan.plan("dddm", 93, 1, 12, (stride, span), ("latent",))
  assert [repeats for _, _, repeats in plan] == [1, 6, 1]


def test_roles_and_letters_repeat_together():
  """Plain residuals: one block, whose scan is as long as both periods."""
  plan = depth_plan.plan("dm", 48, 0, 48, (3, 1))
  (_, ((_, group, repeats),), _), = plan
  assert (len(group), repeats) == (6, 8)
