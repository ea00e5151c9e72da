"""`tree_scan`, `replay` and both in one kernel, `replay_tree_scan`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, tree_operands
from benchmarks.shapes import MIXERS
from pallas_kernels.replay import pallas_triton as replay_kernel
from pallas_kernels.replay.reference import replay as replay_reference
from pallas_kernels.replay_tree_scan import pallas_triton as fused_kernel
from pallas_kernels.replay_tree_scan.reference import replay_tree_scan as fused_reference
from pallas_kernels.tree_scan import pallas_triton as scan_kernel
from pallas_kernels.tree_scan.reference import tree_scan as scan_reference

LEVEL = "tree_scan of a level"


def _named(*names: str) -> Callable[[Problem], tuple[jax.Array, ...]]:
    def operands(problem: Problem) -> tuple[jax.Array, ...]:
        values = tree_operands(problem)
        return tuple(values[name] for name in names)

    return operands


_scanned = _named("x", "dt", "A", "B", "C", "D", "state", "mask")
_replayed = _named("x", "dt", "B", "path")


def _level_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """A tree whose last quarter of nodes is new."""
    x, dt, A, B, C, D, state, mask = _scanned(problem)
    newest = -(-problem.nodes // 4)
    return x, dt, A, B, C[:, -newest:], D, state, mask


def _fused_operands(problem: Problem) -> tuple[jax.Array, ...]:
    return _replayed(problem._replace(seed=problem.seed + 1)) + _scanned(problem)


def _true_scan(*arguments: Any) -> tuple[np.ndarray]:
    *arguments, _, parents = arguments
    return (scan_reference(*arguments, parents)[0],)


def _true_level(x: Any, dt: Any, A: Any, B: Any, C: Any, *rest: Any) -> tuple[np.ndarray]:
    *others, _, parents = rest
    queries = C.shape[1]
    every = np.zeros((*B.shape[:3], C.shape[3]))
    every[:, -queries:] = C
    return (scan_reference(x, dt, A, B, every, *others, parents)[0][:, -queries:],)


_SCAN = Case(pk.tree_scan, scan_kernel.tree_scan, _scanned, _true_scan, ("output",), MIXERS)
CASES = {
    "tree_scan": _SCAN,
    LEVEL: _SCAN._replace(operands=_level_operands, reference=_true_level, timed=False),
    "replay": Case(
        pk.replay,
        replay_kernel.replay,
        _named("x", "dt", "A", "B", "state", "path"),
        lambda *arguments: (replay_reference(*arguments[:-1]),),
        ("state",),
        MIXERS,
        feedback={4: 0},
    ),
    "replay_tree_scan": Case(
        pk.replay_tree_scan,
        fused_kernel.replay_tree_scan,
        _fused_operands,
        lambda *arguments: fused_reference(*arguments[:11], arguments[-1]),
        ("output", "state"),
        MIXERS,
        feedback={10: 1},
    ),
}
