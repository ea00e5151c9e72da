"""A node has the same bits in every tree, after every path and alone; a row among any others.

The interpreter shows the order of our kernels; its products and sums are not those of a GPU.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import triton
from tests.cases import base
from tests.cases import tree_attention_layer as layers
from tests.cases import tree_delta as deltas
from tests.cases import tree_scan as scans

NODES = np.arange(64)  # of a binary tree, and a path in it
PATH = np.array([0, 2, 5, 12, 26, 54])
MASK = base.ancestor_mask((NODES[None] - 1) // 2)
jitted = functools.cache(base.jitted)


def assert_equal(got, wanted, nodes=None):
    """To the bit, at nodes of what is wanted if there are some."""
    for one, whole in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, whole if nodes is None else whole[:, nodes])


def is_on_path(nodes):
    return jnp.array(np.isin(nodes, PATH))[None]


def at(arrays, names, nodes):
    return [getattr(arrays, name)[:, nodes] for name in names]


def scan(way, gate=None, head_dim=32):
    case = scans.CASES["one row"].but(nodes=64, heads=2, state=64, head_dim=head_dim)
    arrays = scans.on_device(case, scans.inputs(case))
    projected = jax.random.normal(jax.random.key(0), (1, 64, 256))

    def run(nodes, queries, before=None, state=arrays.state, way=way, **_):
        x, dt, B = at(arrays, ("x", "dt", "B"), nodes)
        mask, C = MASK[:, nodes][:, :, nodes], arrays.C[:, queries]
        tree = x, dt, arrays.A, B, C, arrays.D, state, mask
        gated = {} if gate is None else {"gate": pk.Gate(projected[:, queries], **gate)}
        if before is None:
            return jitted(pk.tree_scan, way)(*tree, **gated), state
        previous = *at(arrays, ("x", "dt", "B"), before), is_on_path(before)
        return jitted(pk.replay_tree_scan, way)(*previous, *tree, **gated)

    def replay(way, whole):
        steps = arrays.x, arrays.dt, arrays.A, arrays.B, arrays.state, is_on_path(NODES)
        return jitted(pk.replay, way)(*steps)

    return run, replay


def delta(way, apart=False):
    case = deltas.CASES["tree"].but(nodes=64, batch=1, heads=2, groups=1, head_dim=32, state=64)
    case = case.but(bf16=way != "native", apart=apart)
    arrays = deltas.on_device(case, deltas.inputs(case))

    def run(nodes, queries, before=None, state=arrays.state, way=way, whole=None):
        (q, v, beta), (k, g) = at(arrays, ("q", "v", "beta"), queries), at(arrays, "kg", nodes)
        tree = q, k, v, g, beta, state, jnp.array(MASK[:, nodes][:, :, nodes])
        if before is not None:
            (k, g), u = at(arrays, "kg", before), whole[1][:, before]
            *y, state = jitted(pk.replay_tree_delta, way)(k, u, g, is_on_path(before), *tree)
            return y, state
        prefix = nodes[: len(nodes) - len(queries)]
        prefix_u = whole[1][:, prefix] if len(prefix) else None
        y, u = jitted(pk.tree_delta, way)(*tree, prefix_u=prefix_u)
        return (y, u[:, len(prefix) :]), state

    def replay(way, whole):
        steps = arrays.k, whole[1], arrays.g, arrays.state, is_on_path(NODES)
        return jitted(pk.replay_delta, way)(*steps)

    return run, replay


def attention(way):
    """Trees alone are in a batch, and in a cache with more places; the path goes to a new block."""
    draw = base.drawn(layers.CASES["bf16"].but(bf16=False))[1]
    layout, groups = layers.PLAIN, (layers.PLAIN.num_groups, layers.PLAIN.head_dim)
    projected = jnp.asarray(draw(3, 64, layout.num_columns), jnp.float32)
    cached = jnp.asarray(draw(2, 3, groups[0], 90, groups[1]), jnp.float32)
    op = functools.partial(pk.tree_attention_layer, layout=layout)

    def run(nodes, queries, before=None, state=None, way=way, whole=None):
        rows, places, options = (3, 90, {}) if before is None else (1, 64, {})
        start = pk.KVCache(*cached[:, :rows, :, :places], 28 + 7 * jnp.arange(rows))
        mask = np.tile(MASK[:, nodes][:, :, nodes], (rows, 1, 1))[:, len(nodes) - len(queries) :]
        if before is not None:
            nodes_before = pk.NodeKV(*(x[:, before] for x in whole[1:]))
            options = {"previous": (nodes_before, is_on_path(before))}
        elif len(queries) < len(nodes):
            prefix = nodes[: len(nodes) - len(queries)]
            kept = (jnp.tile(x[:, prefix], (rows, 1, 1, 1)) for x in whole[1:])
            options = {"prefix_pending": pk.NodeKV(*kept)}
        depth = mask.sum(axis=2, dtype=np.int32) - 1
        tree = projected[:rows, queries], start if state is None else state, depth, mask
        y, pending, cache = jitted(op, way)(*tree, **options)
        return (y[:1], *(x[:1, -len(queries) :] for x in pending)), cache

    return run, None


WEIGHT = jnp.linspace(0.5, 2, 64)
PER_HEAD = dict(norm_weight=WEIGHT[::2], norm_per_head=True)
# Each begins with the name of its kernel.
OPS = {
    "tree_scan_recurrence": scan,
    "tree_scan_recurrence, gate": functools.partial(scan, gate={}),
    "tree_scan_recurrence, norm": functools.partial(scan, gate=dict(norm_weight=WEIGHT)),
    "tree_scan_recurrence, norm of heads": functools.partial(scan, gate=PER_HEAD, head_dim=16),
    "tree_delta": delta,
    "tree_delta, decays of channels": functools.partial(delta, apart=True),
    "tree_attention_layer": attention,
}
WAYS = ("native", *base.TO_THE_BIT)


def marks(op, way):
    where = [base.MARKS[way]] if way in base.MARKS else []
    return where or [pytest.mark.thorough] * (op == "tree_attention_layer")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((op, way), marks=marks(op, way), id=f"{op}-{way}")
        for op, way in itertools.product(OPS, WAYS)
    ],
)
def tree(request):
    """An op's run and replay, its outputs at 64 nodes, and other ways to come to the same state."""
    op, way = request.param
    run, replay = OPS[op](way)
    whole, _ = run(NODES, NODES)
    assert way == "native" or op.partition(",")[0] in triton.IN_ONE_ORDER
    return run, replay, whole, {way, way.removesuffix(", to the bit")}


