"""Which implementation of an op runs, and why not another.

Ask for one and get it or an error; ask for none and get the best that works here. `explain` tells
why.

    "xla"               closed form in jax.numpy, on any device
    "pallas"            Pallas-Triton kernel, on NVIDIA GPUs from compute capability 8.0
    "pallas_interpret"  the same kernel run by an interpreter, on any device; for tests
"""

import jax

from pallas_kernels import triton_backend

IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret")


def choose(op: str, requested: str | None, unsupported: str | None) -> str:
    """The implementation to run.

    Args:
        op: for messages.
        requested: one of `IMPLEMENTATIONS`, or None for the best that works.
        unsupported: why the kernel cannot take these shapes, or None if it can.

    Raises:
        ValueError: the requested one does not exist or cannot run.
    """
    if requested not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {requested!r}; known: {IMPLEMENTATIONS}")
    obstacle = triton_backend.UNAVAILABLE or unsupported
    if requested is None:
        return "xla" if obstacle or jax.default_backend() != "gpu" else "pallas"
    if requested != "xla" and obstacle:
        raise ValueError(f"{op} cannot run as {requested!r}: {obstacle}; use 'xla'")
    return requested


def explain() -> str:
    """One line: what runs on this machine, and why."""
    if triton_backend.UNAVAILABLE:
        return f"xla: {triton_backend.UNAVAILABLE}"
    if jax.default_backend() != "gpu":
        return f"xla: the default backend is {jax.default_backend()!r}, the kernels need a GPU"
    return "pallas, and xla for shapes that the kernels refuse"
