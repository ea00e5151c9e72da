"""The scans as a recurrence: a node's numbers do not depend on its tree, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from tests.cases import tree_scan as scans
from tests.cases.base import NEEDS_NATIVE, relative_error

IMPLEMENTATIONS = ["pallas_interpret", pytest.param("native", marks=NEEDS_NATIVE)]
MANY = scans.CASES["one row"].but(nodes=64, heads=2, state=64)
GATES = {
    "no gate": None,
    "gate": {},
    "deferred norm": dict(norm_weight=jnp.linspace(0.5, 2, 64)),
    "heads normed alone": dict(norm_weight=jnp.linspace(0.5, 2, 32), norm_per_head=True),
}


class Nodes:
    """A random tree of 64 nodes, whose parts are scanned."""

    def __init__(self, case, gate, implementation, *, to_the_bit=True):
        self.arrays, self.gate = scans.on_device(case, scans.inputs(case)), gate
        self.path = np.flatnonzero(self.arrays.path[0])
        self.projected = jax.random.normal(jax.random.key(0), (1, case.nodes, 256))
        self.options, self.to_the_bit = dict(implementation=implementation), to_the_bit

    def scan(self, nodes, *, before=(), state=None, queries=None):
        """Outputs of the nodes that are queries, and the state after those before."""
        nodes, before = np.array(nodes), np.array(before, int)
        a, queries = self.arrays, nodes[-(queries or len(nodes)) :]
        gate = None if self.gate is None else pk.Gate(self.projected[:, queries], **self.gate)
        tree = (
            *(a.x[:, nodes], a.dt[:, nodes], a.A, a.B[:, nodes], a.C[:, queries], a.D),
            *(a.state if state is None else state, a.mask[:, nodes][:, :, nodes], gate),
        )
        previous = a.x[:, before], a.dt[:, before], a.B[:, before], np.ones((1, len(before)), bool)

        @jax.jit
        def run(previous, *tree):
            *tree, gate = tree
            options = dict(self.options, gate=gate)
            if not len(before):
                return pk.tree_scan(*tree, **options), tree[6]
            return pk.replay_tree_scan(*previous, *tree, **options)

        with dispatch.to_the_bit(self.to_the_bit):
            return run(previous, *tree)


def at(y, nodes):
    """Outputs and mean squares at some nodes."""
    return jax.tree.map(lambda values: np.asarray(values)[:, nodes], y)


assert_equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("gate", GATES)
def test_a_node_has_the_same_bits_in_every_tree(gate, implementation):
    head_dim = 16 if gate == "heads normed alone" else 32
    tree = Nodes(MANY.but(head_dim=head_dim), GATES[gate], implementation)
    path, (whole, state) = tree.path, tree.scan(range(64))
    for nodes in (range(16), path):
        assert_equal(tree.scan(nodes)[0], at(whole, nodes))
    assert_equal(tree.scan(range(64), queries=3)[0], at(whole, range(61, 64)))
    before = ()
    for node in path:
        y, state = tree.scan([node], before=before, state=state)
        assert_equal(y, at(whole, [node]))
        before = [node]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_state_has_the_same_bits_whatever_comes_next(implementation):
    tree = Nodes(MANY, None, implementation)
    state = None
    for node in tree.path:
        state = tree.scan([0], before=[node], state=state)[1]
    a = tree.arrays
    run = jax.jit(functools.partial(pk.replay, implementation=implementation))
    np.testing.assert_array_equal(run(a.x, a.dt, a.A, a.B, a.state, a.path), state)
    in_closed_form = Nodes(MANY, None, implementation, to_the_bit=False)
    for way, nodes in (tree, 5), (tree, 64), (in_closed_form, 16):
        np.testing.assert_array_equal(way.scan(range(nodes), before=tree.path)[1], state)


@pytest.mark.parametrize("nodes", [3, 13])
def test_two_grids_of_one_kernel(nodes):
    """Heads of several blocks after heads of one, and blocks of one size (jax #40847)."""
    for head_dim in (16, 128, 64):
        case = MANY.but(nodes=nodes, head_dim=head_dim, state=128)
        gated = [
            Nodes(case, {}, implementation, to_the_bit=False).scan(range(nodes))[0]
            for implementation in ("pallas_interpret", "xla")
        ]
        assert relative_error(*gated) < 1e-6
