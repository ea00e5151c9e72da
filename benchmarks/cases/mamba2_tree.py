"""`mamba2_tree`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, accepted, draw, tree_operands, trees
from benchmarks.cases.tree_conv1d import conv_operands
from benchmarks.shapes import MIXERS
from pallas_kernels.mamba2_tree import pallas_triton as kernel
from pallas_kernels.mamba2_tree.reference import mamba2_tree as reference

_OUTPUTS = ("output", "square", "output", "state", "output", "output", "output", "state")


def _operands(problem: Problem) -> tuple[jax.Array, ...]:
    """The last operand is the state; see `_call`."""
    earlier = problem._replace(seed=problem.seed + 1)
    before = tree_operands(earlier)
    _, conv_state, weight, bias, window = conv_operands(problem)
    heads = problem.shape.num_heads
    layout = _layout(*problem.shape)
    normal, rows = draw(problem), (problem.batch, problem.nodes)
    _, masks = trees(problem)
    old_parents, last = _along(accepted(earlier))
    return (
        normal(*rows, layout.columns[-1] + heads),
        normal(heads * problem.shape.head_dim),
        *(weight, bias, *(normal(heads, dtype="float32") for _ in range(3))),
        *(conv_state, window, jnp.asarray(masks)),
        *(before[name] for name in ("x", "dt", "B")),
        normal(*rows, layout.num_channels),
        before["path"],
        pk.replay_window(jnp.asarray(old_parents), jnp.asarray(last), weight.shape[0]),
        before["state"],
    )


def _layout(num_heads: int, head_dim: int, state_size: int, num_groups: int) -> pk.Layout:
    return pk.Layout(num_heads, head_dim, num_groups, state_size, num_heads, num_groups)


def _along(path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parents of the nodes of a path `[B, N]`, and its last node, -1 if it is empty."""
    parents, last = np.full(path.shape, -1, np.int32), np.full(len(path), -1, np.int32)
    for row, nodes in enumerate(map(np.flatnonzero, path)):
        parents[row, nodes[1:]] = nodes[:-1]
        last[row] = nodes[-1] if len(nodes) else -1
    return parents, last


def _call(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`mamba2_tree` of flat operands, gated and normed; returns all that it does, the state last.

    The parts of the mean squares are summed: their number depends on the block sizes.
    """

    def call(projected: Any, norm_weight: Any, *operands: Any, **options: Any) -> tuple:
        *weights, conv_state, window, mask, x, dt, B, inputs, path, back, ssm = operands
        old = pk.Mamba2Pending(x, dt, B, inputs)
        y, record, ssm, conv_state = function(
            *(projected, pk.Mamba2Weights(*weights), ssm, conv_state, window, mask),
            layout=_layout(*ssm.shape[1:], B.shape[2]),
            grown=None,
            previous=pk.Previous(old, path, back),
            gated=True,
            norm_weight=norm_weight,
            norm_epsilon=1e-5,
            **options,
        )
        return (y.value, jnp.sum(y.mean_squares, axis=-1), *record, conv_state, ssm)

    return call


def _truth(projected: Any, norm_weight: Any, *operands: Any) -> tuple[np.ndarray, ...]:
    *weights, conv_state, _, _, x, dt, B, inputs, path, _, ssm, parents = operands
    y, record, ssm, conv_state, mean_squares = reference(
        *(projected, weights, ssm, conv_state, parents),
        layout=_layout(*ssm.shape[1:], B.shape[2]),
        previous=((x, dt, B, inputs), path, *_along(path)),
        gated=True,
        norm_weight=norm_weight,
    )
    return (y, mean_squares, *record, conv_state, ssm)


CASES = {
    "mamba2_tree": Case(
        _call(pk.mamba2_tree),
        _call(kernel.mamba2_tree),
        _operands,
        _truth,
        _OUTPUTS,
        MIXERS,
        feedback={-1: -1},
    )
}
