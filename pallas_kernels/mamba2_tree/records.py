"""What a Mamba-2 layer leaves of a tree for the step after, and a queue of what all layers leave.

A step reads the record that each layer left in the step before, and leaves a new one. All programs
of a kernel read the old record, and none may overwrite it before all have, so the new one needs a
place of its own. Layers run one after the other, so one place more than there are layers is enough:
a layer writes to the place of the layer before it, whose old record has been read. Worked example,
3 layers with old records a, b and c, and new ones A, B and C:
    place      0  1  2  3    oldest
    at first   a  b  c  -    0
    layer 0    -  b  c  A    1
    layer 1    B  -  c  A    2
    layer 2    B  C  -  A    3          layer 0 is next, and finds A
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


class Mamba2Pending(NamedTuple):
    """What a Mamba-2 layer needs to advance along any path of a tree of N nodes."""

    x: Float[Array, "... B N H P"]
    dt: Float32[Array, "... B N H"]
    B: Float[Array, "... B N G S"]
    conv_input: Float[Array, "... B N C"]


class RecordQueue(NamedTuple):
    """Records of layers of the same sizes, which take turns; the oldest is that of the next one.

    Attributes:
        records: arrays with an axis of places in front, one more than there are layers.
        oldest: place of the oldest record; the place before it is free.
    """

    records: Mamba2Pending
    oldest: Int32[Array, " 1"]


def enqueued(records: Sequence[Mamba2Pending]) -> RecordQueue:
    """A queue of the records of all layers, in the order of their turns."""
    free = jax.tree.map(jnp.zeros_like, records[-1])
    arrays = jax.tree.map(lambda *parts: jnp.stack(parts), *records, free)
    return RecordQueue(arrays, jnp.zeros(1, jnp.int32))


def oldest_record(queue: RecordQueue, turns: int = 0) -> Mamba2Pending:
    """That of the layer whose turn it is, or will be after so many turns."""
    place = place_after(queue.oldest[0], len(queue.records.x), turns)
    return jax.tree.map(
        lambda array: lax.dynamic_index_in_dim(array, place, keepdims=False), queue.records
    )


def after_turn(queue: RecordQueue, record: Mamba2Pending) -> RecordQueue:
    """The queue when the layer whose turn it is has left its new record."""
    num_places = len(queue.records.x)
    free = free_place(queue.oldest[0], num_places)
    arrays = jax.tree.map(
        lambda array, value: lax.dynamic_update_index_in_dim(array, value, free, 0),
        *(queue.records, record),
    )
    return RecordQueue(arrays, place_after(queue.oldest, num_places))


def place_after(place, num_places: int, turns: int = 1):
    """The place of the oldest record after some turns."""
    return lax.rem(place + turns, num_places)


def free_place(oldest, num_places: int):
    """The place before the oldest record's."""
    return place_after(oldest, num_places, num_places - 1)
