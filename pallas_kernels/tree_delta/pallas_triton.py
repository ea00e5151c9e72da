"""`tree_delta`, `replay_delta` and `replay_tree_delta` as one Pallas-Triton kernel: a recurrence.

For few nodes `tree_delta_layer` is this kernel too, which begins with `convolve` then.

Passes: a program handles one row, one value head and 16 of its channels. It reads its part of the
state once and keeps it in registers. It goes along the path of the previous tree and writes the
state once (input and output are one buffer). Then it visits the new tree in the order of `walk`,
and keeps states in `walk.slots(N)` further sets of registers where the tree branches. What the next
node needs is loaded one node ahead. Only batches of large trees pay for that: on an H200 a trial of
it took 0.5 to 0.75 of a closed form's time up to 5 nodes and 0.63 for 64 nodes of one row, and 1.8
and 1.65 for 16 and 64 nodes of each of 8 rows.

Numerics: float32. k and q stay as they are, and one over their lengths is a factor of sums:

    u = beta (v - exp(g) (h . k) / |k|);   h <- exp(g) h + (u / |k|) (outer) k;   y = (h . q) / |q|

(with decays of channels `exp(g) k` is rounded, and multiplies h).

A node costs the same operations in the same order in a tree, in a chain and alone, and a replay
repeats the line of h. So y, u and states have the same bits in all of them. No compiler has a say:
`triton.multiply_add` is explicit. A state is rounded once a node, also where decays are near 1:
`_decay` has more digits than a float32.

Refuses head and state sizes that are not powers of two of at least 16, and larger states than
`MOST_STATE`. Any numbers of nodes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels import walk
from pallas_kernels.head_blocks import HeadBlocks
from pallas_kernels.numerics import totals
from pallas_kernels.tree_conv1d.begins import blocked, convolve, fits
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Layout
from pallas_kernels.tree_delta.gates import Decays, StepSizes
from pallas_kernels.tree_delta.xla import EPSILON
from pallas_kernels.triton import Ref
from pallas_kernels.walk import State

# Larger states were not tried. 64 nodes of float32 inputs need 190 registers on sm_90, and 236 with
# decays of channels.
MOST_STATE = {"float32": 128, "bfloat16": 128}
_CHANNELS = 16  # of the head, per program
# Numbers of the S axis that are added up across threads at once. The bits of a sum depend on it.
_BLOCK = 32
_NUM_WARPS = 4


def scan(*arrays: Any, interpret: bool) -> tuple[Array | None, Array | None, Array]:
    """See `api._run`, whose arrays these are: previous and new tree, state, u of a prefix."""
    results = run(*arrays, interpret=interpret)
    return results.get("y"), results.get("u"), results.get("state", arrays[2])


def convolves(convolution: Convolution, state: Array) -> bool:
    """Whether one kernel convolves and runs the delta rule."""
    _, num_heads, head_dim, state_size = state.shape
    dtype = convolution.projected.dtype
    refused = tb.unsupported_state(head_dim, state_size, dtype, MOST_STATE)
    return not refused and fits(convolution, num_heads * head_dim // _CHANNELS, _CHANNELS)


@functools.partial(jax.jit, static_argnames="interpret")
def run(
    previous: tuple[Any, ...] | None,
    tree: tuple[Any, ...] | None,
    state: Array,
    prefix_u: Array | None,
    convolution: Convolution | None = None,
    *,
    interpret: bool,
) -> dict[str, Array]:
    """The results by their names in the kernel; with a convolution a tree is A_log, beta, mask."""
    if (
        convolution is None
        and previous
        and tree
        and isinstance(previous[2], Decays) != isinstance(tree[3], Decays)
    ):
        previous, tree = totals((previous, tree))
    batch, num_heads, head_dim, _ = state.shape
    layout = None if convolution is None else convolution.layout
    some_k = previous[0] if previous else tree[1]  # type: ignore[index]
    num_groups = layout.num_groups if layout else some_k.shape[2]
    part = HeadBlocks(_CHANNELS, num_heads // num_groups)

    def of_decays(g: Any) -> tuple[Any, pl.BlockSpec]:
        if isinstance(g, Decays):
            inputs["A_log"] = part.of(g.A_log, "h")
            g = g.dt[..., None]
        return part.of(g, "b.h.")

    inputs = {"state": part.of(state, "bhp.")}
    first_beta, beta_scale = 0, None
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    if previous is not None:
        k, u, g, path = previous
        steps = walk.steps(path)
        inputs |= {
            "prev k": part.of(k, "b.g."),
            "prev u": part.of(u, "b.hp"),
            "steps": part.of(steps, "b."),
            "prev g": of_decays(g),
        }
        outputs["state"] = inputs["state"]
    if tree is not None:
        *nodes, beta, mask = tree
        if isinstance(beta, StepSizes):
            first_beta, beta_scale, beta = beta.start, beta.scale, beta.projected
        if convolution is None:
            q, k, v, g = nodes
            inputs |= {
                "q": part.of(q, "b.g."),
                "k": part.of(k, "b.g."),
                "v": part.of(v, "b.hp"),
                "g": of_decays(g),
            }
        else:
            inputs["A_log"] = part.of(nodes[0], "h")
            more = blocked(convolution, part, records_x=False)
            inputs, outputs = inputs | more[0], outputs | more[1]
            v = outputs["x"][0]
        inputs["beta"] = part.of(beta, "b.h", first_beta)
        inputs["visits"] = part.of(walk.visits(mask, v.shape[1]), "b.")
        new_u = jax.ShapeDtypeStruct(v.shape, jnp.float32)
        outputs |= {"y": part.of(v, "b.hp"), "u": part.of(new_u, "b.hp")}
    if prefix_u is not None and prefix_u.size:
        inputs["prefix u"] = part.of(prefix_u, "b.hp")
    name = "replay_delta" if tree is None else "tree_delta"
    name = "replay_tree_delta" if previous and tree else name
    return tb.call_by_name(
        functools.partial(
            _kernel,
            beta_scale=beta_scale,
            layout=layout,
            interpret=interpret,
        ),
        inputs,
        outputs,
        name=name if convolution is None else f"{name}_layer",
        num_warps=_NUM_WARPS,
        interpret=interpret,
        in_one_order=True,
        grid=(batch, num_heads, head_dim // _CHANNELS),
    )


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    beta_scale: float | None,
    layout: Mamba2Layout | None,
    interpret: bool,
) -> None:
    """Refs by name, of one row and one head; p channels of it.

    inputs: state [p, S]; of a previous tree prev k [O, S], prev u [O, p], prev g [O, 1 or S] and
    steps [O + 2]; of a new tree q [Q, S], k [N, S], v [Q, p], g [N, 1 or S], beta [Q], visits
    [N + 2], and perhaps prefix u [N - Q, p]. With A_log [] both g are time steps, and with
    `beta_scale` beta is before the sigmoid.
    outputs: state [p, S] after the path; y and u [Q, p].
    With a layout the program convolves v, g (time steps), k and q first, which are outputs x, dt, B
    and C; see `convolve`.
    """
    if layout is not None:
        place = pl.program_id(1), pl.program_id(2)
        convolve(inputs, outputs, layout, *place, interpret=interpret)
        inputs = inputs | {
            name: outputs[to] for name, to in zip("vgkq", ("x", "dt", "B", "C"), strict=True)
        }
    multiply_add = functools.partial(tb.multiply_add, interpret=interpret)
    some_g = inputs["prev g" if "prev g" in inputs else "g"]
    has_channels = layout is None and some_g.shape[-1] > 1
    rate = -jnp.exp(inputs["A_log"][...]) if "A_log" in inputs else None

    def product(left: State, right: State) -> Array:
        """Sums of products over S `[p]`."""
        total: Any = None
        for x, y in zip(left, right, strict=True):
            total = multiply_add(x, y, total)
        return jnp.sum(total, axis=1)

    def read(state: State, vector: State, scale: Array) -> Array:
        """`scale (h . vector)` `[p]`."""
        return multiply_add(product(state, vector), scale)

    def wide(vector: State, state: State) -> tuple[State, Array]:
        """A k or q in float32 for each channel `[p, s]`, and one over its length `[p]`."""
        blocks = tuple(
            tb.laid_out_as(block, part.astype(jnp.float32)[None, :], interpret=interpret)
            for block, part in zip(state, vector, strict=True)
        )
        return blocks, lax.rsqrt(product(blocks, blocks) + EPSILON)

    def decays(g: State, state: State) -> list[tuple[Array, Array]]:
        """See `_decay`; of each block, for all of it or for each channel."""
        if rate is not None:
            g = (multiply_add(g[0], rate),)
        if not has_channels:
            return [_decay(g[0][None, :], multiply_add)] * len(state)
        pairs = zip(state, g, strict=True)
        rows = (tb.laid_out_as(b, part[None, :], interpret=interpret) for b, part in pairs)
        return [_decay(row, multiply_add) for row in rows]

    def advanced(state: State, decay: Any, k: State, scale: Array, u: Array) -> State:
        """The state after a node."""
        column = multiply_add(u, scale)[:, None]
        blocks = []
        for before, part, (first, second) in zip(state, k, decay, strict=True):
            block = multiply_add(before, second, multiply_add(column, part))
            blocks.append(multiply_add(before, first, block))
        return tuple(blocks)

    def before_root() -> State:
        """The state, after the path of a previous tree if there is one."""
        state = _blocks(inputs["state"], slice(None))
        if "steps" not in inputs:
            return state
        k_ref, u_ref, g_ref, steps = (inputs[x] for x in ("prev k", "prev u", "prev g", "steps"))

        def load(node: Array) -> tuple[State, Array, State]:
            return _blocks(k_ref, node), u_ref[node, :], _blocks(g_ref, node)

        def advance(state: State, k: State, u: Array, g: State) -> State:
            return advanced(state, decays(g, state), *wide(k, state), u)

        state = walk.along(steps, load, advance, state)
        for part, block in zip(_parts(k_ref), state, strict=True):
            outputs["state"][:, part] = block
        return state

    if "visits" not in inputs:
        before_root()
        return
    y_ref, u_ref = outputs["y"], outputs["u"]
    num_nodes, state_size = inputs["k"].shape
    first_query = num_nodes - y_ref.shape[0]
    to_queries = jnp.full((1,), state_size**-0.5, jnp.float32)

    def load(node: Array, query: Array) -> dict[str, Any]:
        """It may be a node that is not visited, and is not used then."""
        values = {
            "q": _blocks(inputs["q"], query),
            "k": _blocks(inputs["k"], node),
            "v": inputs["v"][query, :],
            "g": _blocks(inputs["g"], node) if layout is None else (inputs["g"][node][None],),
            "beta": inputs["beta"][query],
        }
        if first_query:
            values["prefix u"] = inputs["prefix u"][jnp.minimum(node, first_query - 1), :]
        return values

    def visited(state: State, node: Array, now: dict[str, Any]) -> tuple[State, Any]:
        k, scale = wide(now["k"], state)
        decay = decays(now["g"], state)

        def solved() -> Array:
            if has_channels:
                both = zip(k, decay, strict=True)
                decayed = tuple(multiply_add(part, one + more) for part, (one, more) in both)
                kept = read(state, decayed, scale)
            else:
                one, more = decay[0]
                kept = multiply_add(read(state, k, scale), (one + more)[0])
            error = now["v"].astype(jnp.float32) - kept
            beta = now["beta"]
            if beta_scale is not None:
                beta = beta_scale * jax.nn.sigmoid(beta.astype(jnp.float32))
            return multiply_add(error, beta[None])

        if first_query:
            u = lax.cond(node < first_query, lambda: now["prefix u"], solved)
        else:
            u = solved()
        return advanced(state, decay, k, scale, u), (now["q"], u)

    def write(query: Array, state: State, q: State, u: Array) -> None:
        y = multiply_add(read(state, *wide(q, state)), to_queries)
        y_ref[query, :] = y.astype(y_ref.dtype)
        u_ref[query, :] = u

    def write_zeros(query: Array) -> None:
        for ref in (y_ref, u_ref):
            ref[query, :] = jnp.zeros(ref.shape[1:], ref.dtype)

    nodes = (inputs["visits"], num_nodes, first_query)
    walk.visit_all(*nodes, before_root, load, visited, write, write_zeros)


def _decay(g: Array, multiply_add: Callable[..., Array]) -> tuple[Array, Array]:
    """`exp(g)` as a sum of two numbers: of 1 and of what is left, where that is small.

    Errors of decays near 1 would add up along a path. Smaller ones make earlier errors small. A
    thread has the decays of several channels, so the series is cheaper than `expm1`.
    """
    series = jnp.full_like(g, 1 / math.factorial(7))
    for n in range(6, 0, -1):
        series = multiply_add(series, g, jnp.full_like(g, 1 / math.factorial(n)))
    is_near = g > -0.5
    return jnp.where(is_near, 1.0, jnp.exp(g)), jnp.where(is_near, multiply_add(series, g), 0.0)


def _parts(ref: Ref) -> list[pl.Slice]:
    """The blocks of the S axis."""
    return tb.parts(ref.shape[-1], _BLOCK)


def _blocks(ref: Ref, row: Any) -> State:
    """A row of q or k, or a whole state."""
    return tuple(ref[row, part] for part in _parts(ref))
