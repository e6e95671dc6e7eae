"""Hybrid models with ultra-long context: train, resume, sample."""


def load(workdir):
  """Loads the newest checkpoint of a run, or one from the Hugging Face hub.

    m = ultralong_jax.load("runs/tiny")
    m.generate("def ", max_new_tokens=64)

  Reads `config.json` and arrays, never a Python file.

  Args:
    workdir: the run's folder, as given to --workdir; or a folder with a
      released Kimi Linear: config.json and *.safetensors.

  Returns:
    A frontdoor.Loaded: config, params, router, tokenizer, model, logits(),
    generate().
  """
  # Imported here, so that `import ultralong_jax` does not load JAX.
  from ultralong_jax import frontdoor
  return frontdoor.load(workdir)


__all__ = ["load"]
