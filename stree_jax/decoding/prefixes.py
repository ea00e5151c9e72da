"""Continued texts: from the rows of a generation, or of a prefix, to those of the next one.

A prefix has fingerprints of the model and the drafter that it was read with.
"""

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array
from stree_jax.decoding.capacity import cache_shapes, fits
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size
from stree_jax.decoding.types import Context, DecodeState, Origin, Prefix
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM


def prefix_of(request: Plan, model: HybridLM, state: DecodeState) -> Prefix:
    """The prefix of all rows of a state that `run` returned; a failed row has length 0."""
    tokens, length = state.context
    length = jnp.where(state.failed > 0, 0, length).astype(jnp.int32)
    context = Context(tokens[:, : request.decoder.max_length], length)
    return Prefix(context, state.cache, state.drafter, origin_of(model, request.drafter))


def joined(prompts: Sequence[Sequence[int]], after: Prefix) -> list[list[int]]:
    """The texts of a prefix, each followed by its prompt."""
    lengths = np.asarray(after.context.length)
    if len(lengths) not in (1, len(prompts)):
        raise ValueError(
            f"after has {len(lengths)} rows, and prompts {len(prompts)}; give a prompt for each row"
            " (it may be empty), or a prefix of one row"
        )
    if not lengths.all():
        raise ValueError(
            f"row {int(lengths.argmin())} of after failed: its logits were not finite; take others,"
            " an array of rows, by jax.tree.map(lambda leaf: leaf[rows], prefix)"
        )
    tokens = np.asarray(after.context.tokens)
    read = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    if len(read) == 1:
        read *= len(prompts)
    return [[*text, *prompt] for text, prompt in zip(read, prompts, strict=True)]


def with_room(request: Plan, model: HybridLM, after: Prefix) -> Plan:
    """The plan of joined texts, with buffers at least as large as the prefix's."""
    size = request.decoder.max_length
    while size <= 2 * MAX_TOKENS:
        if fits(after.cache, cache_shapes(model, len(after.context.length), size)):
            decoder = dataclasses.replace(request.decoder, max_length=size)
            return request._replace(decoder=decoder)
        size = buffer_size(size + 1)
    raise ValueError("after was read by another model: its caches have other shapes")


def continued(request: Plan, model: HybridLM, num_rows: int, after: Prefix) -> Prefix:
    """The prefix of `num_rows` different joined texts: reads what follows `after` in each.

    `request` is from `with_room`, and may repeat each text in place; `after` has as many rows or 1.
    """
    every = len(request.context.length) // num_rows
    context = Context(*(values[::every] for values in request.context))
    before = after._replace(origin=None)  # static: programs serve prefixes of any
    if after.origin is None or after.origin != origin_of(model, request.drafter):
        before = before._replace(drafter=None)
    if len(after.context.length) < num_rows:
        before = repeated(before, num_rows)
    return request.decoder.read(model, request.drafter, context, before)


def compact(
    decoder: SpeculativeDecoder,
    model: HybridLM,
    drafter: Drafter | None,
    prefix: Prefix,
    size: int,
) -> Prefix:
    """A prefix of one row with buffers of `size` tokens, in which its text fits."""
    tokens, length = prefix.context
    context = Context(tokens[:, :size], length)
    return dataclasses.replace(decoder, max_length=size).read(model, drafter, context, prefix)


@jax.jit
def stacked(rows: Sequence[Any]) -> Any:
    """Concatenates the rows of several trees of arrays; one program for each number of trees."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


@functools.partial(jax.jit, static_argnames="times")
def repeated(rows: Any, times: int) -> Any:
    """Repeats each row of all arrays in place, as one program."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)


def origin_of(model: HybridLM, drafter: Drafter | None) -> Origin:
    """Fingerprints of the shapes and the numbers of all weights; each array is read once.

    On a mesh the numbers are those of the shards of this process.
    """
    return Origin(_fingerprint(model), _fingerprint(drafter))


def check_origin(
    after: Prefix, model: HybridLM, drafter: Drafter | None = None, *, any_drafter: bool = False
) -> None:
    """Refuses a prefix of another model or drafter; one without an origin is taken."""
    if not isinstance(after, Prefix):
        raise ValueError(
            "after must be a Prefix: Generation.prefix, Completion.prefix or what Scheduler.read"
            f" returned; got {shown(after)}"
        )
    if after.origin is None:
        return
    own = origin_of(model, drafter)
    for name in ("model",) if any_drafter else ("model", "drafter"):
        if getattr(after.origin, name) != getattr(own, name):
            raise ValueError(
                f"after was read with another {name}, or its weights have changed; read the text"
                " again with this one"
            )


def weights_of(*parts: Any) -> list[weakref.ref]:
    """The arrays of models and drafters, for `are_weights_of`; keeps none of them alive."""
    return [weakref.ref(leaf) for leaf in jax.tree.leaves(parts) if isinstance(leaf, jax.Array)]


def are_weights_of(weights: Sequence[weakref.ref], *parts: Any) -> bool:
    """True if models and drafters still have the same arrays, as objects."""
    leaves = [leaf for leaf in jax.tree.leaves(parts) if isinstance(leaf, jax.Array)]
    return len(leaves) == len(weights) and all(
        leaf is each() for leaf, each in zip(leaves, weights, strict=True)
    )


def _fingerprint(part: Any) -> str:
    leaves = jax.tree.leaves(part)
    kinds = [(np.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves]
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    new = {id(leaf): leaf for leaf in arrays if id(leaf) not in _sums}
    for key, leaf in new.items():
        _sums[key] = _sum(leaf)
        weakref.finalize(leaf, _sums.pop, key).atexit = False
    sums = [_sums[id(leaf)] for leaf in arrays]
    return hashlib.sha256(f"{type(part).__name__} {kinds} {sums}".encode()).hexdigest()


# Of arrays that live, by their id.
_sums: dict[int, list[int]] = {}


def _sum(leaf: jax.Array) -> list[int]:
    """The bits of all numbers of each shard of this process, joined by exclusive or."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = [shard.data for shard in leaf.addressable_shards]
    if all(device.platform == "cpu" for device in leaf.devices()):
        flat = [np.ravel(np.asarray(shard)).view(np.uint8) for shard in shards]
        words = [each.view(np.uint8 if each.size % 8 else np.uint64) for each in flat]
        return [int(np.bitwise_xor.reduce(each)) for each in words]
    return [int(_mixed(shard)) for shard in shards]


@jax.jit
def _mixed(numbers: Array) -> Array:
    if numbers.dtype == jnp.bool_:
        numbers = numbers.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(numbers, f"uint{8 * numbers.dtype.itemsize}")
    return jax.lax.reduce(bits, bits.dtype.type(0), jax.lax.bitwise_xor, range(bits.ndim))
