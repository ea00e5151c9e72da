"""Stops inside the decode loop: each row runs an automaton over its new tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Bool, Int
from stree_jax.decoding.types import Stops

STOPPED = -1  # the state of a row that a stop has ended


def advanced(
    stops: Stops, state: Int[Array, " B"], new_tokens: Int[Array, "B T"], emitted: Int[Array, " B"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Reads the new tokens of a step.

    Args:
        stops: the automata of the rows.
        state: their states after the tokens before; 0 at first.
        new_tokens: new tokens, of which a row may use some.
        emitted: number of new tokens before.

    Returns:
        The state after each token, and whether a stop that counts ends with it.
    """
    classes = jnp.take_along_axis(stops.class_of, new_tokens, axis=1)

    def read(state: Array, column: Array) -> tuple[Array, tuple[Array, Array]]:
        follow = jax.vmap(lambda table, at, kind: table[at, kind])
        code = follow(stops.next_state, jnp.maximum(state, 0), column)
        state = jnp.where(code < 0, -1 - code, code)
        return state, (state, code < 0)

    _, (states, ends) = lax.scan(read, state, classes.T, unroll=min(8, classes.shape[1]))
    numbers = emitted[:, None] + jnp.arange(1, classes.shape[1] + 1)
    return states.T, ends.T & (numbers > stops.min_new_tokens[:, None])


def after(
    state: Int[Array, " B"],
    states: Int[Array, "B T"],
    ends: Bool[Array, "B T"],
    count: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The state after `count` of the tokens that `advanced` has read."""
    last = jnp.maximum(count - 1, 0)[:, None]
    read, ended = (jnp.take_along_axis(values, last, axis=1)[:, 0] for values in (states, ends))
    return jnp.where(count > 0, jnp.where(ended, STOPPED, read), state)
