"""Rows of a batch on a mesh: moved between its shards, copied, and placed beside others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from stree_jax.array_types import Array
from stree_jax.mesh.partition import DATA, MODEL, ONE_DEVICE, ROWS, Partition
from stree_jax.mesh.programs import in_every_shard, over_mesh


def placed_like(array: Any, rows: Any) -> Any:
    """Arrays with the batch axis first, placed as that of `array` is; as they are on one device."""
    partition = _partition_of(array)
    if partition.mesh is None:
        return rows
    spec = partition.spec_of(len(array))
    return jax.device_put(partition.put(rows, spec), NamedSharding(partition.mesh, spec))


def row_of(arrays: Any, row: int) -> Any:
    """One row of all arrays, as a batch of one in every shard; one program for all rows."""
    leaves, structure = jax.tree.flatten(arrays)
    partition = _partition_of(leaves[0])
    if partition.mesh is None or partition.spec_of(len(leaves[0])) != ROWS:
        return _row(arrays, row)
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    return jax.tree.unflatten(structure, _row_of_shards(leaves, row, partition, specs))


def _partition_of(array: Any) -> Partition:
    """The mesh of `make_mesh` that an array lies on, `ONE_DEVICE` if on none or on another one."""
    place = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(place, NamedSharding) or {*place.mesh.axis_names} != {DATA, MODEL}:
        return ONE_DEVICE
    mesh: Any = place.mesh
    return Partition(mesh)


@jax.jit
def _row(arrays: Any, row: int | Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, row, 1), arrays)


@functools.partial(jax.jit, static_argnames=("partition", "specs"))
def _row_of_shards(leaves: list[Array], row: int | Array, partition: Partition, specs: Any) -> Any:
    def sent(leaves: list[Array], row: Array) -> list[Array]:
        num_local = len(leaves[0])
        place = row - lax.axis_index(DATA) * num_local
        is_local = (place >= 0) & (place < num_local)
        rows = (_row(leaf, jnp.where(is_local, place, 0)) for leaf in leaves)
        # Of the shard that has it; a sum of flags is of integers.
        return [lax.psum(jnp.where(is_local, it, 0), DATA).astype(it.dtype) for it in rows]

    into = ([*specs], PartitionSpec())
    return over_mesh(partition, sent, (), (leaves, row), into, in_every_shard([*specs]))


@functools.partial(jax.jit, static_argnames=("num_rows", "partition", "specs"))
def copies_of(row: Any, num_rows: int, partition: Partition, specs: Any) -> Any:
    """As many rows with these specs, all like the only row of the arrays."""

    def copied(row: Any) -> Any:
        times = num_rows // partition.rows
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), row)

    return over_mesh(partition, copied, (), (row,), (in_every_shard(specs),), specs)
