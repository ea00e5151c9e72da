"""Which implementation of an op runs, and why not another.

Ask for an implementation and get it or an error. Ask for none and get the fastest that runs on the
device. `explain` says why.

    "xla"               closed form in jax.numpy, on any device
    "pallas"            Pallas-Triton kernel, on NVIDIA GPUs from compute capability 8.0
    "pallas_interpret"  the same kernel in the Pallas interpreter, on any device; for tests

An op may know further names (`tree_scan` and `replay` know "jax_triton").

The device is the one that jax will run the op on:

    arrays committed to a device      that device
    inside `jax.jit`, a mesh          the mesh's devices, which the traced types name
    inside `jax.jit`, no mesh         the default device: traced arrays do not say where they are
    uncommitted arrays                the default device, as everywhere in jax

The third line is a trap if a program is jitted for arrays on a device of another platform than the
default, such as a CPU copy of a model on a machine with a GPU. `on` is the way out: it makes the
device of some arrays the default. jax keys its traces by the default device, so both copies of
the model get their own programs. The library's entry points use it:

    with dispatch.on(model):  # or `jax.default_device(device)`
        step(model, cache)
"""

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from pallas_kernels import triton

IMPLEMENTATIONS = ("xla", "pallas", "pallas_interpret")


def choose(
    op: str,
    requested: str | None,
    unsupported: str | None,
    *,
    others: Mapping[str, Callable[[], str | None]] = MappingProxyType({}),
) -> str:
    """The implementation to run on the default device; ops call it inside `on`.

    Args:
        op: name of the op in messages.
        requested: a name from `IMPLEMENTATIONS` or `others`; None: the fastest that runs here.
        unsupported: why the kernels cannot take these shapes, or None if they can.
        others: implementations that only this op has, with a function that returns why each cannot
            run, or None. They run only on request.

    Raises:
        ValueError: the requested one does not exist or cannot run.
    """
    known = (*IMPLEMENTATIONS, *others)
    if requested not in (None, *known):
        raise ValueError(f"unknown implementation {requested!r} of {op}; known: {known}")
    if requested is not None and requested in others:
        obstacle = others[requested]() or unsupported
    else:
        obstacle = triton.UNAVAILABLE or unsupported
    if requested is None:
        return "xla" if obstacle or device_obstacle() else "pallas"
    if requested != "xla" and obstacle:
        raise ValueError(f"{op} cannot run as {requested!r}: {obstacle}; use 'xla'")
    return requested


def explain(device: Any = None) -> str:
    """One line: what runs on a device (None: the default device), and why."""
    obstacle = triton.UNAVAILABLE or device_obstacle(device)
    return f"xla: {obstacle}" if obstacle else "pallas, and xla for shapes that the kernels refuse"


def device_obstacle(device: Any = None) -> str | None:
    """Why the kernels cannot run on a device (None: the default device), or None if they can."""
    device = default_device() if device is None else device
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}, the kernels need an NVIDIA GPU"
    capability = str(getattr(device, "compute_capability", "unknown"))
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < 8:  # AMD's are words
        return f"the device's compute capability is {capability}, the kernels need 8.0 or later"
    return None


def default_device() -> Any:
    """The device that jax runs on unless committed arguments say otherwise."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def device_of(arrays: Any) -> Any:
    """The device that a computation with these arrays runs on; see the table above.

    Args:
        arrays: any pytree of arrays. If they span several devices, one of this process is returned.
    """
    default = default_device()
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.core.Tracer):
            of_mesh = jax.typeof(leaf).sharding.mesh.abstract_device
            if of_mesh is not None and _kind(of_mesh) != _kind(default):
                same = [d for d in _devices(of_mesh.platform) if _kind(d) == _kind(of_mesh)]
                return same[0] if same else default
        elif isinstance(leaf, jax.Array) and leaf.committed:
            devices: list[Any] = list(leaf.sharding.addressable_devices)
            devices.sort(key=lambda d: d.id)
            return default if default in devices else devices[0]
    return default


def on(*arrays: Any) -> contextlib.AbstractContextManager:
    """Makes the device of these arrays the default device, if it is of another kind.

    Ops choose their implementation and their block sizes for the default device.
    """
    device = device_of(arrays)
    if _kind(device) == _kind(default_device()):
        return contextlib.nullcontext()
    return jax.default_device(device)


def _kind(device: Any) -> tuple[str, str]:
    return device.platform, getattr(device, "device_kind", "")


def _devices(platform: str) -> list:
    """Empty if this machine only compiles for the platform."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []
