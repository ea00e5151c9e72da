"""The gated delta rule: what its table does not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import replay_delta, replay_tree_delta, tree_delta
from pallas_kernels.tree_delta import reference
from tests.cases import base
from tests.cases import tree_delta as table
from tests.cases.base import NEEDS_NATIVE, relative_error

CASE = table.CASES["tree"]
replayed = jax.jit(replay_delta)
of_each_version = pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            jax.jit(functools.partial(tree_delta, implementation=name)), id=name, marks=marks
        )
        for name, marks in {"xla": (), "native": NEEDS_NATIVE, "pallas_interpret": ()}.items()
    ],
)


@of_each_version
def test_a_tree_that_grows_is_the_tree(run):
    """As deep trees of draft models do: nodes of a call are siblings, after slots for all nodes."""
    case, first = CASE.but(batch=1, shape="levels"), 0
    q, k, v, g, beta, state, mask = table.arguments(tree_delta, case)
    outputs, u = [], jnp.full(v.shape, jnp.nan)
    for size in (1, 3, 4, 5):
        new, done = slice(first, first + size), jnp.arange(case.nodes) < first
        above = jnp.concatenate([mask, mask[:, new]], axis=1) & done
        own = jnp.pad(jnp.eye(size, dtype=bool), ((case.nodes, 0), (0, 0)))
        tree = jnp.concatenate([above, own[None]], axis=2)
        keys, decays = (
            jnp.concatenate([jnp.where(done.reshape(-1, *rest), x, jnp.nan), x[:, new]], axis=1)
            for x, rest in ((k, (1, 1)), (g, (1,)))
        )
        y, record = run(q[:, new], keys, v[:, new], decays, beta[:, new], state, tree, prefix_u=u)
        outputs.append(y)
        u = u.at[:, new].set(record[:, -size:])
        first += size
    true_y, true_u, states = table.truth(case)
    assert relative_error(jnp.concatenate(outputs, axis=1), true_y) < 3e-7
    assert relative_error(u, true_u) < 3e-7
    assert relative_error(replayed(k, u, g, state, mask[:, -1]), states[:, -1]) < 3e-7


@of_each_version
def test_many_steps_do_not_drift(run):
    """Replay after replay, each of a tree from the state that the last one left."""
    i = table.inputs(CASE)
    state, true = jnp.asarray(i.state, jnp.float32), i.state
    given = table.on_device(CASE, i)
    for turn in range(20):
        path = i.mask[:, turn % CASE.nodes]
        arrays = table.named(given, table.TREE[:5])
        _, u = run(*arrays, state, given.mask)
        state = replayed(given.k, u, given.g, state, jnp.asarray(path))
        _, u, _ = reference.tree_delta(*table.named(i, table.TREE[:5]), true, i.parents)
        true = reference.replay_delta(i.k, u, i.g, true, path)
    assert relative_error(state, true) < 3e-7


PARENTS = (np.arange(64) - 1) // 2  # a binary tree
PATH = [0, 2, 5, 12, 26, 54]
# Native code replays in one pass with a new tree only.
TO_THE_BIT = [
    pytest.param(name, marks=base.MARKS.get(name, ())) for name in ("native", *base.TO_THE_BIT)
]


class Tree:
    """Nodes of a random binary tree of 64, with states of several blocks, run from one state."""

    def __init__(self, implementation):
        case = CASE.but(nodes=64, batch=1, heads=2, groups=1, head_dim=32, state=64)
        if implementation != "native":
            case = case.but(bf16=True)
        self.case, self.implementation = case, implementation
        self.arrays = table.on_device(case, table.inputs(case))
        self.mask = base.ancestor_mask(PARENTS[None])
        self.y, self.u = self.run(range(64))

    def nodes(self, names, nodes):
        return [getattr(self.arrays, name)[:, np.array(nodes)] for name in names]

    def arguments(self, nodes, state=None):
        mask = jnp.array(self.mask[:, nodes][:, :, nodes])
        state = self.arrays.state if state is None else state
        return [*self.nodes(table.TREE[:5], nodes), state, mask]

    def run(self, nodes, **options):
        return base.jitted(tree_delta, self.implementation)(*self.arguments([*nodes]), **options)

    @functools.cached_property
    def states(self):
        """After each node of the path, one token at a time. Its y and u must be those of here."""
        step, state, states = base.jitted(replay_tree_delta, self.implementation), None, []
        record = (*self.nodes("kg", [0]), self.u[:, :1])
        for number, node in enumerate([*PATH, 0]):
            k, g, u = record
            previous = (k, u, g, jnp.full((1, 1), number > 0))
            y, u, state = step(*previous, *self.arguments([node], state))
            states.append(state)
            if number < len(PATH):
                np.testing.assert_array_equal(y, self.y[:, [node]])
                np.testing.assert_array_equal(u, self.u[:, [node]])
            record = (*self.nodes("kg", [node]), u)
        return states[1:]


@pytest.fixture(scope="module", params=TO_THE_BIT)
def tree(request):
    return Tree(request.param)


def test_a_node_has_the_same_bits_in_any_tree(tree):
    for nodes in (range(16), PATH):
        y, u = tree.run(nodes)
        np.testing.assert_array_equal(y, tree.y[:, np.array(nodes)])
        np.testing.assert_array_equal(u, tree.u[:, np.array(nodes)])
    true_y, true_u, _ = reference.tree_delta(
        *table.named(table.inputs(tree.case), table.TREE[:-1]), PARENTS[None]
    )
    assert relative_error(tree.u, true_u) < 3e-7
    assert relative_error(tree.y, true_y) < 3e-3


def test_drafts_that_grow_level_by_level_have_the_bits_of_the_tree(tree):
    u = tree.u[:, :0]
    for first, end in ((0, 1), (1, 3), (3, 7), (7, 15)):
        q, k, v, g, beta, state, mask = tree.arguments([*range(end)])
        y, u = base.jitted(tree_delta, tree.implementation)(
            *(q[:, first:], k, v[:, first:], g, beta[:, first:], state, mask),
            prefix_u=u if first else None,
        )
        np.testing.assert_array_equal(y, tree.y[:, first:end])
        np.testing.assert_array_equal(u, tree.u[:, :end])


@pytest.mark.parametrize("sizes", [(5,), pytest.param((1, 16, 64), marks=pytest.mark.thorough)])
def test_a_replayed_state_has_the_same_bits_before_any_tree(tree, sizes):
    """Also before trees in closed form, whose programs take more channels."""
    k, g = tree.nodes("kg", [*range(64)])
    path = jnp.array(np.isin(np.arange(64), PATH))[None]
    ways = {tree.implementation, tree.implementation.removesuffix(", to the bit")}
    for way in ways:
        replayed = base.jitted(replay_delta, way)(k, tree.u, g, tree.arrays.state, path)
        np.testing.assert_array_equal(replayed, tree.states[-1])
        for size in sizes:
            step = base.jitted(replay_tree_delta, way)
            *_, state = step(k, tree.u, g, path, *tree.arguments([*range(size)]))
            np.testing.assert_array_equal(state, tree.states[-1])
