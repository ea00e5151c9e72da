"""`tree_scan`, `replay`, and `replay_tree_scan` as a step of a model calls it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, draw, tree_operands
from benchmarks.shapes import MIXERS
from pallas_kernels.tree_scan import pallas_triton as kernel
from pallas_kernels.tree_scan import reference


def _named(*names: str) -> Callable[[Problem], tuple[jax.Array, ...]]:
    def operands(problem: Problem) -> tuple[jax.Array, ...]:
        values = tree_operands(problem)
        return tuple(values[name] for name in names)

    return operands


_scanned = _named("x", "dt", "A", "B", "C", "D", "state", "mask")
_replayed = _named("x", "dt", "B", "path")


def _gated_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """With the logarithm of -A, one D per head, and the gate and its norm's weight at the end."""
    previous = _replayed(problem._replace(seed=problem.seed + 1))
    x, dt, A, B, C, D, state, mask = _scanned(problem)
    normal, size = draw(problem._replace(seed=problem.seed + 2)), x.shape[2] * x.shape[3]
    gate, norm_weight = normal(problem.batch, problem.nodes, size), normal(size)
    return (*previous, x, dt, jnp.log(-A), B, C, D[:, 0], state, mask, gate, norm_weight)


def _gated(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`replay_tree_scan` with gate and deferred norm: rows, mean squares, state.

    The parts of the mean squares are summed: their number depends on the block sizes.
    """

    def call(*operands: Any, **options: Any) -> tuple:
        *inputs, gate, norm_weight = operands
        y, state = function(*inputs, gate=pk.Gate(gate, norm_weight), A_is_log=True, **options)
        return y.value, jnp.sum(y.mean_squares, axis=-1), state

    return call


def _true_gated(*arguments: Any) -> tuple[np.ndarray, ...]:
    *previous, x, dt, A, B, C, D, state, _, gate, norm_weight, parents = arguments
    inputs = (*previous, x, dt, -np.exp(A), B, C, D, state, parents)
    outputs, state = reference.replay_tree_scan(*inputs)
    return (*reference.gated(outputs, gate, norm_weight), state)


def _true_scan(*arguments: Any) -> tuple[np.ndarray]:
    *arguments, _, parents = arguments
    return (reference.tree_scan(*arguments, parents)[0],)


CASES = {
    "tree_scan": Case(pk.tree_scan, kernel.tree_scan, _scanned, _true_scan, ("output",), MIXERS),
    "replay": Case(
        pk.replay,
        kernel.replay,
        _named("x", "dt", "A", "B", "state", "path"),
        lambda *arguments: (reference.replay(*arguments[:-1]),),
        ("state",),
        MIXERS,
        feedback={4: 0},
    ),
    "replay_tree_scan": Case(
        _gated(pk.replay_tree_scan),
        _gated(kernel.replay_tree_scan),
        _gated_operands,
        _true_gated,
        ("output", "square", "state"),
        MIXERS,
        feedback={10: 2},
    ),
}
