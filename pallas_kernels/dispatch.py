"""Which implementation of an op runs, and why not another.

Ask for one and get it or an error; ask for none and get the best that works here. `explain` tells
why.

    "xla"               closed form in jax.numpy, on any device
    "pallas"            Pallas-Triton kernel, on NVIDIA GPUs from compute capability 8.0
    "pallas_interpret"  the same kernel run by an interpreter, on any device; for tests
    "jax_triton"        of `tree_scan` and `replay`: the same algorithm as a Triton kernel, where
                        jax-triton is installed; only if asked for
"""

import jax

from pallas_kernels import jax_triton_backend, triton

IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret", "jax_triton")


def choose(op: str, requested: str | None, unsupported: str | None) -> str:
    """The implementation to run.

    Args:
        op: for messages.
        requested: one of `IMPLEMENTATIONS`, or None for the best that works.
        unsupported: why the kernels cannot take these shapes, or None if it can.

    Raises:
        ValueError: the requested one does not exist or cannot run.
    """
    if requested not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {requested!r}; known: {IMPLEMENTATIONS}")
    if requested == "jax_triton":
        obstacle = jax_triton_backend.obstacle(op) or unsupported
    else:
        obstacle = triton.UNAVAILABLE or unsupported
    if requested is None:
        return "xla" if obstacle or device_obstacle() else "pallas"
    if requested != "xla" and obstacle:
        raise ValueError(f"{op} cannot run as {requested!r}: {obstacle}; use 'xla'")
    return requested


def besides_jax_triton(requested: str | None) -> str | None:
    """What to request of an op that jax-triton does not have, next to ops that it has."""
    return None if requested == "jax_triton" else requested


def explain() -> str:
    """One line: what runs on this machine, and why."""
    obstacle = triton.UNAVAILABLE or device_obstacle()
    return f"xla: {obstacle}" if obstacle else "pallas, and xla for shapes that the kernels refuse"


def device_obstacle() -> str | None:
    """Why the kernels cannot run on the device that computations go to by default, if so."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}, the kernels need an NVIDIA GPU"
    capability = str(getattr(device, "compute_capability", "unknown"))
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < 8:  # AMD's are words
        return f"the device's compute capability is {capability}, the kernels need 8.0 or later"
    return None
