"""`tree_conv1d` on the table of the scans."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import tree_conv1d
from pallas_kernels.tree_conv1d import reference
from tests.cases import base, tree_scan
from tests.cases.base import Budget, Op, relative_error

NAMES = ("conv_input", "conv_state", "conv_weight", "conv_bias")
# Cases that differ for a convolution, in turn without the activation and with it.
ACTIVATIONS = {
    "root only": None,
    "two nodes": "silu",
    "tree": None,
    "newest level": "silu",
    "a group a head": None,
    "blocks of nodes": "silu",
    "bf16": None,
    "bf16, many nodes": "silu",
}


@functools.cache
def errors(case, implementation):
    values, activation = tree_scan.inputs(case), ACTIVATIONS[case.name]
    arrays = tree_scan.named(values, NAMES)
    truth = reference.tree_conv1d(*arrays, values.parents, activation)
    window = base.conv_gather_index(jnp.asarray(values.parents, jnp.int32), case.width)
    first = case.nodes - (case.queries or case.nodes)
    run = functools.partial(tree_conv1d, activation=activation, implementation=implementation)
    got = jax.jit(run)(*(jnp.asarray(value, case.kind) for value in arrays), window[:, first:])
    assert got.dtype == case.kind
    return {"output": relative_error(got, truth[:, first:])}


def budgets(case):
    return {"output": Budget(base.OUTPUT[case.bf16])}


TREE_CONV1D = Op({name: tree_scan.CASES[name] for name in ACTIVATIONS}, errors, budgets)
