"""What a step's statistics say, as metrics."""

from flax import traverse_util
import jax.numpy as jnp

from ultralong_jax.layers import prototypes


def of_statistics(statistics) -> dict:
  """Returns metrics, all float32, of the collection summed over a step.

  Of models with experts:
    load: [layers, E] share of an expert times E; 1 is balanced. Of what the
      router asked for, before capacity.
    load_max_over_mean: largest of `load`.
    dead_experts: experts of all layers that no token asked for.
    dropped: share of the pairs of token and expert that were over capacity,
      where there is one.
    activation_spread: where it is counted, how experts differ in the root
      mean square of their hidden activations: deviation over mean across the
      experts of a layer that had tokens, mean over layers.
  With delta layers:
    decay_mean, decay_min, decay_max: over their channels, of each one's mean
      log decay.
  """
  leaves = traverse_util.flatten_dict(statistics)
  load_LE, square_LE = (_layers(leaves, name)
                        for name in ("load_E", "square_sum_E"))
  dropped = [jnp.sum(x) for path, x in leaves.items() if path[-1] == "dropped"]
  metrics = {}
  if load_LE is not None:
    mean_L = jnp.maximum(jnp.mean(load_LE, axis=1), 1e-6)
    metrics["load"] = load_LE / mean_L[:, None]
    metrics["load_max_over_mean"] = jnp.max(metrics["load"])
    metrics["dead_experts"] = jnp.sum(load_LE == 0, dtype=jnp.float32)
  if dropped:
    metrics["dropped"] = sum(dropped) / jnp.maximum(jnp.sum(load_LE), 1.)
  if square_LE is not None:
    metrics["activation_spread"] = _spread(square_LE, load_LE)
  # Sums over tokens, with or without leading axes of stacked layers.
  decays = [x / jnp.maximum(leaves[(*path[:-1], "sampled")], 1)[
      ..., None, None] for path, x in leaves.items()
            if path[-1] == "decay_sum_HK"]
  if decays:
    channels = jnp.concatenate([x.reshape(-1) for x in decays])
    metrics["decay_mean"] = jnp.mean(channels)
    metrics["decay_min"] = jnp.min(channels)
    metrics["decay_max"] = jnp.max(channels)
  return metrics


def of_prototypes(params, router) -> dict:
  """Returns prototype_drift, see `prototypes.drift`, of such routers."""
  drift = prototypes.drift(params, router)
  return {} if drift is None else {"prototype_drift": drift}


def _layers(leaves, name):
  """Leaves of that name as one float32 array [L, E]; None if there is none."""
  found = [x.reshape(-1, x.shape[-1])
           for path, x in leaves.items() if path[-1] == name]
  return jnp.concatenate(found).astype(jnp.float32) if found else None


def _spread(square_LE, load_LE):
  used_LE = load_LE > 0
  rms_LE = jnp.sqrt(square_LE / jnp.maximum(load_LE, 1.))
  count_L = jnp.maximum(jnp.sum(used_LE, axis=1), 1)
  mean_L = jnp.sum(rms_LE, axis=1) / count_L
  off_LE = jnp.where(used_LE, rms_LE - mean_L[:, None], 0.)
  deviation_L = jnp.sqrt(jnp.sum(off_LE ** 2, axis=1) / count_L)
  return jnp.mean(deviation_L / jnp.maximum(mean_L, 1e-20))
