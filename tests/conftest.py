"""What every test runs under: CPU, fixed seeds, no silent broadcasting."""

import os
import random
import re

import jax
import numpy as np
import pytest


def pytest_configure(config):
  # `-m gpu` asks for the accelerator, everything else for the CPU. The
  # variable too, since tests start processes of their own.
  if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr or ""):
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    # Most of a test's time is XLA compiling it: level 0 compiles four times
    # as fast and runs three times as slowly, which small shapes do not feel.
    os.environ["XLA_FLAGS"] = os.environ.get(
        "XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
  jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def fixed_seeds():
  random.seed(0)
  np.random.seed(0)


@pytest.fixture(autouse=True)
def accelerator_or_skip(request):
  if request.node.get_closest_marker("gpu"):
    if jax.default_backend() == "cpu":
      pytest.skip("jax sees no accelerator")
