"""How target and drafter read a text together, piece by piece."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Int, Lengths, Tokens
from stree_jax.decoding.drafters.base import Drafter, first_state, inner_layers
from stree_jax.decoding.like import check_like
from stree_jax.decoding.text.prefill import prefill, prefill_with_drafter, rest_of
from stree_jax.decoding.text.prefix import Prefix, cache_shapes, is_alike, same_rows, with_capacity
from stree_jax.decoding.types import Context
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.rows import placed_like
from stree_jax.models.cache import Cache
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology


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
        piece = context.tokens, lengths - 1
        return Prefix(context, *_read(model, drafter, *piece, max_length, state, None))
    wanted = cache_shapes(model, len(lengths), max_length)
    if not is_alike(before.cache, wanted):
        raise ValueError("the prefix was read by another model: its caches have other shapes")
    cache = with_capacity(before.cache, wanted)
    rest = rest_of(context, before.context.length - 1)
    if rest is not None:
        cache, state = _read(model, drafter, *rest, max_length, state, cache)
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
    if drafter is not None and inner is not None:
        return prefill_with_drafter(
            *(model, drafter, tokens, lengths, state, cache),
            inner_layers=inner,
            max_length=max_length,
        )
    if drafter is not None:
        read = drafter.read(state, tokens, None, lengths)
        state = check_like(f"{type(drafter).__name__}.read: state", read, state)
    return prefill(model, tokens, lengths, max_length, cache), state


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
    beginning = rest_of(before.context, jnp.zeros_like(lengths))
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