def test_a_node_has_the_same_bits_in_every_tree(tree):
    """In smaller ones, and in one that grows."""
    run, _, whole, _ = tree
    for nodes, count in ((NODES[:16], 16), (PATH, 6), (NODES, 3), (NODES[:7], 4)):
        queries = nodes[-count:]
        assert_equal(run(nodes, queries, whole=whole)[0], whole, queries)


@pytest.mark.parametrize("sizes", [(5,), pytest.param((1, 16, 64), marks=pytest.mark.thorough)])
def test_a_path_leaves_the_same_bits(sizes, tree):
    """Token by token, or at once before any tree, also in closed form."""
    run, replay, whole, ways = tree
    state, before = None, NODES[1:2]  # is not on the path
    for node in PATH:
        options = {} if state is None else {"state": state}
        y, state = run(node[None], node[None], before, whole=whole, **options)
        assert_equal(y, whole, node[None])
        before = node[None]
    _, state = run(NODES[:1], NODES[:1], before, state, whole=whole)
    for way in ways:
        for size in sizes:
            assert_equal(run(NODES[:size], NODES[:size], NODES, way=way, whole=whole)[1], state)
        if replay:
            assert_equal(replay(way, whole), state)
    assert "tree_scan" not in triton.IN_ONE_ORDER


NUMBERS = jnp.asarray(4 * np.random.default_rng(0).normal(size=(64, 5040)), jnp.float32)
LAYOUT = pk.Mamba2Layout(2, 16, 1, 16, x_heads=2, b_groups=1)
filled = functools.partial(jnp.resize, NUMBERS)  # of a shape
interpreted = functools.partial(functools.partial, implementation="pallas_interpret")


def added(rows):
    deferred = pk.DeferredRMSNorm(rows, jnp.square(rows[:, :5]), 1e-5)
    return interpreted(pk.add_rms_norm)(rows, deferred, rows[0], epsilon=1e-5, multiplier=0.7)


def experts(rows):
    """Each of 12 experts has some 43 of 64 tokens."""
    chosen = jnp.argsort(rows[:, :12])[:, :8].astype(jnp.int32)
    arrays = rows[:, :32], jnp.abs(rows[:, :8]), chosen, filled((12, 32, 96)), filled((12, 48, 32))
    return interpreted(pk.expert_mlps, activation="silu", gated=True)(*arrays)


def convolved(rows):
    """Nodes of a tree, after a path of two nodes in a tree of 67 nodes, 63 or 4."""
    above, chain = (jnp.arange(n, dtype=jnp.int32)[None] - 1 for n in (len(rows), 68 - len(rows)))
    old = pk.Mamba2Pending(*(filled((1, chain.size, *n)) for n in ((2, 16), (2,), (1, 16), (64,))))
    pending, *results = interpreted(pk.tree_conv1d_layer, layout=LAYOUT)(
        rows[None, :, : LAYOUT.num_columns],
        *(filled((4, 64)), filled(64), filled(2), filled((1, 3, 64))),
        base.conv_gather_index(above // 2, 4),
        previous=(old, base.replay_gather_index(chain, chain[:, 2], 4)),
    )
    return [array[0] for array in (*pending, *results)]


KERNELS = {
    "rms_norm": lambda rows: interpreted(pk.rms_norm, epsilon=1e-5)(rows, rows[0]),
    "add_rms_norm": added,
    "gated_rms_norm": lambda rows: interpreted(pk.gated_rms_norm, num_groups=3)(
        rows, rows, rows[0]
    ),
    "log_softmax": interpreted(pk.log_softmax),
    "expert_product": experts,
    "tree_conv1d": convolved,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_is_the_same_among_others(name):
    program = jax.jit(KERNELS[name])
    whole = program(NUMBERS)
    for count in (1, 5):
        jax.tree.map(
            lambda some, all_rows: np.testing.assert_array_equal(some, all_rows[: len(some)]),
            *(program(NUMBERS[:count]), whole),
        )
    assert name in triton.IN_ONE_ORDER
