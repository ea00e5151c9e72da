"""The recurrence: a node's numbers do not depend on its tree, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from tests.cases import tree_scan as scans
from tests.cases.base import relative_error

CASE = scans.CASES["one row"].but(nodes=64, heads=2, head_dim=32, state=64)
WEIGHT = jnp.linspace(0.5, 2, 64)
GATES = {
    "no gate": None,
    "gate": {},
    "deferred norm": dict(norm_weight=WEIGHT),
    "heads normed alone": dict(norm_weight=WEIGHT[:32], norm_per_head=True),
}


def scan(case, gate, nodes, before=(), state=None, queries=0, implementation="pallas_interpret"):
    """Outputs at some nodes of a tree, or the last of them, and the state after a path."""
    values, nodes, path = (
        scans.on_device(case, scans.inputs(case)),
        np.array(nodes),
        bool([*before]),
    )
    x, dt, A, B, C, D, first, mask = scans.named(values, scans.SCANNED)
    query, before = nodes[-queries:], np.array([*before] or [0])
    if gate is not None:
        gate = pk.Gate(jnp.sin(jnp.arange(64 * 128.0)).reshape(1, 64, 128)[:, query], **gate)
    return pk.replay_tree_scan(
        *(x[:, before], dt[:, before], B[:, before], jnp.full((1, len(before)), path)),
        *(x[:, nodes], dt[:, nodes], A, B[:, nodes], C[:, query], D),
        *(first if state is None else state, mask[:, nodes][:, :, nodes]),
        gate=gate,
        implementation=implementation,
    )


@pytest.mark.parametrize("gate", GATES)
def test_a_node_has_the_same_bits_in_every_tree(gate):
    case = CASE.but(head_dim=16) if "alone" in gate else CASE
    run = functools.partial(scan, case, GATES[gate])
    path = np.flatnonzero(scans.inputs(case).path[0])

    def check(y, nodes):
        for got, want in zip(*map(jax.tree.leaves, (y, whole)), strict=True):
            np.testing.assert_array_equal(got, want[:, nodes])

    with dispatch.to_the_bit(True):
        whole, state = run(range(64))
        for nodes in (np.arange(16), path):
            check(run(nodes)[0], nodes)
        check(run(range(64), queries=3)[0], np.arange(61, 64))
        before = ()
        for node in path:
            y, state = run([node], before, state)
            before = [node]
            check(y, before)
        state = run([0], before, state)[1]
        for nodes in (5, 64):
            np.testing.assert_array_equal(run(range(nodes), path)[1], state)
    np.testing.assert_array_equal(run(range(16), path)[1], state)  # in closed form


def test_two_grids_of_one_kernel():
    """Blocks of one size, of heads of several sizes (jax #40847)."""
    for head_dim in (16, 64):
        run = functools.partial(scan, CASE.but(head_dim=head_dim), {}, range(3))
        assert relative_error(run()[0], run(implementation="xla")[0]) < 1e-6
