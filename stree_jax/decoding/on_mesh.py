"""Requests and results of models on a mesh: checks, padding of the batch, copies to the host."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from stree_jax.decoding.drafters.base import Drafter, draft_models
from stree_jax.decoding.processor_rows import map_rows
from stree_jax.mesh.partition import Partition
from stree_jax.models.lm import HybridLM


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
    processors = map_rows(
        processors, partition.put, lambda leaf: partition.put(leaf, PartitionSpec())
    )
    context, keys, limits, sampling = partition.put(arrays)
    sampling = dataclasses.replace(sampling, processors=processors)
    return request._replace(context=context, keys=keys, limits=limits, sampling=sampling)


def on_host(tree: Any, rows: slice = slice(None)) -> Any:
    """Copies arrays, or these rows of them, to this process's memory.

    Arrays that span processes are all-gathered, so all processes must call this.
    """
    leaves = jax.tree.leaves(tree)
    if any(not leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        places: list[Any] = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
        (mesh,) = {place.mesh for place in places}
        everywhere = NamedSharding(mesh, PartitionSpec())
        tree = jax.jit(_same, out_shardings=everywhere)(tree)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree)


def _same(tree: Any) -> Any:
    return tree


def _check_equal_requests(request: Any) -> None:
    """Raises if they differ: jax does not notice, and each process would run its own."""
    static = request.decoder, type(request.drafter), jax.tree.structure(request.sampling)
    digest = hashlib.sha256(repr(static).encode())
    for leaf in jax.tree.leaves((request.context, request.limits, request.sampling)):
        digest.update(np.asarray(leaf).tobytes())
    digest.update(np.asarray(jax.random.key_data(request.keys)).tobytes())
    try:
        multihost_utils.assert_equal(np.frombuffer(digest.digest(), np.uint8))
    except AssertionError:
        raise ValueError(
            "the processes called generate with different prompts or settings; all of them must"
            " pass the same ones"
        ) from None
