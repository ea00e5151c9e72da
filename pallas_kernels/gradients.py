"""Kernels have no gradients of their own; XLA's operations, which compute the same, have."""

from collections.abc import Callable
from typing import Any

import jax


def with_gradients_of(twin: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, with the reverse gradients of `twin`; it then has none in forward mode.

    Args:
        twin: computes the same from the same arrays, by operations that have gradients.
        kernel: takes arrays only.
    """

    def forwards(*arguments):
        return kernel(*arguments), arguments

    def backwards(arguments, cotangents):
        _, gradients = jax.vjp(twin, *arguments)
        return gradients(cotangents)

    run = jax.custom_vjp(kernel)
    run.defvjp(forwards, backwards)
    return run
