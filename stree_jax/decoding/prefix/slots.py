"""The rows of a decode loop as slots: requests start and end while other rows continue.

A pool is a `DecodeState` and the decoder that runs it. `SpeculativeDecoder.run` stops after some
steps, or when some rows have ended. Rows are filled and read out between runs only:

    state = empty(decoder, model, drafter, rows=4)
    prefix = decoder.read(model, drafter, prompt)
    state = insert(decoder, model, state, [0, 2], prefix, keys)     two rows, one prefill
    state = decoder.run(model, drafter, state, limits, sampling, max_steps=32, stop_after_ended=1)
    longer = decoder.read(model, drafter, longer_text, before=take(state, 2))

All arrays of a row have the batch axis, so a new request overwrites the whole row, NaN included.
All functions are pure; `insert` donates the state, and no function donates a prefix.

On a mesh the rows are cut along "data", an equal part for each shard, and every shard of the batch
has the one row of a prefix: all compute it, `insert` copies it inside a shard, and `take` sends one
row to the others. With several processes all call these functions with the same arguments.
"""

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stree_jax.array_types import Array, Bool, Int, Key
from stree_jax.checks import check_int
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder, check_not_donated, owned
from stree_jax.decoding.prefix.prefix import Prefix, prefix_specs, same_rows, with_capacity
from stree_jax.decoding.processors import first_states
from stree_jax.decoding.prompts import buffer_size, check_num_rows, typed_key
from stree_jax.decoding.rules import per_row
from stree_jax.decoding.types import Context, DecodeState, Sampling, TokenLogProbs, state_specs
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import in_every_shard, on_mesh
from stree_jax.mesh.rows import copies_of, placed_like, row_of
from stree_jax.models.lm import HybridLM


@jax.transfer_guard("allow")
def empty(
    decoder: SpeculativeDecoder, model: HybridLM, drafter: Drafter | None, rows: int
) -> DecodeState:
    """A pool of rows that have all ended."""
    check_rows(model, rows)
    width = min(buffer_size(1), decoder.capacity)
    nothing = Context(jnp.zeros((1, width), jnp.int32), jnp.ones(1, jnp.int32))
    first = model.partition.put_rows((nothing, typed_key([0]), jnp.ones(1, bool)))
    state = decoder.start(model, drafter, *first[:2])
    for leaf in jax.tree.leaves(state.drafter):
        if leaf.shape[:1] != (1,):
            raise ValueError(
                f"the state of {type(drafter).__name__} has an array of shape {leaf.shape} for one"
                " row; all its arrays need the batch axis first"
            )
    state = state._replace(done=first[2])
    return copies_of(state, rows, model.partition, state_specs(model))


def check_rows(model: HybridLM, rows: int) -> None:
    """Refuses a number of rows that the shards of the batch cannot share equally."""
    check_num_rows("rows", rows)
    data = model.partition.rows
    if rows % data:
        fewer = rows - rows % data
        fitting = f"{fewer} or {fewer + data}" if fewer else f"{data}"
        raise ValueError(
            f"rows = {rows}: the mesh has data = {data}, and each shard of it the same number of"
            f" rows; use {fitting}"
        )


@jax.transfer_guard("allow")
def insert(
    decoder: SpeculativeDecoder,
    model: HybridLM,
    state: DecodeState,
    rows: Sequence[int],
    prefix: Prefix,
    keys: Key[Array, " rows"],
) -> DecodeState:
    """Starts rows from one prefix; a fork costs a copy of its cache.

    A Mamba-2 layer's cache is one state, however long the text is; an attention layer's has
    `max_length` positions. The rows are overwritten. One program serves all rows.
    """
    _check_between_runs(state)
    _check_exist(state, rows)
    if keys.shape != (len(rows),):
        raise ValueError(f"{len(rows)} rows need as many keys, got an array of shape {keys.shape}")
    if not same_rows(state.cache, prefix.cache):
        raise ValueError("the prefix was read for a pool with other buffers or another model")
    if not same_rows(state.drafter, prefix.drafter):
        raise ValueError("the prefix was read for another drafter or tree than the pool has now")
    prefix = prefix._replace(origin=None)  # static: programs serve prefixes of any
    places = model.partition.put(model.partition.row_places(rows, len(state.done)))
    keys = model.partition.put(keys, PartitionSpec())
    return inserted(decoder, model, state, places, prefix, keys)


