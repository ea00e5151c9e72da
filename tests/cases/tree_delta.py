"""`tree_delta`, `replay_delta`, `replay_tree_delta` and `delta_chunks` on one table."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import (
    Decays,
    PartialSums,
    StepSizes,
    delta_chunks,
    native,
    replay_delta,
    replay_tree_delta,
    tree_delta,
)
from pallas_kernels.tree_delta import reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error
from tests.cases.tree_scan import SIZES, named, state_error
from tests.numpy_parts import sigmoid

HOSTILE = dict(keys="equal", betas="near 1", decays="near 0")
STRAYS = dict(padded=5, replayed=17, shape="chain", decays="-100 among 0", strays=True)
CASES = base.table(
    {
        "root only": dict(nodes=1, replayed=1),
        "two nodes": dict(nodes=2, groups=4),
        "tree": {},
        "chain": dict(shape="chain", nodes=16),
        "newest level, others not there yet": dict(queries=5, missing=4),
        "newest level": dict(queries=3),
        "newest node of many": dict(nodes=40, queries=1, heads=2, groups=1),
        "newest half of many": dict(nodes=40, queries=20, batch=1),
        "a group a head": dict(groups=4, head_dim=32),
        "one group": dict(groups=1, state=24, head_dim=12),
        "padded nodes": dict(padded=5, replayed=17),
        "padded nodes of a level": dict(padded=2, queries=5),
        "padded nodes that see others": dict(STRAYS),
        "padded nodes that see others, infinite": dict(STRAYS, fill=np.inf),
        "64 nodes": dict(nodes=64, batch=1),
        "64 nodes in a chain": dict(nodes=64, batch=1, shape="chain"),
        "three rows, one with an empty path": dict(batch=3, nodes=5),
        "betas of 0 and 1": dict(betas="0 or 1"),
        "betas to 2": dict(betas="to 2", nodes=64, batch=1),
        "decays of -100 among 0": dict(decays="-100 among 0", nodes=64, batch=1),
        "decays of -100 among 0, chain": dict(
            decays="-100 among 0", nodes=64, batch=1, shape="chain"
        ),
        "decays of -1e6 among 0": dict(decays="-1e6 among 0", nodes=40, batch=1, heads=2),
        "decays of six decades": dict(decays="six decades", nodes=64, batch=1),
        "tiny keys": dict(keys="tiny"),
        "keys of one sign": dict(HOSTILE, keys="one sign", nodes=64, batch=1, shape="chain"),
        "equal keys": dict(HOSTILE, nodes=64, batch=1, shape="chain"),
        "equal keys, tree": dict(HOSTILE, nodes=64, batch=1),
        "equal keys, betas to 2": dict(
            HOSTILE, betas="to 2", nodes=64, batch=1, shape="chain", heads=2, groups=1
        ),
        "sizes that are released": dict(
            nodes=40, batch=1, shape="chain", heads=2, groups=1, head_dim=128, state=128
        ),
        "bf16": dict(bf16=True),
        "star": dict(shape="star"),
        "decays to a bound": dict(decays="to a bound", nodes=64, batch=1, shape="chain", heads=2),
        "gates in the op": dict(deferred=True),
    },
    **SIZES,
    groups=2,
    shape="random",
    keys="random",
    betas="random",
    decays="moderate",
    apart=False,  # each channel of a key has a decay
    deferred=False,  # gates are `Decays` and `StepSizes`
    fill=np.nan,  # all that nodes hold that do not exist
    strays=False,  # their rows of the mask are nonsense
    holes=False,  # positions of a sequence that are not valid are anywhere
    chunk_size=8,
    missing=0,  # nodes before the queries that a growing tree has places for
)
CASES |= {
    f"channels, {name}": CASES[name].but(apart=True, name=f"channels, {name}")
    for name in (
        *(
            "root only",
            "tree",
            "newest level, others not there yet",
            "padded nodes that see others",
        ),
        *("decays of -1e6 among 0", "decays of six decades", "decays to a bound", "equal keys"),
        *("64 nodes", "sizes that are released", "bf16"),
    )
}
# Of standard normal numbers.
BETAS = {
    "random": sigmoid,
    "0 or 1": lambda x: (x > 0).astype(float),
    "near 1": lambda x: 1 - 1e-4 * np.abs(x),
    "to 2": lambda x: 2 / (1 + np.exp(-3 * x)),
}
DECAYS = {
    "moderate": lambda x: -0.5 * np.abs(x),
    "near 0": lambda x: -1e-4 * np.abs(x),
    "-100 among 0": lambda x: np.where(x > 0.7, -100.0, -1e-4 * np.abs(x)),
    "-1e6 among 0": lambda x: np.where(x > 0.7, -1e6, -1e-4 * np.abs(x)),
    "six decades": lambda x: -np.minimum(100.0, 10.0 ** (-1.5 + 2 * x)),
    "to a bound": lambda x: -5.0 * sigmoid(3 * x),
}
PARENTS = {
    "random": base.random_parents,
    "chain": lambda rng, batch, nodes: np.tile(np.arange(nodes) - 1, (batch, 1)),
    "star": lambda rng, batch, nodes: np.tile(np.minimum(np.arange(nodes), 1) - 1, (batch, 1)),
}


@functools.cache
def inputs(case, seed=0):
    """Exact float64 inputs; a row's path ends at `last`, -1: it is empty."""
    rng, draw = base.drawn(case, seed)
    rounded = ml_dtypes.bfloat16 if case.bf16 else np.float32
    batch, nodes = case.batch, case.nodes
    parents = PARENTS[case.shape](rng, batch, nodes)
    mask = base.ancestor_mask(parents) & (np.arange(nodes) < nodes - case.padded)
    first = nodes - case.padded
    if case.strays:  # they see all nodes, or one whose decay is not theirs
        mask[:, first:] = np.tri(nodes, k=-1, dtype=bool)[first:]
        mask[:, first + 1 :, : first - 1] = False
    valid = np.broadcast_to(np.arange(nodes) < first, (batch, nodes))
    if case.holes:
        valid = valid & (np.random.default_rng(2).random(valid.shape) < 0.7)
    k = draw(batch, nodes, case.groups, case.state)
    if case.keys == "equal":
        k = np.broadcast_to(k[:, :1], k.shape)
    elif case.keys == "one sign":
        k = np.abs(k) + 1
    elif case.keys == "tiny":
        k = k * 1e-3
    numbers = dict(
        g=DECAYS[case.decays](
            draw(batch, nodes, case.heads, *[case.state] * case.apart, dtype=np.float32)
        ),
        beta=BETAS[case.betas](draw(batch, nodes, case.heads, dtype=np.float32)),
    )
    return SimpleNamespace(
        q=draw(batch, nodes, case.groups, case.state),
        k=k.astype(rounded).astype(np.float64),
        v=draw(batch, nodes, case.heads, case.head_dim),
        **{name: x.astype(np.float32).astype(np.float64) for name, x in numbers.items()},
        state=draw(batch, case.heads, case.head_dim, case.state, dtype=np.float32),
        parents=parents,
        mask=mask,
        valid=valid,
        **base.accepted(case, mask),
    )


