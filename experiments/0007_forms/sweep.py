"""Trains a variant with several seeds, on text first, then on code.

python -m experiments.0007_forms.sweep "sign bias" --steps 320 --out rows.jsonl

The seeds run side by side under vmap on the same batches; meant for a GPU. Half
of the steps read prose (the descriptions of installed packages), the other half
the standard library's code, which is what validation reads.
"""
import argparse
import pathlib
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import held_out, report
from ultralong_jax import optim
from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer as tokenizer_lib
from ultralong_jax.layers import experts
from ultralong_jax.models import depth_plan, hybrid
from ultralong_jax.train import state as state_lib
from ultralong_jax.train import step as step_lib

from . import variants

CHUNK = 20  # steps a call; curves have a point for each step


def with_depth_norms(optimizer, model):
  """Keeps each layer's gradient norm at the head of the optimizer's state."""
  paths = depth_plan.layer_paths(model.plan())

  def norms(grads):
    out = []
    for path, index in paths:
      node = grads["stack"]
      for name in path:
        node = node[name]
      squares = [jnp.sum(x[index] ** 2) for x in jax.tree.leaves(node)]
      out.append(jnp.sqrt(sum(squares)))
    return jnp.stack(out)

  def init(params):
    return (jnp.zeros(len(paths)), *optimizer.init(params))

  def update(grads, state, params=None):
    updates, after = optimizer.update(grads, state[1:], params)
    return updates, (norms(grads), *after)

  return optax.GradientTransformation(init, update)


def prose():
  """A glob of the installed packages' descriptions."""
  return str(pathlib.Path(sysconfig.get_paths()["purelib"])
             / "*.dist-info" / "METADATA")


def train(c, seeds, steps):
  """Yields (step, curves of the chunk, state, nats_of) as it goes."""
  tokenizer = tokenizer_lib.load("byte")

  def batches(path):
    with c.unlocked():
      c.data.path = path
    data = loader.open_data(c.data, tokenizer, context=c.context,
                            batch=c.batch, seed=0)
    return data.batches(process_index=0, process_count=1)

  sources = batches(prose()), batches("")
  model = hybrid.Hybrid(**c.model)
  shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0),
                          np.zeros((1, 1), np.int32))
  optimizer = with_depth_norms(
      optim.make(c.optim, shapes["params"], steps), model)
  step = step_lib.make_train_step(model, optimizer, 1, c.balance)

  def init(seed):
    rng = jax.random.PRNGKey(seed)
    variables = model.init(rng, np.zeros((1, 1), np.int32))
    return state_lib.create(variables, optimizer, rng)

  @jax.jit
  def advance(states, many):
    def body(states, batch):
      states, metrics = jax.vmap(step, (0, None))(states, batch)
      kept = {name: x for name, x in metrics.items() if x.ndim < 3}
      kept["layer_grad_norm"] = states.opt_state[0]
      if "load" in metrics:  # [layers, experts] of the first seed
        kept["load_of_first"] = metrics["load"][0].astype(jnp.float16)
      return states, kept
    return jax.lax.scan(body, states, many)

  states = jax.jit(jax.vmap(init))(jnp.arange(seeds))
  for done in range(0, steps, CHUNK):
    source = sources[2 * done >= steps]
    chunk = [next(source) for _ in range(CHUNK)]
    states, curves = advance(
        states, jax.tree.map(lambda *x: np.stack(x), *chunk))
    yield done + CHUNK, jax.device_get(curves), states, model


def validate(c, states, model):
  """Returns bits per byte of each seed on the held-out code."""
  tokenizer = tokenizer_lib.load("byte")
  held = loader.open_data(c.data, tokenizer, context=c.context, batch=16,
                          seed=0, split="validation")
  return held_out.evaluator(model)(
      states, held.batches(process_index=0, process_count=1))


def recovery(load_S):
  """Steps after the shift until ten in a row are as even as before it.

  As even: their mean is at most 1.1 times that of the 20 steps before. None
  if that never comes.
  """
  half = len(load_S) // 2
  before = load_S[half - 20:half].mean()
  for start in range(half, len(load_S) - 9):
    if load_S[start:start + 10].mean() <= 1.1 * before:
      return start - half
  return None


def spikes(loss_S):
  """Steps whose loss is 4 deviations over the median of the 30 before."""
  count = 0
  for i in range(30, len(loss_S)):
    before = loss_S[i - 30:i]
    count += loss_S[i] > np.median(before) + 4 * before.std()
  return int(count)


def figures(curves, seed):
  """Returns the numbers of one seed's curves, [steps, seeds, ...] each."""
  own = {name: x[:, seed] for name, x in curves.items()
         if name != "load_of_first"}
  last, layers = slice(-20, None), own["layer_grad_norm"][-20:].mean(0)
  load_S = own["load_max_over_mean"]
  half = len(load_S) // 2
  out = {"loss_of_last_40": own["loss"][-40:].mean(),
         "max_over_mean_load": load_S[last].mean(),
         "same_in_first_40": load_S[:40].mean(),
         "worst_after_shift": load_S[half:half + 20].max(),
         "dead_experts": own["dead_experts"][last].mean(),
         "activation_spread": own["activation_spread"][last].mean(),
         "first_over_last_layer_grad": layers[0] / layers[-1],
         "spikes": spikes(own["loss"])}
  steps = recovery(load_S)
  if steps is not None:
    out["steps_to_recover"] = steps
  return {name: round(float(x), 4) for name, x in out.items()}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("variant", choices=sorted(variants.VARIANTS))
  parser.add_argument("--steps", type=int, default=320)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--curves", default="", help="folder for curves as npz")
  report.add_flags(parser)
  args = parser.parse_args()
  experts.resolve = lambda _: "blocks"  # a batch of ragged matmuls is slow
  c = variants.configure(args.variant)
  began, parts = time.monotonic(), []
  for done, curves, states, model in train(c, args.seeds, args.steps):
    parts.append(curves)
    print(args.variant, done, f"{time.monotonic() - began:.0f}s",
          curves["loss"][-1], curves["load_max_over_mean"][-1], flush=True)
  curves = {name: np.concatenate([part[name] for part in parts])
            for name in parts[0]}
  if args.curves:
    name = args.variant.replace(" ", "_")
    np.savez_compressed(f"{args.curves}/{name}.npz", **curves)
  bits = validate(c, states, model)
  for seed in range(args.seeds):
    report.append(args, args.variant, {
        "validation_bits_per_byte": round(float(bits[seed]), 4),
        **figures(curves, seed)}, variants.VARIANTS[args.variant], seed)


if __name__ == "__main__":
  main()
