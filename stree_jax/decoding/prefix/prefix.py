"""`Prefix`: what target and drafter have read of some rows, by which weights; how they read on.

Attention layers have a place for each token of the longest text. Places after a text are masked,
and nothing reads them before they are written: so buffers may be cut to any size that the text
fits, or padded with zeros.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Int, Lengths, Tokens
from stree_jax.decoding.drafters.base import Drafter, first_state, inner_layers
from stree_jax.decoding.prefix.prefill import prefill, prefill_with_drafter, unread_tokens
from stree_jax.decoding.prompts import Context
from stree_jax.decoding.traced_checks import check_like
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS, Partition
from stree_jax.mesh.programs import in_every_shard, over_mesh
from stree_jax.mesh.rows import placed_like
from stree_jax.messages import shown
from stree_jax.models.cache import Cache, cache_specs, init_cache
from stree_jax.models.config import ModelConfig
from stree_jax.models.identity import identity
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Origin:
    """What a prefix was read with: see `origin_of`."""

    model: tuple[ModelConfig, Partition, str]
    drafter: tuple[str, str]


class Prefix(NamedTuple):
    """Prefilled texts, from which rows of a decode loop start.

    No function donates it, so any number of rows can start from one.
    """

    context: Context
    cache: Cache  # the target's, of all tokens but the last
    drafter: Any  # the drafter's state
    origin: Origin | None = None  # None: from `slots`, whose prefixes are of one pool

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def prefix_specs(model: HybridLM) -> Any:
    """The mesh specs of a prefix of this model."""
    specs: Any = Prefix(ROWS, ROWS, ROWS)  # type: ignore[arg-type]
    return specs._replace(cache=cache_specs(model.config, model.partition.axis))


def read_text(
    model: HybridLM,
    drafter: Drafter | None,
    context: Context,
    topology: TreeTopology,
    max_length: int,
    before: Prefix | None,
) -> Prefix:
    """The prefix of texts, see `SpeculativeDecoder.read`."""
    lengths = context.length
    if before is not None:  # then texts go on from it, and have room
        have, new = on_host(before.context.length), on_host(lengths)
        for row in np.flatnonzero((new < have) | (new > max_length)):
            raise ValueError(
                f"row {row} has a prefix of {have[row]} tokens and a text of {new[row]}: it must"
                f" be at least as long, and have at most max_length = {max_length}"
            )
    state = None
    if drafter is not None:
        state = _state_before(model, drafter, lengths, topology, max_length, before)
    if before is None:
        read = _read(model, drafter, context.tokens, lengths - 1, max_length, state, None)
        return Prefix(context, *read)
    wanted = cache_shapes(model, len(lengths), max_length)
    if not is_alike(before.cache, wanted):
        raise ValueError("the prefix was read by another model: its caches have other shapes")
    cache = with_capacity(before.cache, wanted)
    unread = unread_tokens(context, before.context.length - 1)
    if unread is not None:
        cache, state = _read(model, drafter, *unread, max_length, state, cache)
    return Prefix(context, cache, state)


def _read(
    model: HybridLM,
    drafter: Drafter | None,
    tokens: Tokens,
    lengths: Lengths,
    max_length: int,
    state: Any,
    cache: Cache | None,
) -> tuple[Cache, Any]:
    """The target's cache and the drafter's state after both have read the tokens.

    A drafter that gets hidden states of the target reads chunk by chunk, in the target's program;
    another one reads all at once, and the target's program does not depend on it.
    """
    inner = inner_layers(drafter)
    if drafter is not None and inner is None:
        read = drafter.read(state, tokens, None, lengths)
        state = check_like(f"{type(drafter).__name__}.read: state", read, state)
        return prefill(model, tokens, lengths, max_length, cache), state
    return prefill_with_drafter(
        model,
        drafter,
        tokens,
        lengths,
        state,
        cache,
        inner_layers=inner or (),
        max_length=max_length,
    )


def _state_before(
    model: HybridLM,
    drafter: Drafter,
    lengths: Int[Array, " B"],
    topology: TreeTopology,
    max_length: int,
    before: Prefix | None,
) -> Any:
    """The drafter's state after the beginnings of the texts, for this tree and length."""
    if before is not None:
        wanted = jax.eval_shape(lambda: drafter.init(len(lengths), topology, max_length))
        if same_rows(before.drafter, wanted):
            return before.drafter
        if is_alike(before.drafter, wanted):
            return with_capacity(_settled(model, drafter, before.drafter, lengths), wanted)
    # None, or that of a drafter with other settings: it reads the beginnings, unless it needs their
    # hidden states, which are gone.
    state = first_state(drafter, lengths, topology, max_length)
    if before is None or inner_layers(drafter) is not None:
        return state
    beginning = unread_tokens(before.context, jnp.zeros_like(lengths))
    if beginning is not None:
        state = drafter.read(state, beginning[0], None, beginning[1])
    return state


