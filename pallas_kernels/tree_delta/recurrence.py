"""The gated delta rule as a recurrence over a tree: node after node, from child to child.

Passes: a program handles one row, one value head and `CHANNELS` of its channels. It reads its part
of the state once and keeps it in registers. It goes along the path of the previous tree and writes
the state once (input and output are one buffer). Then it visits the new tree in the order of
`walk`, and keeps states in `walk.slots(N)` further sets of registers where the tree branches. What
the next node needs is loaded one node ahead.

Numerics: float32. k and q stay as they are, and one over their lengths is a factor of sums:

    u = beta (v - exp(g) (h . k) / |k|);   h <- exp(g) h + (u / |k|) (outer) k;   y = (h . q) / |q|

A node costs the same operations in the same order in a tree, in a chain and alone, and a replay
repeats the line of h. So y, u and states have the same bits in all of them. No compiler has a say:
`triton.multiply_add` is explicit. A state is rounded once a node, also where decays are near 1:
`Rule.decay` has more digits than a float32.

Refuses what `pallas_triton` refuses.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels import walk
from pallas_kernels.tree_delta.xla import EPSILON
from pallas_kernels.triton import Ref

CHANNELS = 16  # of the head, per program
# Numbers of the S axis that are added up across threads at once. The bits of a sum depend on it.
_BLOCK = 32
NUM_WARPS = 4

# A state in blocks of its last axis `[p, s]`, or a vector of a node in such blocks `[s]`.
Blocks: TypeAlias = tuple[jax.Array, ...]


def kernel(inputs: dict[str, Ref], outputs: dict[str, Ref], *, interpret: bool) -> None:
    """Refs by name, of one row and one head; p channels of it.

    inputs: as those of `pallas_triton`'s kernel, but with visits [N + 2] in place of the mask.
    outputs: state [p, S] after the path; y and u [Q, p].
    """
    rule = Rule(interpret)
    # The first node is loaded while the path is replayed.
    first = _loaded(inputs, 0) if "visits" in inputs else None
    if "steps" in inputs:
        state = rule.replay(inputs, outputs)
    else:
        state = _blocks(inputs["state"], slice(None))
    if first is not None:
        _visit_all(rule, inputs, outputs, state, first)


class Rule(NamedTuple):
    """The operations of a node. `interpret` is that of the kernel."""

    interpret: bool

    def replay(self, inputs: dict[str, Ref], outputs: dict[str, Ref]) -> Blocks:
        """Writes the state after the path of the previous tree, and returns it."""
        k_ref, u_ref, g_ref, steps = (inputs[x] for x in ("prev k", "prev u", "prev g", "steps"))

        def loaded(place: int | jax.Array) -> tuple[Blocks, jax.Array, jax.Array]:
            node = steps[1 + place]
            return _blocks(k_ref, node), u_ref[node, :], g_ref[node]

        def step(place: jax.Array, carry: Any) -> Any:
            state, (k, u, g) = carry
            following = loaded(place + 1)
            k, scale = self.wide(k, state)
            return self.advanced(state, self.decay(g), k, scale, u), following

        state = _blocks(inputs["state"], slice(None))
        state, _ = lax.fori_loop(0, steps[0], step, (state, loaded(0)))
        for part, block in zip(_parts(k_ref), state, strict=True):
            outputs["state"][:, part] = block
        return state

    def decay(self, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`exp(g)` of a g up to 0 as a sum of two numbers `[1, 1]`, the larger one first.

        A GPU's own exp has errors of some 2^-22, which would add up along a path.
        """
        constant = functools.partial(jnp.full, (1, 1), dtype=jnp.float32)
        one, is_zero = constant(1.0), g < -87.0  # whose exp is no normal number
        g = jnp.where(is_zero, 0.0, g)[None, None]
        power = jnp.floor(self.multiply_add(g, constant(math.log2(math.e)), constant(0.5)))
        for part in (0.693359375, math.log(2) - 0.693359375):  # of log 2, the first has few bits
            g = self.multiply_add(power, constant(-part), g)
        series = one  # (exp(g) - 1) / g
        for number in range(7, 1, -1):
            factor = self.multiply_add(g, constant(1 / number))
            series = self.multiply_add(factor, series, one)
        above_one = self.multiply_add(g, series)
        first = above_one + one
        # No sum that a compiler may cancel.
        second = above_one - self.multiply_add(first, one, -one)
        bits = (power.astype(jnp.int32) + 127) << 23
        scale = jnp.where(is_zero, 0.0, lax.bitcast_convert_type(bits, jnp.float32))
        return first * scale, second * scale

    def advanced(
        self, state: Blocks, decay: tuple[jax.Array, ...], k: Blocks, scale: jax.Array, u: jax.Array
    ) -> Blocks:
        """The state after a node."""
        first, second = decay
        column = self.multiply_add(u, scale)[:, None]
        blocks = []
        for before, part in zip(state, k, strict=True):
            block = self.multiply_add(before, second, self.multiply_add(column, part))
            blocks.append(self.multiply_add(before, first, block))
        return tuple(blocks)

    def read(self, state: Blocks, vector: Blocks, scale: jax.Array) -> jax.Array:
        """`scale (h . vector)` `[p]`."""
        return self.multiply_add(self._product(state, vector), scale)

    def wide(self, vector: Blocks, state: Blocks) -> tuple[Blocks, jax.Array]:
        """A k or q in float32 for each channel `[p, s]`, and one over its length `[p]`."""
        wide = tuple(
            tb.laid_out_as(block, part.astype(jnp.float32)[None, :], interpret=self.interpret)
            for block, part in zip(state, vector, strict=True)
        )
        return wide, lax.rsqrt(self._product(wide, wide) + EPSILON)

    def _product(self, left: Blocks, right: Blocks) -> jax.Array:
        """Sums of products over S `[p]`."""
        total = self.multiply_add(left[0], right[0])
        for x, y in zip(left[1:], right[1:], strict=True):
            total = self.multiply_add(x, y, total)
        return jnp.sum(total, axis=1)

    def multiply_add(
        self, left: jax.Array, right: jax.Array, addend: jax.Array | None = None
    ) -> jax.Array:
        """See `triton.multiply_add`."""
        return tb.multiply_add(left, right, addend, interpret=self.interpret)