def before(case):
    """The tree before, and the seed of its numbers."""
    return case.but(nodes=case.replayed, padded=0, strays=False), 1


def previous(case):
    """Inputs of the tree before, and the path that was accepted in it."""
    return inputs(*before(case))


TREE = ("q", "k", "v", "g", "beta", "state", "parents")
RECORD = ("k", "u", "g")


@functools.cache
def truth(case, seed=0):
    """Outputs, u and states of all nodes in float64."""
    return reference.tree_delta(*named(inputs(case, seed), TREE))


@functools.cache
def truth_before(case):
    return truth(*before(case))


def on_device(case, values, u=None):
    """The inputs in the types that models have them in, with `fill` where no node is."""
    kinds = dict.fromkeys(("q", "k", "v"), case.kind) | dict.fromkeys(("g", "beta"), jnp.float32)
    arrays = {name: base.on_device(getattr(values, name), kind) for name, kind in kinds.items()}
    if u is not None:
        arrays["u"] = base.on_device(u, jnp.float32)
    if case.padded:
        arrays = {name: x.at[:, -case.padded :].set(case.fill) for name, x in arrays.items()}
    if case.deferred:
        logs = jnp.arange(case.heads) * jnp.log(2.0)
        arrays["g"] = Decays(-arrays["g"] / jnp.exp2(jnp.arange(case.heads)), logs)
        half = base.on_device(values.beta / 2)
        columns = jnp.pad(jnp.log(half / (1 - half)), ((0, 0), (0, 0), (2, 1)))
        columns = PartialSums(jnp.stack([columns - 1, jnp.ones_like(columns)]), jnp.float32)
        arrays["beta"] = StepSizes(columns, 2, case.heads, 2.0)
    kept = {name: base.on_device(getattr(values, name)) for name in ("mask", "path", "valid")}
    state = base.on_device(values.state, jnp.float32)
    return SimpleNamespace(**arrays, **kept, state=state)


