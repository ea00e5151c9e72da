"""`tree_conv1d`."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, draw, trees
from benchmarks.shapes import MIXERS
from pallas_kernels.tree_conv1d import pallas_triton as kernel
from pallas_kernels.tree_conv1d.reference import tree_conv1d as reference


def conv_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """Inputs, convolution state, weight, bias and the index of each tap."""
    heads, head_dim, state, groups = problem.shape
    channels, width = heads * head_dim + 2 * groups * state, 4
    normal = draw(problem)
    parents, _ = trees(problem)
    return (
        normal(problem.batch, problem.nodes, channels),
        normal(problem.batch, width - 1, channels),
        normal(width, channels),
        normal(channels),
        pk.conv_window(jnp.asarray(parents), width),
    )


CASES = {
    "tree_conv1d": Case(
        functools.partial(pk.tree_conv1d, activation="silu"),
        functools.partial(kernel.tree_conv1d, activation="silu"),
        conv_operands,
        lambda *arguments: (reference(*arguments[:4], arguments[-1], "silu"),),
        ("output",),
        MIXERS,
    ),
}
