"""Moving models to a mesh, from one mesh to another, and back."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.matmul import GROUP, QuantizedMatrix
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import Cut, Partition, Partitioned, partition_of
from stree_jax.mesh.programs import spec_of
from stree_jax.messages import shown
from stree_jax.names import flatten, unflatten

Model = TypeVar("Model", bound=Partitioned)


@jax.transfer_guard("allow")
def shard(model: Model, mesh: Mesh | None, *, replicate: bool = False) -> Model:
    """The model on the devices of a mesh, each with its shard of the weights.

    If it is on devices of several processes, all of them call this.

    Args:
        model: a model on one device or on another mesh. It is not changed.
        mesh: a mesh from `make_mesh`; None: the default device.
        replicate: give every device the whole model. Meant for draft models: sharded, they would
            wait for collectives longer than they compute.

    Raises:
        ValueError: the model's sizes do not fit the mesh; names what would.
    """
    if not isinstance(model, Partitioned):
        raise ValueError(
            f"model must be a HybridLM, got {shown(model)}; load one with from_pretrained"
        )
    partition = partition_of(mesh, replicate)
    structure, wanted = model.on(partition)
    table, targets = model.config.cuts(partition.shards), flatten(wanted)
    spread_out = {
        name: spread(name, read(), table, partition, targets[name].dtype)
        for name, read in canonical_weights(model).items()
    }
    return nnx.merge(structure, unflatten(spread_out, wanted))


def spread(
    name: str, values: Any, cuts: Mapping[str, Cut], partition: Partition, dtype: Any
) -> Any:
    """A weight on its devices, from all of it, an array or a `QuantizedMatrix`, on this host."""
    cut = cuts.get(name)
    if not isinstance(values, QuantizedMatrix):
        return _spread(values, cut, partition, dtype)

    def part(values: np.ndarray, cut: Cut | None) -> jax.Array:
        return _spread(values, cut, partition, values.dtype)

    try:
        return dataclasses.replace(_each(values, cut, partition.shards, part), dtype=dtype)
    except ValueError as error:
        raise ValueError(f'{name}: {error}; use fewer shards, or keep=["{name}"]') from None


def _spread(values: np.ndarray, cut: Cut | None, partition: Partition, dtype: Any) -> jax.Array:
    """An array on its devices."""
    if partition.mesh is None:
        return as_weight(values, dtype)
    if cut is None:
        return partition.put(np.asarray(values, dtype), PartitionSpec())
    columns = cut.columns(partition.shards)
    places = columns.shape[1]
    shape = list(values.shape)
    shape[cut.axis] = columns.size

    def part(index: Any) -> np.ndarray:
        held = columns[(index[cut.axis].start or 0) // places]
        return np.take(values, held, axis=cut.axis).astype(dtype)

    sharding = NamedSharding(partition.mesh, spec_of(cut))
    return jax.make_array_from_callback(tuple(shape), sharding, part)


def as_weight(values: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """A weight of this dtype on the default device.

    The only copy that is made: on a CPU it becomes the weight.
    """
    dtype = jnp.dtype(dtype)
    size = math.prod(values.shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64  # aligned, jax takes it over
    copy = memory[start : start + size].view(dtype).reshape(values.shape)
    copy[...] = values
    return jax.device_put(copy)  # unlike asarray, takes over the memory


def canonical_weights(model: Partitioned) -> dict[str, Callable[[], np.ndarray]]:
    """By name, a function that copies the weight to the host, whole and in canonical order.

    If shards are on devices of other processes, all processes call these in the same order.
    """
    table, shards = model.cuts(), model.partition.shards

    def whole(weight: jax.Array, cut: Cut | None) -> np.ndarray:
        values = on_host(weight)
        return values if cut is None else np.take(values, cut.canonical(shards), axis=cut.axis)

    weights = flatten(nnx.to_pure_dict(nnx.state(model.in_first())))
    return {
        name: functools.partial(_each, weight, table.get(name), shards, whole)
        for name, weight in weights.items()
    }


def _each(
    matrix: Any, cut: Cut | None, shards: int, function: Callable[[Any, Cut | None], Any]
) -> Any:
    """A weight with a function of an array and its cut applied to it, or to its two arrays."""
    if not isinstance(matrix, QuantizedMatrix):
        return function(matrix, cut)
    is_of_inputs = cut is not None and cut.axis == matrix.axis % len(matrix.shape)
    of_scales = cut.of_groups(GROUP, shards) if cut is not None and is_of_inputs else cut
    values, scales = function(matrix.values, cut), function(matrix.scales, of_scales)
    return dataclasses.replace(matrix, values=values, scales=scales)