def _visit_all(
    rule: Rule,
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    state: Blocks,
    first_node: dict[str, Any],
) -> None:
    """Writes y and u of all queries; `state` is that before the root."""
    visits, y_ref, u_ref = inputs["visits"], outputs["y"], outputs["u"]
    num_nodes, state_size = inputs["k"].shape
    first_query = num_nodes - y_ref.shape[0]
    num_slots = walk.slots(num_nodes)
    to_queries = jnp.full((1,), state_size**-0.5, jnp.float32)

    def if_query(node: jax.Array, write: Any) -> None:
        """Calls `write` with the number of a query, unless a node is none."""
        if first_query:
            pl.when(node >= first_query)(lambda: write(node - first_query))
        else:
            write(node)

    def visit(place: jax.Array, carry: Any) -> Any:
        state, saved, now = carry
        following = _loaded(inputs, place + 1)
        node, parent_slot, slot = walk.visit(now["code"])
        if num_slots:
            state = lax.cond(parent_slot > 0, lambda: _taken(saved, parent_slot), lambda: state)
        k, scale = rule.wide(now["k"], state)
        decay = rule.decay(now["g"])

        def solved() -> jax.Array:
            kept = rule.multiply_add(rule.read(state, k, scale), decay[0][0])
            error = now["v"].astype(jnp.float32) - kept
            return rule.multiply_add(error, now["beta"][None])

        if first_query:
            u = lax.cond(node < first_query, lambda: now["prefix u"], solved)
        else:
            u = solved()
        state = rule.advanced(state, decay, k, scale, u)

        def write(query: jax.Array) -> None:
            read = rule.read(state, *rule.wide(now["q"], state))
            y_ref[query, :] = rule.multiply_add(read, to_queries).astype(y_ref.dtype)
            u_ref[query, :] = u

        if_query(node, write)
        if num_slots:
            saved = lax.cond(slot > 0, lambda: _kept(saved, slot, state), lambda: saved)
        return state, saved, following

    def leave_out(place: jax.Array, _: Any) -> None:
        def write(query: jax.Array) -> None:
            for ref in (y_ref, u_ref):
                ref[query, :] = jnp.zeros(ref.shape[1:], ref.dtype)

        if_query(walk.visit(visits[1 + place])[0], write)

    count = visits[0]
    lax.fori_loop(0, count, visit, (state, (state,) * num_slots, first_node))
    lax.fori_loop(count, num_nodes, leave_out, None)


def _taken(saved: tuple[Blocks, ...], slot: jax.Array) -> Blocks:
    """The state in a slot; slots count from 1."""
    state = saved[0]
    for number, kept in enumerate(saved[1:], start=2):
        state = tuple(jnp.where(slot == number, *pair) for pair in zip(kept, state, strict=True))
    return state


def _kept(saved: tuple[Blocks, ...], slot: jax.Array, state: Blocks) -> tuple[Blocks, ...]:
    """The slots with a state in one of them."""
    return tuple(
        tuple(jnp.where(slot == number, *pair) for pair in zip(state, kept, strict=True))
        for number, kept in enumerate(saved, start=1)
    )


def _loaded(inputs: dict[str, Ref], place: int | jax.Array) -> dict[str, Any]:
    """What a visit needs. It may be of a node that is not visited, and is not used then."""
    code = inputs["visits"][1 + place]
    node, _, _ = walk.visit(code)
    first_query = inputs["k"].shape[0] - inputs["q"].shape[0]
    query = jnp.maximum(node - first_query, 0)
    values = {
        "code": code,
        "q": _blocks(inputs["q"], query),
        "k": _blocks(inputs["k"], node),
        "v": inputs["v"][query, :],
        "g": inputs["g"][node],
        "beta": inputs["beta"][query],
    }
    if first_query:
        values["prefix u"] = inputs["prefix u"][jnp.minimum(node, first_query - 1), :]
    return values


def _parts(ref: Ref) -> list[pl.Slice]:
    """The blocks of the S axis."""
    size = min(_BLOCK, ref.shape[-1])
    return [pl.Slice(start, size) for start in range(0, ref.shape[-1], size)]


def _blocks(ref: Ref, row: Any) -> Blocks:
    """A row of q or k, or a whole state."""
    return tuple(ref[row, part] for part in _parts(ref))