def arguments(op, case):
    """What an op takes by position, of a tree of which all nodes are queries, or of a sequence."""
    given = on_device(case, inputs(case))
    floats = named(given, TREE[:-1])
    if op is delta_chunks:
        return [*floats, given.valid]
    if op is replay_delta:
        return [*named(on_device(case, inputs(case), truth(case)[1]), (*RECORD, "state", "path"))]
    if op is tree_delta:
        return [*floats, given.mask]
    before = on_device(case.but(padded=0), previous(case), truth_before(case)[1])
    return [*named(before, (*RECORD, "path")), *floats, given.mask]


def node_error(case, got, true, first=0):
    """Of the nodes from `first` on that exist. The others are 0."""
    end = case.nodes - case.padded
    assert not np.asarray(got[:, end - first :], np.float32).any()
    return relative_error(got[:, : end - first], true[:, first:end])


@functools.cache
def tree_errors(case, implementation):
    given = on_device(case, inputs(case))
    true_y, true_u, _ = truth(case)
    first = case.nodes - (case.queries or case.nodes)
    kept, gap = [*range(first), *range(first + case.missing, case.nodes + case.missing)], first

    def grown(array, axis=1, fill=np.nan):
        """With places for nodes that are not there yet."""
        places = jnp.full(case.missing, gap, int)
        return jnp.insert(array, places, fill, axis=axis) if case.missing else array

    prefix_u = grown(base.on_device(true_u[:, :first], jnp.float32)) if first else None
    run = base.jitted(tree_delta, implementation)
    y, u = run(
        *(given.q[:, first:], grown(given.k), given.v[:, first:], grown(given.g)),
        *(given.beta[:, first:] if first else given.beta, given.state),
        grown(grown(given.mask, 1, False), 2, False),
        prefix_u=prefix_u,
    )
    assert (y.dtype, u.dtype) == (case.kind, jnp.float32)
    u = u[:, jnp.array(kept)]
    return {"y": node_error(case, y, true_y, first), "u": node_error(case, u, true_u)}


@functools.cache
def replay_errors(case, implementation):
    """Against the states of the tree, not against a replay."""
    values, (_, _, states) = inputs(case), truth(case)
    run = base.jitted(replay_delta, implementation)
    state = run(*arguments(replay_delta, case))
    after = states[np.arange(case.batch), values.last]
    true = np.where((values.last < 0)[:, None, None, None], values.state, after)
    return {"state": state_error(state, true, values, values.last)}


@functools.cache
def fused_errors(case, implementation):
    values, before, (_, u, _) = inputs(case), previous(case), truth_before(case)
    run = base.jitted(replay_tree_delta, implementation)
    y, u_new, state = run(*arguments(replay_tree_delta, case))
    true_y, true_u, true_state = reference.replay_tree_delta(
        *(before.k, u, before.g, before.path), *named(values, TREE)
    )
    return {
        "y": node_error(case, y, true_y),
        "u": node_error(case, u_new, true_u),
        "state": state_error(state, true_state, values, before.last),
    }


