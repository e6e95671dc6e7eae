import importlib
import pathlib

import pytest

from configs import common
from ultralong_jax.train import check
from ultralong_jax.train import workdir

FILES = sorted(path.stem for path in pathlib.Path(
    common.__file__).parent.glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", FILES)
def test_files_add_no_leaf_and_pass_the_checks(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  leaves = [x for x in workdir.leaves(config) if not x.startswith("stages.")]
  assert leaves == list(workdir.leaves(common.get_config()))
  check.check(config)


def test_base_passes_its_own_checks():
  check.check(common.get_config())


def test_every_leaf_can_be_set_from_the_command_line():
  values = workdir.leaves(common.get_config()).values()
  assert all(type(x) in (bool, int, float, str, tuple)
             for x in values)


def test_argument_is_typed_by_its_default():
  arg = common.parse_arg("context=2048,smoke,lr=1e-3,name=x", context=512,
                         smoke=False, lr=0.1, name="", other=1)
  assert vars(arg) == {"context": 2048, "smoke": True, "lr": 1e-3,
                       "name": "x", "other": 1}
  assert type(arg.context) is int
  assert common.parse_arg("smoke=false", smoke=True).smoke is False
  assert common.parse_arg(None, context=512).context == 512


@pytest.mark.parametrize("text, says", [
    ("contxt=64", 'did you mean "context"'),
    ("zzz", "known: context, smoke"),
    ("context=many", "context is int"),
    ("context", "context is int"),
    ("smoke=maybe", "true or false"),
])
def test_wrong_argument_is_refused(text, says):
  with pytest.raises(ValueError, match=says):
    common.parse_arg(text, context=512, smoke=False)
