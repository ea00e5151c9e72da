"""Kernel forward, XLA derivative."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import dispatch


def differentiable(
    op: str,
    requested: str | None,
    unsupported: str | None,
    *,
    xla: Callable[..., Any],
    kernel: Callable[..., Any],
    **options: Any,
) -> Callable[..., Any]:
    """The implementation of an op to run, with XLA's derivatives.

    Args:
        op, requested, unsupported: see `dispatch.choose`.
        xla, kernel: take the same arrays and options; the kernel also takes `interpret`.
        **options: everything but arrays.

    Returns:
        A function of the arrays.

    Raises:
        ValueError: the requested implementation does not exist or cannot run.
    """
    chosen = dispatch.choose(op, requested, unsupported)
    twin = functools.partial(xla, **options)
    if chosen == "xla":
        return twin
    interpret = chosen == "pallas_interpret"
    return with_gradients_of(twin, functools.partial(kernel, **options, interpret=interpret))


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
