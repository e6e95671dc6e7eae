"""What an import costs: the base install is enough, and it stays light."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Other frameworks, and packages that only an extra brings.
HEAVY = {"jax_triton", "libtpu", "matplotlib", "tensorflow", "tokamax",
         "tokenizers", "torch", "triton", "xprof"}
# What Triton's decorator has to run for.
TRITON_BODIES = {"triton_gradient", "triton_intra", "triton_pass",
                 "triton_step", "triton_tile"}


def loaded(code):
  """Returns the top-level modules that a fresh Python has after `code`."""
  code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True,
                        capture_output=True, text=True)
  names = json.loads(done.stdout.splitlines()[-1])
  return {name.partition(".")[0] for name in names}


def modules(package):
  """Yields the dotted names of a package's files."""
  for path in sorted((ROOT / package).rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_front_door_waits_with_jax():
  assert not loaded("import ultralong_jax") & (HEAVY | {"jax", "flax"})


@pytest.mark.parametrize("package", ["ultralong_jax", "pallas_kernels"])
def test_every_module_imports_without_extras(package):
  # Device modules too: what they need is imported inside the launch. Bodies
  # for Triton are what is imported there, as its decorator has to run.
  names = [name for name in modules(package)
           if name.rpartition(".")[2] not in TRITON_BODIES]
  assert not loaded("\n".join(f"import {name}" for name in names)) & HEAVY


def test_finds_a_heavy_import():
  assert loaded("import matplotlib") & HEAVY
