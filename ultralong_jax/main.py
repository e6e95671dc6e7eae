"""Command line: flags -> config -> train, evaluate, generate, and so on."""
import pathlib
import shlex
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

import ultralong_jax
from ultralong_jax.interop import huggingface
from ultralong_jax.train import check
from ultralong_jax.train import checkpoint
from ultralong_jax.train import exchange
from ultralong_jax.train import listing
from ultralong_jax.train import loop
from ultralong_jax.train import signals
from ultralong_jax.train import validate
from ultralong_jax.train import workdir as workdir_lib

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file of configs/, such as configs/tiny.py:context=64; "
    "--config.any.leaf=value changes a leaf. A run that was started before "
    "has it in WORKDIR/config.json.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.",
                              required=True)
MODE = flags.DEFINE_enum(
    "mode", "train",
    ["train", "evaluate", "generate", "inspect", "import_hf", "export_hf"],
    "What to do. inspect lists the run's checkpoints and exits with 1 if the "
    "newest does not verify. import_hf makes the run --workdir of the "
    "checkpoint --hf; export_hf writes the run's newest checkpoint to --hf.")
HF = flags.DEFINE_string(
    "hf", None, "Folder with a Kimi Linear checkpoint in the Hugging Face "
    "hub's format: config.json and *.safetensors.")
HF_DTYPE = flags.DEFINE_enum(
    "hf_dtype", "float32", ["float32", "bfloat16"],
    "Of the matrices that export_hf writes.")
IMAGE = flags.DEFINE_string(
    "image", None, "PNG or JPEG that generate shows before the prompt.")
PROMPT = flags.DEFINE_string("prompt", "def ", "Where generate starts.")
MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 200, "Tokens that generate adds.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0., "Of sampling; 0 takes the likeliest.", lower_bound=0.)
PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps", None, "FIRST:LAST, steps to trace into WORKDIR/profile.")
ALLOW_CONFIG_CHANGE = flags.DEFINE_bool(
    "allow_config_change", False,
    "Go on in a workdir although its config.json differs.")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"{' '.join(argv[1:])}: belongs to no flag")
  logging.set_verbosity(logging.ERROR)  # Orbax reports every save at length
  try:
    sys.exit({"train": train, "evaluate": evaluate, "generate": generate,
              "inspect": inspect, "import_hf": import_hf,
              "export_hf": export_hf}[MODE.value]())
  except (check.Refusal, huggingface.Refusal,
          checkpoint.NotSaved) as refusal:
    sys.exit(f"error: {refusal}")


def train() -> int:
  config = CONFIG.value
  if config is None:
    config = workdir_lib.read_config(WORKDIR.value)
  print(workdir_lib.summary(config), flush=True)
  with signals.listen() as stop:
    loop.train(config, WORKDIR.value, stop=stop, profile=profile_steps(),
               allow_config_change=ALLOW_CONFIG_CHANGE.value)
  if stop():
    print(f"saved; to go on:\n  {shlex.join(sys.orig_argv)}", flush=True)
    return stop.exit_code
  sample = [sys.orig_argv[0], "-m", "ultralong_jax.main", "--workdir",
            WORKDIR.value, "--mode", "generate", "--prompt", "def "]
  print(f"finished; to sample:\n  {shlex.join(sample)}", flush=True)
  return 0


def evaluate() -> int:
  with signals.listen() as stop:
    figures = validate.evaluate(saved_config(), WORKDIR.value, stop)
  for name, value in figures.items():
    form = {float: ".5g", int: ","}.get(type(value), "")
    print(f"{name} {value:{form}}")
  return stop.exit_code if stop() else 0


def generate() -> int:
  saved_config()
  image = [] if IMAGE.value is None else [pathlib.Path(IMAGE.value)]
  text = ultralong_jax.load(WORKDIR.value).generate(
      [*image, PROMPT.value], max_new_tokens=MAX_NEW_TOKENS.value,
      temperature=TEMPERATURE.value)
  print(PROMPT.value + text)
  return 0


def inspect() -> int:
  rows = listing.inspect(WORKDIR.value)
  print(listing.table(rows))
  return 0 if listing.newest_verifies(rows) else 1


def import_hf() -> int:
  if CONFIG.value is None or HF.value is None:
    raise check.Refusal(
        "import_hf needs --hf, the checkpoint's folder, and --config, such as "
        "configs/common.py, for all but the model")
  exchange.import_run(CONFIG.value, HF.value, WORKDIR.value,
                      ALLOW_CONFIG_CHANGE.value)
  print(f"imported {HF.value} as step 0 of {WORKDIR.value}")
  return 0


def export_hf() -> int:
  if HF.value is None:
    raise check.Refusal("export_hf needs --hf, the folder to write")
  saved_config()
  exchange.export_run(WORKDIR.value, HF.value, HF_DTYPE.value)
  print(f"exported {WORKDIR.value} to {HF.value}, without a tokenizer")
  return 0


def saved_config():
  """Returns the run's own config; a --config that contradicts is refused."""
  saved = workdir_lib.read_config(WORKDIR.value)
  if CONFIG.value is not None:
    lines = workdir_lib.differences(saved, CONFIG.value, ("model", "data"))
    if lines:
      raise check.Refusal(
          f"{WORKDIR.value} holds another model than --config:\n  "
          + "\n  ".join(lines) + "\nleave --config away to use what is there")
  return saved


def profile_steps() -> tuple[int, int] | None:
  """Returns (first, last) of --profile_steps."""
  if PROFILE_STEPS.value is None:
    return None
  try:
    first, last = map(int, PROFILE_STEPS.value.split(":"))
  except ValueError:
    first, last = 0, 0
  if not 1 <= first <= last:
    raise check.Refusal(f"--profile_steps={PROFILE_STEPS.value}: give FIRST:"
                        "LAST, such as 10:15, counted from 1")
  return first, last


def parse_flags(argv):
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError) as error:
    # ml_collections says which leaf was meant, in a stack of 30 lines.
    text = str(error.args[0]).replace("\\'", "'").replace("\n", ". ")
    sys.exit(f"error: unknown config leaf {text}")


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