@functools.cache
def chunks_errors(case, implementation):
    """The nodes as a sequence; positions that are not valid hold NaN, and their outputs are 0."""
    values, given = inputs(case), on_device(case, inputs(case))
    arrays = [np.array(x) for x in named(given, TREE[:5])]
    for x in arrays:
        x[~values.valid] = np.nan
    options = dict(chunk_size=case.chunk_size, implementation=implementation)
    run = jax.jit(functools.partial(delta_chunks, **options))
    y, state = run(*map(base.on_device, arrays), given.state, given.valid)
    assert (y.dtype, state.dtype) == (case.kind, jnp.float32)
    y = np.asarray(y, np.float64)
    assert not y[~values.valid].any()
    true_y, true_state = reference.delta_chunks(*named(values, TREE[:-1]), values.valid)
    return {"y": relative_error(y, true_y), "state": relative_error(state, true_state)}


def budgets(*names):
    """About twice what was measured; native code rounds the state each step.

    The recurrence of a GPU does too. (The interpreter also rounds the products of multiply-adds.)
    The closed form of a GPU solves a system that equal keys make hard.
    """

    def of(case):
        exact = 1e-6 if case.keys in ("equal", "one sign") else 3e-7
        steps = names == ("y", "state") and case.decays == "near 0"

        def budget(name):
            ratio = 2.5 if name == "u" and case.keys == "equal" else 1.5
            return Budget(
                3e-3 if case.bf16 and name == "y" else exact,
                None if case.bf16 or steps else ratio,
                floor=4e-8 if name == "state" else 2e-8,
            )

        return {name: budget(name) for name in names}

    return of


def lacks(case, implementation):
    """All are for whole vectors; native code for float32, the kernel for states in registers."""
    odd = case.head_dim % native.LANES or case.state % native.LANES
    other = case.bf16 if implementation == "native" else case.state > 64
    return implementation != "xla" and bool(odd or other)


# The three ops are one kernel. These have several blocks of nodes and of decays, prefixes, nodes
# that do not exist, rows whose path is empty, and both types.
TREE_DELTA = Op(
    *(CASES, tree_errors, budgets("y", "u"), base.WITH_NATIVE),
    lacks=lacks,
    interpreted=(
        *(
            "newest level, others not there yet",
            "newest half of many",
            "padded nodes of a level",
            "bf16",
        ),
        *("padded nodes that see others", "padded nodes that see others, infinite"),
        *("decays of -1e6 among 0", "equal keys, betas to 2"),
        *("channels, newest level, others not there yet", "channels, decays of -1e6 among 0"),
        *("channels, padded nodes that see others", "channels, bf16"),
    ),
)
WHOLE = {name: case for name, case in CASES.items() if case.queries is None}
REPLAY_DELTA = Op(
    *(WHOLE, replay_errors, budgets("state"), base.IMPLEMENTATIONS),
    lacks=lacks,
    interpreted=(
        *("64 nodes in a chain", "three rows, one with an empty path"),
        *("channels, tree", "channels, equal keys"),
    ),
)
FUSED = (
    *("root only", "tree", "chain", "a group a head", "padded nodes", "64 nodes"),
    *("three rows, one with an empty path", "decays of -100 among 0", "bf16"),
    *("channels, tree", "channels, padded nodes that see others", "channels, decays to a bound"),
    "gates in the op",
)
REPLAY_TREE_DELTA = Op(
    *({name: CASES[name] for name in FUSED}, fused_errors, budgets("y", "u", "state")),
    base.WITH_NATIVE,
    lacks=lacks,
    interpreted=("root only", "padded nodes", "bf16", "channels, tree", "gates in the op"),
)
SEQUENCES = (
    *("root only", "tree", "one group", "padded nodes", "64 nodes", "betas to 2"),
    *("a group a head", "decays of -100 among 0", "decays of six decades"),
    *("keys of one sign", "equal keys", "sizes that are released", "bf16"),
    *(name for name in CASES if name.startswith("channels") and "newest" not in name),
)
HOLES = {
    name: CASES["64 nodes"].but(holes=True, chunk_size=size, name=name)
    for size in (1, 5, 16, 64, 100)
    for name in [f"holes, chunks of {size}"]
}
DELTA_CHUNKS = Op(
    *({name: CASES[name] for name in SEQUENCES} | HOLES, chunks_errors, budgets("y", "state")),
    ("xla", "native"),
    lacks=lacks,
)
