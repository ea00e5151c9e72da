"""A fast version forward, XLA's derivative."""

from collections.abc import Callable
from typing import Any

import jax


def with_gradients_of(twin: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`fast`, and under differentiation `twin`, in every mode and to every order that `twin` has.

    Under differentiation `fast` does not run at all, because derivatives need the intermediate
    results of `twin`. So a value computed with its gradient may differ in rounding from the value
    alone.

    Args:
        twin: computes the same from the same arrays, with operations that have derivatives.
        fast: takes arrays only.
    """
    run = jax.custom_jvp(fast)

    @run.defjvp
    def derivative(arguments: tuple, tangents: tuple) -> tuple[Any, Any]:
        return jax.jvp(twin, arguments, tangents)

    return run
