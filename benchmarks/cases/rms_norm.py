"""`gated_rms_norm` and `add_rms_norm`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, draw
from benchmarks.shapes import MIXERS
from pallas_kernels.rms_norm import pallas_triton as kernel
from pallas_kernels.rms_norm import reference

_GATED = dict(norm="gate_then_norm", epsilon=1e-5, num_groups=1)
_ADD = dict(epsilon=1e-5, multiplier=1.0)


def _gated_operands(problem: Problem) -> tuple[jax.Array, ...]:
    normal, size = draw(problem), problem.shape.num_heads * problem.shape.head_dim
    rows = (problem.batch, problem.nodes, size)
    return normal(*rows), normal(*rows), normal(size)


def _true_gated(y: Any, gate: Any, weight: Any, _: Any) -> tuple[np.ndarray]:
    rows = (-1, y.shape[-1])
    truth = reference.gated_rms_norm(y.reshape(rows), gate.reshape(rows), weight, **_GATED)
    return (truth.reshape(y.shape),)


def _add_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """A layer's output whose norm is deferred, with a part of its mean square per head."""
    residual, output, weight = _gated_operands(problem)
    num_parts = problem.shape.num_heads
    parts = jnp.square(draw(problem)(*output.shape[:2], num_parts, dtype="float32"))
    return residual.astype("float32"), output, parts / num_parts, weight


def _add_call(function: Callable[..., Any]) -> Callable[..., tuple]:
    def call(residual: Any, output: Any, mean_squares: Any, weight: Any, **options: Any) -> tuple:
        return function(residual, pk.DeferredRMSNorm(output, mean_squares, 1e-5), weight, **options)

    return functools.partial(call, **_ADD)


def _true_add(
    residual: Any, output: Any, mean_squares: Any, weight: Any, _: Any
) -> tuple[np.ndarray, ...]:
    rows = (-1, output.shape[-1])
    both = reference.add_rms_norm(
        *(residual.reshape(rows), output.reshape(rows), weight),
        deferred=(mean_squares.reshape(-1, mean_squares.shape[-1]), 1e-5),
        **_ADD,
    )
    return tuple(value.reshape(output.shape) for value in both)


CASES = {
    "gated_rms_norm": Case(
        functools.partial(pk.gated_rms_norm, **_GATED),
        functools.partial(kernel.gated_rms_norm, **_GATED),
        _gated_operands,
        _true_gated,
        ("output",),
        MIXERS,
    ),
    "add_rms_norm": Case(
        _add_call(pk.add_rms_norm),
        _add_call(kernel.add_rms_norm),
        _add_operands,
        _true_add,
        ("state", "output"),
        MIXERS,
    ),
}