def _settled(model: HybridLM, drafter: Drafter, state: Any, lengths: Int[Array, " B"]) -> Any:
    """The state after the last step's path is replayed, so that buffers can be resized."""
    hidden = None
    if (inner := inner_layers(drafter)) is not None:
        width = (1 + len(inner)) * model.config.d_model
        hidden = jnp.zeros((len(lengths), 1, width), model.activation_dtype)
    nothing = jnp.zeros((len(lengths), 1), jnp.int32), hidden, jnp.zeros_like(lengths)
    read = drafter.read(state, *placed_like(lengths, nothing))
    return check_like(f"{type(drafter).__name__}.read: state", read, state)


def continued_texts(after: Prefix, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The texts of a prefix, each followed by its prompt."""
    tokens, lengths = on_host(after.context)
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
    rows = [0] * len(prompts) if len(lengths) == 1 else range(len(prompts))
    pairs = zip(rows, prompts, strict=True)
    return [np.concatenate([tokens[row, : lengths[row]], prompt]) for row, prompt in pairs]


def for_rows(after: Prefix, num_rows: int, model: HybridLM, drafter: Any) -> Prefix:
    """The prefix for as many rows; with a drafter's state if it is of this drafter."""
    before = after._replace(origin=None)  # static: programs serve prefixes of any
    if after.origin is None or after.origin != origin_of(model, drafter):
        before = before._replace(drafter=None)
    return before if len(after.context.length) == num_rows else repeated(before, num_rows)


def cache_shapes(model: HybridLM, rows: int, size: int) -> Any:
    """Shapes and dtypes of the model's cache of `size` places, on a mesh in all."""
    return _cache_shapes(model.config, model.activation_dtype, model.partition, rows, size)


@functools.lru_cache(maxsize=256)  # asked for with each chunk of a text, and traced anew
def _cache_shapes(
    config: ModelConfig, dtype: Any, partition: Partition, rows: int, size: int
) -> Any:
    def of_shard() -> Cache:
        return init_cache(config.local(partition.shards), rows, size, dtype)

    specs = in_every_shard(cache_specs(config, partition.axis))
    return jax.eval_shape(lambda: over_mesh(partition, of_shard, (), (), (), specs))


def same_rows(left: Any, right: Any) -> bool:
    """True if the arrays of two states differ in the number of rows only."""
    return _kind(left, lambda shape: shape[1:]) == _kind(right, lambda shape: shape[1:])


def is_alike(arrays: Any, wanted: Any) -> bool:
    """True if arrays differ from the wanted ones in the sizes of axes only."""
    return _kind(arrays, len) == _kind(wanted, len)


def fits(arrays: Any, wanted: Any) -> bool:
    """True if arrays are like the wanted ones, and no axis is larger."""
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(wanted), strict=False)
    return is_alike(arrays, wanted) and all(
        np.less_equal(leaf.shape, example.shape).all() for leaf, example in pairs
    )


def _kind(arrays: Any, of_shape: Callable[[tuple[int, ...]], Any]) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(arrays)
    return structure, [(leaf.dtype, of_shape(leaf.shape)) for leaf in leaves]


def with_capacity(arrays: Any, wanted: Any) -> Any:
    """Arrays with the wanted sizes of all axes but the first: cut, or with zeros behind."""
    if same_rows(arrays, wanted):
        return arrays
    return _with_capacity(arrays, tuple(leaf.shape[1:] for leaf in jax.tree.leaves(wanted)))


@functools.partial(jax.jit, static_argnames="shapes")
def _with_capacity(arrays: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
    def one(leaf: Array, shape: tuple[int, ...]) -> Array:
        leaf = leaf[(slice(None), *map(slice, shape))]
        room = [(0, most - size) for size, most in zip(leaf.shape[1:], shape, strict=True)]
        return jnp.pad(leaf, [(0, 0), *room])

    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, map(one, leaves, shapes))


@jax.jit
def stacked(rows: Sequence[Any]) -> Any:
    """Concatenates the rows of several trees of arrays; one program for each number of trees."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


@functools.partial(jax.jit, static_argnames="times")
def repeated(rows: Any, times: int) -> Any:
    """Repeats each row of all arrays in place, as one program."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)


def origin_of(model: HybridLM, drafter: Any) -> Origin:
    """The identities of all weights; with config and mesh, which caches depend on too."""
    return Origin(
        (model.config, model.partition, identity(model)),
        (type(drafter).__name__, identity(drafter)),
    )


def check_origin(
    after: Prefix, model: HybridLM, drafter: Any = None, *, any_drafter: bool = False
) -> None:
    """Refuses a prefix of another model or drafter; one without an origin is taken."""
    if not isinstance(after, Prefix):
        raise ValueError(
            "after must be a Prefix: Generation.prefix, Completion.prefix or what Scheduler.read"
            f" returned; got {shown(after)}"
        )
    if after.origin is None:
        return
    expected = origin_of(model, drafter)
    for name in ("model",) if any_drafter else ("model", "drafter"):
        if getattr(after.origin, name) != getattr(expected, name):
            raise ValueError(
                f"after was read with another {name}, or its weights have changed; read the text"
                " again with this one"
            )
