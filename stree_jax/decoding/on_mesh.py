"""Requests, rows and results of models on a mesh: checks, places of arrays, copies to the host."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from stree_jax.array_types import Array
from stree_jax.decoding.drafters.base import Drafter, draft_models
from stree_jax.decoding.rule_rows import map_rows
from stree_jax.decoding.types import DecodeState, Sampling, state_specs
from stree_jax.mesh.hosts import is_same_everywhere
from stree_jax.mesh.partition import DATA, ROWS, Partition, mesh_of
from stree_jax.mesh.programs import in_every_shard, over_mesh
from stree_jax.models.lm import HybridLM

Tree = TypeVar("Tree")


def check_mesh_of(model: HybridLM, drafter: Drafter | None) -> None:
    """Refuses a drafter whose models do not lie on the target's devices.

    Raises:
        ValueError: a draft model on other devices than the target, or a sharded draft model.
    """
    own = model.partition
    for draft in draft_models(drafter):
        if draft.partition is None and own is None:
            continue
        if own is None:
            raise ValueError(
                "the draft model is on a mesh and the target is not; st.shard(target, mesh) puts it"
                " there"
            )
        if draft.partition != Partition(own.mesh, 1):
            where = (
                "cut into parts"
                if draft.partition is not None and draft.partition.mesh == own.mesh
                else "not on the target's mesh"
            )
            raise ValueError(
                f"the draft model is {where}; on a mesh every device has all of it: load it with"
                " from_pretrained(..., mesh=mesh, replicate=True), or use"
                " st.shard(draft, mesh, replicate=True)"
            )


def on_mesh(request: Any, partition: Partition | None) -> Any:
    """Puts a request's arrays on the mesh, and pads the batch to a multiple of its shards.

    Padding repeats the last row; the caller marks these rows as done.

    Args:
        request: a `Plan`; returned unchanged without a mesh.
        partition: the model's partition.

    Raises:
        ValueError: processes have different requests.
    """
    if partition is None:
        return request
    if jax.process_count() > 1:
        _check_equal_requests(request)
    processors = request.sampling.processors
    sampling = dataclasses.replace(request.sampling, processors=())
    arrays = (request.context, request.keys, request.limits, sampling)
    num_rows = len(request.context.length)
    if added := -num_rows % partition.rows:
        rows = jnp.minimum(jnp.arange(num_rows + added), num_rows - 1)
        arrays = jax.tree.map(lambda leaf: leaf[rows], arrays)
        processors = map_rows(processors, lambda leaf: leaf[rows])
    context, keys, limits, sampling = arrays
    sampling = dataclasses.replace(sampling, processors=processors)
    context, keys, limits = partition.put((context, keys, limits))
    sampling = settings_on(partition, sampling, {})
    return request._replace(context=context, keys=keys, limits=limits, sampling=sampling)


def settings_on(
    partition: Partition, sampling: Sampling, tables: dict[int, tuple[Any, Any]]
) -> Sampling:
    """The settings of rows on a mesh.

    Args:
        partition: the model's partition.
        sampling: settings that every process has.
        tables: arrays that processors share and their copies on the mesh, by id; those of these
            settings replace what was there.
    """
    used: dict[int, tuple[Any, Any]] = {}

    def put(leaf: Any) -> Any:
        known = tables.get(id(leaf)) or (leaf, partition.put(leaf, PartitionSpec()))
        return used.setdefault(id(leaf), known)[1]

    processors = map_rows(sampling.processors, partition.put, put)
    tables.clear()
    tables.update(used)
    own = partition.put(dataclasses.replace(sampling, processors=()))
    return dataclasses.replace(own, processors=processors)


def placed(model: HybridLM, rows: Tree) -> Tree:
    """Arrays that every process has on the model's mesh, if it has one; others are kept.

    All have as many rows as the first, which every shard has if they are too few to be cut.
    """
    if model.partition is None:
        return rows
    num_rows = len(jax.tree.leaves(rows)[0])
    return model.partition.put(rows, model.partition.spec_of(num_rows))


def row_places(partition: Partition, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """For each shard of the batch, in one array: where these rows are in it.

    Rows of other shards get an index past its end. Worked example, 2 shards of 4 rows in all:

        rows 3, 0   ->   shard 0: 2, 0;  shard 1: 1, 2
    """
    own = num_rows // partition.rows
    first = own * np.arange(partition.rows)[:, None]
    places = np.asarray(rows) - first
    is_own = (places >= 0) & (places < own)
    return np.where(is_own, places, own).astype(np.int32).reshape(-1)


def row_of(arrays: Any, row: int) -> Any:
    """One row of all arrays, as a batch of one; one program for all rows.

    On a mesh its shard sends it to the others of the batch.
    """
    leaves, structure = jax.tree.flatten(arrays)
    mesh = mesh_of(leaves[0])
    partition = None if mesh is None else Partition(mesh, 1)
    if partition is None or partition.spec_of(len(leaves[0])) != ROWS:
        return _row(arrays, row)
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    return jax.tree.unflatten(structure, _row_of_shards(leaves, row, partition, specs))


@jax.jit
def _row(arrays: Any, row: int | Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, row, 1), arrays)


@functools.partial(jax.jit, static_argnames=("partition", "specs"))
def _row_of_shards(leaves: list[Array], row: int | Array, partition: Partition, specs: Any) -> Any:
    def sent(leaves: list[Array], row: Array) -> list[Array]:
        own = len(leaves[0])
        place = row - lax.axis_index(DATA) * own
        is_own = (place >= 0) & (place < own)
        return [_sent(_row(leaf, jnp.where(is_own, place, 0)), is_own) for leaf in leaves]

    into = ([*specs], PartitionSpec())
    return over_mesh(partition, sent, (), (leaves, row), into, in_every_shard([*specs]))


def _sent(row: Array, is_own: Array) -> Array:
    """The row of the shard that has it."""
    number = row.astype(jnp.int32) if row.dtype == bool else row
    return lax.psum(jnp.where(is_own, number, 0), DATA).astype(row.dtype)


@functools.partial(jax.jit, static_argnames="rows")
def spread_rows(model: HybridLM, state: DecodeState, rows: int) -> DecodeState:
    """A state of as many rows on the model's mesh, all like the only row of `state`."""
    assert model.partition is not None
    own = rows // model.partition.rows
    specs = state_specs(model)

    def copied(state: DecodeState) -> DecodeState:
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, own, axis=0), state)

    return over_mesh(model.partition, copied, (), (state,), (in_every_shard(specs),), specs)


def _check_equal_requests(request: Any) -> None:
    """Raises if they differ: jax does not notice, and each process would run its own."""
    if not is_same_everywhere(digest_of(request)):
        raise ValueError(
            "the processes called generate with different prompts or settings; all of them must"
            " pass the same ones"
        )


def digest_of(request: Any) -> bytes:
    """A digest of a `Plan`, that of an equal one in another process."""
    static = request.decoder, type(request.drafter), jax.tree.structure(request.sampling)
    digest = hashlib.sha256(repr(static).encode())
    for leaf in jax.tree.leaves((request.context, request.limits, request.sampling)):
        digest.update(np.asarray(leaf).tobytes())
    digest.update(np.asarray(jax.random.key_data(request.keys)).tobytes())
    return digest.digest()
