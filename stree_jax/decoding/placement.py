"""Requests on a mesh: where their arrays lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from stree_jax.decoding.plan import Plan
from stree_jax.decoding.rule_rows import map_rows
from stree_jax.decoding.types import Sampling
from stree_jax.mesh.partition import Partition


def place_request(request: Plan, partition: Partition) -> Plan:
    """Puts a request's arrays on the mesh, and pads the batch to a multiple of its shards.

    Padding repeats the last row; the caller marks these rows as done.
    """
    arrays, sampling = (request.context, request.keys, request.limits), request.sampling
    num_rows = len(request.context.length)
    if added := -num_rows % partition.rows:
        rows = jnp.minimum(jnp.arange(num_rows + added, dtype=jnp.int32), num_rows - 1)
        arrays = jax.tree.map(lambda leaf: leaf[rows], arrays)
        sampling = map_rows(sampling, lambda leaf: leaf[rows])
    context, keys, limits = partition.put(arrays)
    sampling = place_sampling(partition, sampling, {})
    return request._replace(context=context, keys=keys, limits=limits, sampling=sampling)


def place_sampling(
    partition: Partition, sampling: Sampling, tables: dict[int, tuple[Any, Any]]
) -> Sampling:
    """The settings of rows, on the mesh.

    `tables` has arrays that rules share and their copies on the mesh, by id; those of these
    settings replace what was there.
    """
    used: dict[int, tuple[Any, Any]] = {}

    def put(leaf: Any) -> Any:
        known = tables.get(id(leaf)) or (leaf, partition.put(leaf, PartitionSpec()))
        return used.setdefault(id(leaf), known)[1]

    placed = map_rows(sampling, partition.put, put)
    tables.clear()
    tables.update(used)
    return placed
