"""Requests on the devices of their model: checks, and where their arrays lie."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stree_jax.decoding.rule_rows import map_rows
from stree_jax.decoding.types import Sampling
from stree_jax.mesh.hosts import is_same_everywhere
from stree_jax.mesh.partition import Partition


def place_request(request: Any, partition: Partition) -> Any:
    """Puts a request's arrays on the mesh, and pads the batch to a multiple of its shards.

    Padding repeats the last row; the caller marks these rows as done.

    Args:
        request: a `Plan`.
        partition: the model's partition.

    Raises:
        ValueError: processes have different requests.
    """
    if partition.processes > 1:
        _check_equal_requests(request)
    arrays, sampling = (request.context, request.keys, request.limits), request.sampling
    num_rows = len(request.context.length)
    if added := -num_rows % partition.rows:
        rows = jnp.minimum(jnp.arange(num_rows + added), num_rows - 1)
        arrays = jax.tree.map(lambda leaf: leaf[rows], arrays)
        sampling = map_rows(sampling, lambda leaf: leaf[rows])
    context, keys, limits = partition.put(arrays)
    sampling = place_sampling(partition, sampling, {})
    return request._replace(context=context, keys=keys, limits=limits, sampling=sampling)


def place_sampling(
    partition: Partition, sampling: Sampling, tables: dict[int, tuple[Any, Any]]
) -> Sampling:
    """The settings of rows, on the mesh.

    Args:
        partition: the model's partition.
        sampling: settings that every process has.
        tables: arrays that rules share and their copies on the mesh, by id; those of these
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


def _check_equal_requests(request: Any) -> None:
    """Raises if they differ: jax does not notice, and each process would run its own."""
    if not is_same_everywhere(digest_of(request)):
        raise ValueError(
            "the processes called generate with different prompts or settings; all of them must"
            " pass the same ones"
        )


def digest_of(request: Any) -> bytes:
    """A digest of a plan; equal plans give equal digests in every process."""
    static = request.decoder, type(request.drafter), jax.tree.structure(request.sampling)
    digest = hashlib.sha256(repr(static).encode())
    for leaf in jax.tree.leaves((request.context, request.limits, request.sampling)):
        digest.update(np.asarray(leaf).tobytes())
    digest.update(np.asarray(jax.random.key_data(request.keys)).tobytes())
    return digest.digest()
