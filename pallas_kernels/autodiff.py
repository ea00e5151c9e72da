"""Gradients of what has none, such as a kernel: those of a twin that computes the same."""

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
    """The implementation to run, with XLA's gradients.

    Args:
        op, requested, unsupported: those of `dispatch.choose`.
        xla, kernel: take the same arrays and options; the kernel also `interpret`.
        options: what they take beside arrays.

    Returns:
        A function of the arrays.

    Raises:
        ValueError: the requested one does not exist or cannot run.
    """
    chosen = dispatch.choose(op, requested, unsupported)
    twin = functools.partial(xla, **options)
    if chosen == "xla":
        return twin
    interpret = chosen == "pallas_interpret"
    return with_gradients_of(twin, functools.partial(kernel, **options, interpret=interpret))


def with_gradients_of(twin: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`fast`, or where that is differentiated `twin`, in the modes and as often as it can be.

    Both would only be more work, for gradients need what the twin's run leaves. So a value next to
    its gradient may be rounded otherwise than the value alone.

    Args:
        twin: computes the same from the same arrays, by operations that have gradients.
        fast: takes arrays only.
    """
    run = jax.custom_jvp(fast)

    @run.defjvp
    def derivative(arguments, tangents):
        return jax.jvp(twin, arguments, tangents)

    return run
