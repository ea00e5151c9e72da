"""Requests on a mesh: where their arrays lie, and the rows of several processes as one batch."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stree_jax.decoding.options import Options
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prompts import checked_prompts, typed_key
from stree_jax.decoding.rule_rows import map_rows
from stree_jax.decoding.types import Sampling
from stree_jax.mesh.hosts import gathered, is_same_everywhere
from stree_jax.mesh.partition import ONE_DEVICE, Partition
from stree_jax.models.lm import HybridLM


def place_request(request: Plan, partition: Partition) -> Plan:
    """Puts a request's arrays on the mesh, and pads the batch to a multiple of its shards.

    Padding repeats the last row; the caller marks these rows as done.

    Raises:
        ValueError: processes have different requests.
    """
    if partition.processes > 1:
        _check_equal_requests(request)
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


def _check_equal_requests(request: Plan) -> None:
    """Raises if they differ: jax does not notice, and each process would run its own."""
    if not is_same_everywhere(digest_of(request)):
        raise ValueError(
            "the processes called generate with different prompts or settings; all of them must"
            " pass the same ones"
        )


def digest_of(request: Plan) -> bytes:
    """A digest of a plan; equal plans give equal digests in every process."""
    static = request.decoder, type(request.drafter), jax.tree.structure(request.sampling)
    digest = hashlib.sha256(repr(static).encode())
    for leaf in jax.tree.leaves((request.context, request.limits, request.sampling)):
        digest.update(np.asarray(leaf).tobytes())
    digest.update(np.asarray(jax.random.key_data(request.keys)).tobytes())
    return digest.digest()


def rows_of_all(
    model: HybridLM, prompts: Sequence[Sequence[int]], options: Options
) -> tuple[list[list[int]], Options, slice]:
    """All-gathers the rows of all processes, in their order, and says which are this one's.

    All processes call this.

    Args:
        model: a model on a mesh.
        prompts: this process's prompts. Other processes may have more, fewer or none.
        options: options without a list for rows, except the key: one key, the same in all
            processes, or one for each row of this process.

    Returns:
        The prompts of all rows, the options with one key or those of all rows, and this process's
        rows.

    Raises:
        ValueError: a model on one device, options for each row; or this process or another one has
            bad prompts or keys. Of those all raise, because a process that continued would wait for
            the others.
    """
    if model.partition == ONE_DEVICE:
        raise ValueError(
            "local_rows = True is for a model on a mesh: load it with from_pretrained(...,"
            " mesh=make_mesh(...)); on one device all rows are this process's"
        )
    if entries := options.entries():
        raise ValueError(
            f"{next(iter(entries))} has a value for each row; with local_rows = True only the key"
            " may"
        )
    refused: ValueError | None = None
    key: Any = options.key
    own, own_keys = [], None  # None: one key, or none
    try:
        if not isinstance(prompts, Sequence) or len(prompts):
            tokens, lengths = map(np.asarray, checked_prompts(prompts, model.config.vocab_size))
            own = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        if key is not None and (key := typed_key(key)).ndim:
            if key.shape != (len(own),):
                raise ValueError(
                    f"key has the shape {key.shape}; give one key, or one for each of {len(own)}"
                    " rows of this process"
                )
            own_keys = np.asarray(jax.random.key_data(key)).tolist()
    except ValueError as error:
        refused = error
    good, rows, keys = zip(*gathered((refused is None, own, own_keys)), strict=True)
    if refused is not None:
        raise refused
    if not all(good):
        raise ValueError(
            f"the prompts of process {good.index(False)} are refused; its error says why"
        )
    if 0 < keys.count(None) < len(keys):
        raise ValueError("some processes passed one key, and some a key for each row")
    if not any(rows):
        raise ValueError("no process has prompts; one of them needs at least one")
    if own_keys is not None:
        data = jnp.asarray(np.array([*itertools.chain(*keys)], np.uint32))
        key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    first = sum(map(len, rows[: jax.process_index()]))
    everyone = [*itertools.chain(*rows)]
    return everyone, dataclasses.replace(options, key=key), slice(first, first + len(own))
