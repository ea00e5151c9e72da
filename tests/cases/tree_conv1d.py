"""`tree_conv1d` on the table of the scans."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native, tree_conv1d
from pallas_kernels.tree_conv1d import reference
from tests.cases import base, tree_scan
from tests.cases.base import Budget, Op, relative_error

NAMES = ("conv_input", "conv_state", "conv_weight", "conv_bias")
# Cases that differ for a convolution: the activation, and whether there is a bias.
SETTINGS = {
    "root only": (None, True),
    "two nodes": ("silu", False),
    "tree": (None, False),
    "newest level": ("silu", True),
    "a group a head": (None, True),
    "blocks of nodes": ("silu", True),
    "bf16": (None, True),
    "bf16, many nodes": ("silu", True),
}


@functools.cache
def errors(case, implementation):
    values, (activation, has_bias) = tree_scan.inputs(case), SETTINGS[case.name]
    arrays = tree_scan.named(values, NAMES)
    arrays[-1] = arrays[-1] if has_bias else None
    truth = reference.tree_conv1d(*arrays, values.parents, activation)
    window = base.conv_gather_index(base.on_device(values.parents, jnp.int32), case.width)
    first = case.nodes - (case.queries or case.nodes)
    run = functools.partial(tree_conv1d, activation=activation, implementation=implementation)
    on_device = jax.tree.map(lambda value: base.on_device(value, case.kind), arrays)
    got = jax.jit(run)(*on_device, window[:, first:])
    assert got.dtype == case.kind
    return {"output": relative_error(got, truth[:, first:])}


def budgets(case):
    return {"output": Budget(base.OUTPUT[case.bf16])}


def lacks(case, implementation):
    channels = case.heads * case.head_dim + 2 * case.groups * case.state
    is_odd = implementation == "native" and channels % native.LANES != 0
    return is_odd or base.native_lacks_bf16(case, implementation)


CASES = {name: tree_scan.CASES[name] for name in SETTINGS}
TREE_CONV1D = Op(CASES, errors, budgets, base.WITH_NATIVE, lacks=lacks)
