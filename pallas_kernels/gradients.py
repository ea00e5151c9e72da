"""Gradients of what has none, such as a kernel: those of a twin that computes the same."""

from collections.abc import Callable
from typing import Any

import jax


def with_gradients_of(twin: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`fast`, differentiated as `twin`, in the modes and as often as `twin` can be.

    Args:
        twin: computes the same from the same arrays, by operations that have gradients.
        fast: takes arrays only.
    """
    run = jax.custom_jvp(fast)

    @run.defjvp
    def derivative(arguments, tangents):
        _, change = jax.jvp(twin, arguments, tangents)
        return run(*arguments), change

    return run
