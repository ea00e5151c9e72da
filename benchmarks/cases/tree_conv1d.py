"""`tree_conv1d`, and `tree_conv1d_layer` as a step of a model calls it."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, accepted, draw, tree_operands, trees
from benchmarks.shapes import MIXERS, MixerShape
from pallas_kernels.tree_conv1d import pallas_triton as kernel
from pallas_kernels.tree_conv1d import reference

_WIDTH = 4


def _operands(problem: Problem) -> tuple[jax.Array, ...]:
    normal, channels = draw(problem), _layout(problem.shape).num_channels
    parents, _ = trees(problem)
    return (
        normal(problem.batch, problem.nodes, channels),
        normal(problem.batch, _WIDTH - 1, channels),
        normal(_WIDTH, channels),
        normal(channels),
        pk.conv_gather_index(jnp.asarray(parents), _WIDTH),
    )


def _layer_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """The layer's inputs, then the record of an earlier tree and the path that was accepted."""
    earlier = problem._replace(seed=problem.seed + 1)
    record, (parents, _) = tree_operands(earlier), trees(earlier)
    layout, normal, rows = _layout(problem.shape), draw(problem), (problem.batch, problem.nodes)
    path = accepted(earlier)
    last = np.where(path.any(axis=1), problem.nodes - 1, -1)
    return (
        normal(*rows, layout.num_columns),
        normal(_WIDTH, layout.num_channels),
        normal(layout.num_channels),
        normal(layout.num_heads, dtype="float32"),
        normal(problem.batch, _WIDTH - 1, layout.num_channels),
        pk.conv_gather_index(jnp.asarray(trees(problem)[0]), _WIDTH),
        *(record[name] for name in ("x", "dt", "B")),
        normal(*rows, layout.num_channels),
        pk.replay_gather_index(jnp.asarray(parents), jnp.asarray(last, jnp.int32), _WIDTH),
    )


def _layout(shape: MixerShape) -> pk.Mamba2Layout:
    heads, head_dim, state, groups = shape
    return pk.Mamba2Layout(heads, head_dim, groups, state, x_heads=heads, b_groups=groups)


def _layout_of(record: tuple) -> pk.Mamba2Layout:
    x, _, B, _ = record
    return _layout(MixerShape(*x.shape[2:], *B.shape[:1:-1]))


def _layer(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`tree_conv1d_layer` of flat operands; returns all outputs in one tuple."""

    def call(*operands: Any, **options: Any) -> tuple:
        *inputs, index, x, dt, B, conv_input, replay_index = operands
        old = pk.Mamba2Pending(x, dt, B, conv_input)
        options |= {"layout": _layout_of(old), "prefix_pending": None}
        pending, C, conv_state = function(*inputs, index, previous=(old, replay_index), **options)
        return (*pending, C, conv_state)

    return call


def _true_layer(*operands: Any) -> tuple[np.ndarray, ...]:
    *inputs, _, x, dt, B, conv_input, replay_index, parents = operands
    pending, C, conv_state = reference.tree_conv1d_layer(
        *inputs,
        parents,
        layout=_layout_of((x, dt, B, conv_input)),
        previous=(conv_input, *_path(replay_index, x.shape[1])),
    )
    return (*pending, C, conv_state)


def _path(replay_index: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents `[B, N]` of the last nodes of a path, and its last node, -1 if it is empty."""
    nodes = replay_index - (_WIDTH - 1)
    parents = np.full((len(nodes), num_nodes), -1)
    for row, path in enumerate(nodes):
        for above, node in itertools.pairwise(path):
            if node >= 0:
                parents[row, node] = max(above, -1)
    return parents, nodes[:, -1]


CASES = {
    "tree_conv1d": Case(
        functools.partial(pk.tree_conv1d, activation="silu"),
        functools.partial(kernel.tree_conv1d, activation="silu"),
        _operands,
        lambda *arguments: (reference.tree_conv1d(*arguments[:4], arguments[-1], "silu"),),
        ("output",),
        MIXERS,
    ),
    "tree_conv1d_layer": Case(
        _layer(pk.tree_conv1d_layer),
        _layer(kernel.tree_conv1d_layer),
        _layer_operands,
        _true_layer,
        ("output", "state", "output", "output", "output", "output"),
        MIXERS,
        unread=lambda operands: sum(array.nbytes for array in operands[6:9]),  # x, dt and B
    ),
}
