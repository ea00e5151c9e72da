"""The order in which a recurrence visits the nodes of a tree, from child to child.

A kernel that runs a recurrence has the state of the node that it visited last in registers. It goes
down to a child of this node, or turns back to a node above, whose state it has kept in a slot.
Siblings with smaller subtrees come first, and the last child needs no slot any more. So a tree of N
nodes takes at most `slots(N)` slots, whatever its shape.

XLA computes the order once for all layers: they have the same mask.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

_POP, _PUSH, _NODE = 20, 24, 0xFFFF  # where a visit has its slots, and the bits of its node


def slots(num_nodes: int) -> int:
    """The most states that are kept at once in a tree, or in several with this many nodes."""
    return (num_nodes // 2 + 1).bit_length() - 1


def visit(code: Array) -> tuple[Array, Array, Array]:
    """Of a visit: the node, the slot with its parent's state, and the slot for its own state.

    Slots count from 1. A parent's slot of 0 means that the parent was visited last, or that there
    is none; an own slot of 0 that nothing has to be kept.
    """
    return code & _NODE, (code >> _POP) & 15, (code >> _PUSH) & 15


def visits(mask: Bool[Array, "B N N"], num_queries: int) -> Int32[Array, "B visits"]:
    """The number of nodes to visit, their codes for `visit`, and one more code.

    Args:
        mask: ancestors-or-self of each node, parents before children. `mask[b, i, i]` says whether
            node i exists. Rows of nodes that do not exist are arbitrary.
        num_queries: the last nodes, whose outputs are wanted; others are visited if a query is
            below them.

    Returns:
        `[B, N + 2]`. Nodes that are not visited come after the others, and have no slots. The last
        number is node 0, so that a kernel may load one node ahead.
    """
    num_nodes = mask.shape[1]
    node = jnp.arange(num_nodes, dtype=jnp.int32)
    exists = jnp.diagonal(mask, axis1=1, axis2=2)
    is_query = exists & (node >= num_nodes - num_queries)
    visited = exists & (mask & is_query[:, :, None]).any(axis=1)
    above = mask & visited[:, :, None]  # [B, node, ancestor or the node itself]
    size = above.sum(axis=1, dtype=jnp.int32)  # of the subtree
    parent = jnp.where(above & (node < node[:, None]), node, -1).max(axis=2)  # -1: none
    # Which siblings come before each node: [B, node, sibling].
    siblings = (parent[:, :, None] == parent[:, None]) & visited[:, :, None] & visited[:, None]
    is_smaller = size[:, None] < size[:, :, None]
    is_tie = (size[:, None] == size[:, :, None]) & (node < node[:, None])
    before = siblings & (is_smaller | is_tie)
    after = siblings & ~before & (node != node[:, None])
    is_first, is_last = ~before.any(axis=2), ~after.any(axis=2)
    before_node = 1 + jnp.where(before, size[:, None], 0).sum(axis=2, dtype=jnp.int32)
    place = jnp.where(above, before_node[:, None], 0).sum(axis=2, dtype=jnp.int32) - 1
    # A slot is in use below the children of its node that are not the last.
    used = (above & ~is_last[:, None]).sum(axis=2, dtype=jnp.int32)
    pop = jnp.where(is_first, 0, used + is_last)
    has_children = (parent[:, None] == node[:, None]) & visited[:, None]  # [B, node, child]
    push = jnp.where(has_children.sum(axis=2) > 1, used + 1, 0)
    code = jnp.where(visited, node | pop << _POP | push << _PUSH, node)
    left_out = visited.sum(axis=1, keepdims=True) + jnp.cumsum(~visited, axis=1) - 1
    return _table(visited, jnp.where(visited, place, left_out), code)


def steps(path: Bool[Array, "B O"]) -> Int32[Array, "B steps"]:
    """The number of nodes of a path, the nodes in order, and zeros: `[B, O + 2]`."""
    place = jnp.where(path, jnp.cumsum(path, axis=1) - 1, -1)
    return _table(path, place, jnp.arange(path.shape[1], dtype=jnp.int32)[None])


def _table(counted: Array, place: Array, codes: Array) -> Array:
    """The number of counted nodes, the code at each place, and a zero."""
    places = jnp.arange(place.shape[1])[:, None]
    here = jnp.where(place[:, None] == places, codes[:, None], 0)
    count = counted.sum(axis=1, keepdims=True, dtype=jnp.int32)
    at_place = here.sum(axis=2, dtype=jnp.int32)
    return jnp.concatenate([count, at_place, jnp.zeros_like(count)], axis=1)


State = tuple[Array, ...]  # of a node, in blocks


def along(
    steps_ref: Any, load: Callable[[Array], Any], advance: Callable[..., State], state: State
) -> State:
    """The state after a path, inside of a kernel.

    `steps_ref` is what `steps` returned for a row. `load` loads what a node needs, one node ahead;
    `advance` gets the state before and all of this.
    """

    def step(number: Array, carry: Any) -> Any:
        state, inputs = carry
        following = load(steps_ref[2 + number])
        return advance(state, *inputs), following

    return lax.fori_loop(0, steps_ref[0], step, (state, load(steps_ref[1])))[0]


def visit_all(
    visits_ref: Any,
    num_nodes: int,
    first_query: int,
    before_root: Callable[[], State],
    load: Callable[[Array, Array], Any],
    visited: Callable[[State, Array, Any], tuple[State, tuple]],
    write: Callable[..., None],
    leave_out: Callable[[Array], None],
) -> None:
    """Visits the nodes of a tree, inside of a kernel.

    Args:
        visits_ref: what `visits` returned for a row; None: there is one node, which exists.
        num_nodes: nodes of the tree.
        first_query: the first node whose outputs are wanted.
        before_root: gives the state before the root. What the first node needs is loaded before.
        load: loads what a node, and the query that it is if any, need; one node ahead.
        visited: the state after a node, from its parent's, and what else `write` needs.
        write: writes outputs of a query, from the state after it and what `visited` returned.
        leave_out: writes outputs of a query that is not visited.
    """

    def load_node(node: Array) -> Any:
        return load(node, jnp.maximum(node - first_query, 0))

    def if_query(node: Array, function: Callable[[Array], None]) -> None:
        if first_query:
            pl.when(node >= first_query)(lambda: function(node - first_query))
        else:
            function(node)

    def advance(state: State, node: Array, inputs: Any) -> State:
        state, more = visited(state, node, inputs)
        if_query(node, lambda query: write(query, state, *more))
        return state

    if visits_ref is None:
        root = jnp.int32(0)
        inputs = load_node(root)
        advance(before_root(), root, inputs)
        return

    def load_visit(number: int | Array) -> tuple[Array, Any]:
        code = visits_ref[1 + number]
        return code, load_node(visit(code)[0])

    def step(number: Array, carry: Any) -> Any:
        state, kept, (code, inputs) = carry
        following = load_visit(number + 1)
        node, pop, push = visit(code)
        if kept:

            def turned_back() -> State:
                state = kept[0]
                for slot, value in enumerate(kept[1:], 2):
                    state = _where(pop == slot, value, state)
                return state

            state = lax.cond(pop > 0, turned_back, lambda: state)
        state = advance(state, node, inputs)
        if kept:
            kept = lax.cond(
                push > 0,
                lambda: tuple(_where(push == at, state, value) for at, value in enumerate(kept, 1)),
                lambda: kept,
            )
        return state, kept, following

    def skip(number: Array, _: Any) -> None:
        if_query(visit(visits_ref[1 + number])[0], leave_out)

    first = load_visit(0)
    state = before_root()
    lax.fori_loop(0, visits_ref[0], step, (state, (state,) * slots(num_nodes), first))
    lax.fori_loop(visits_ref[0], num_nodes, skip, None)


def _where(condition: Array, state: State, another: State) -> State:
    return tuple(jnp.where(condition, *values) for values in zip(state, another, strict=True))
