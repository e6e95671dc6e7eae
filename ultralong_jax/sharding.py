"""How arrays lie over devices: rows of a batch are split, the rest is whole."""
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh() -> Mesh:
  """Returns a mesh of all devices of all processes along one axis."""
  # Auto: the compiler carries shardings through the model.
  return jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))


def whole(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of what every device holds: params, router, rng."""
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """Returns the sharding of batches: the axis of rows is split."""
  return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def put(batch: dict, mesh: Mesh) -> dict:
  """Lays out the rows that this process read as its part of the batch."""
  return {name: jax.make_array_from_process_local_data(rows(mesh), x)
          for name, x in batch.items()}


def with_sharding(shapes, sharding: NamedSharding):
  """Returns ShapeDtypeStructs that say where they are to be put."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding), shapes)