def _insert_specs(model: HybridLM) -> Any:
    specs = state_specs(model)
    return (specs, ROWS, in_every_shard(prefix_specs(model)), PartitionSpec()), specs


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
@on_mesh(_insert_specs, modules=1)
def inserted(
    decoder: SpeculativeDecoder,
    model: HybridLM,
    state: DecodeState,
    rows: Int[Array, " rows"],
    prefix: Prefix,
    keys: Key[Array, " rows"],
) -> DecodeState:
    """The program of `insert`; on a mesh `rows` are as `Partition.row_places` gives them."""
    new = decoder.begin(model, prefix.context, keys)
    processors = state.processors  # `with_processors` starts those of new rows
    new = new._replace(cache=prefix.cache, drafter=prefix.drafter)
    state = jax.tree.map(
        lambda pool, row: pool.at[rows].set(row), state._replace(processors=()), new
    )
    return state._replace(processors=processors)


@jax.transfer_guard("allow")
def with_processors(
    model: HybridLM, state: DecodeState, sampling: Sampling, rows: Collection[int]
) -> DecodeState:
    """The pool for the logits processors of its next run."""
    if not sampling.processors:
        return state._replace(processors=())
    started = placed_like(state.done, np.isin(np.arange(len(state.done)), [*rows]))
    new = first_states(sampling.processors, state.context, model.config.vocab_size)
    old = itertools.zip_longest(new, state.processors[: len(new)])
    states = tuple(
        _chosen(started, fresh, kept) if same_rows(fresh, kept) else fresh for fresh, kept in old
    )
    return state._replace(processors=placed_like(state.done, states))


@jax.jit
def _chosen(rows: Bool[Array, " B"], new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(per_row(rows, a), a, b), new, old)


@jax.transfer_guard("allow")
def take(state: DecodeState, row: int) -> Prefix:
    """The prefix of a row: its text, and the caches of all but its last token.

    The row is not changed.
    """
    _check_between_runs(state)
    row = check_int("row", row, 0, len(state.done) - 1)
    if int(on_host(state.failed)[row]):
        raise ValueError(f"row {row} failed: its logits were not finite, and its cache may not be")
    return Prefix(*row_of((state.context, state.cache, state.drafter), row))


@jax.transfer_guard("allow")
def end(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """The pool with these rows ended where they are, for other requests."""
    _check_between_runs(state)
    _check_exist(state, rows)
    done = jnp.asarray(state.done).at[np.asarray(rows, np.int32)].set(True)
    return state._replace(done=placed_like(state.done, done))


def with_records(decoder: SpeculativeDecoder, state: DecodeState) -> DecodeState:
    """The pool with the records of a decoder, perhaps of more best tokens."""
    most, records = decoder.num_best, state.log_probs
    if most is None or (records is not None and records.best.shape[2] == most):
        return state
    new = placed_like(state.done, TokenLogProbs.empty(len(state.done), decoder.capacity, most))
    if records is not None:
        new = with_capacity(records, new)
    return owned(state._replace(log_probs=new), ())


def _check_between_runs(state: DecodeState) -> None:
    check_not_donated(state)
    if (on_host(state.path.last) >= 0).any():
        raise ValueError(
            "the last step's path has not been replayed: rows come and go between runs only, not"
            " between the steps of `step` or `stream`"
        )


def _check_exist(state: DecodeState, rows: Sequence[int]) -> None:
    num_rows = len(state.done)
    if len({*rows}) < len(rows) or not rows or min(rows) < 0 or max(rows) >= num_rows:
        raise ValueError(f"rows must be different ones of 0 to {num_rows - 1}, got {[*rows]}")
