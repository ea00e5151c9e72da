"""Which implementation of an op runs, and why not another.

Ask for an implementation and get it or an error. Ask for none and get the fastest that runs on the
device. `explain` says which.

    "xla"               closed form in jax.numpy, on any device
    "native"            C++, on CPUs
    "pallas"            Pallas-Triton kernel, on NVIDIA GPUs from compute capability 8.0
    "pallas_interpret"  the same kernel in the Pallas interpreter, on any device; for tests

A model is made with one of these names for all of its ops, so an op without that version runs
XLA's. An op may have further versions, which run on request only (`replay` has "jax_triton").

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
import contextvars
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax

from pallas_kernels import native, triton
from pallas_kernels.numerics import totals

IMPLEMENTATIONS = ("xla", "native", "pallas", "pallas_interpret")
_NONE: Mapping[str, Any] = MappingProxyType({})
_RECORD: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "record", default=None
)
_TO_THE_BIT: contextvars.ContextVar[bool] = contextvars.ContextVar("to_the_bit", default=False)


def run(
    op: str,
    versions: Mapping[str, Any],
    arguments: tuple[Any, ...],
    *,
    requested: str | None,
    unsupported: Mapping[str, str | None] = _NONE,
    xla_derivatives: Literal[True] | Collection[str] = (),
    **settings: Any,
) -> Any:
    """Runs an op in the implementation that `choose` says, on the device of its arguments.

    Args:
        op: name of the op in messages and profiles.
        versions: functions of the arguments and settings, or modules with one of the op's name, by
            implementation: "xla", which every op has; "native"; "pallas", which also takes
            `interpret`; and others that run only on request.
        arguments: pytrees of arrays, or None.
        requested: a name from `IMPLEMENTATIONS` or `versions`; None: the fastest that runs here.
        unsupported: why versions cannot take these arguments, or None, by implementation.
        xla_derivatives: versions in whose place "xla" runs under differentiation, see
            `with_gradients_of`; True: all. Settings must then not be arrays.
        **settings: keyword arguments of all versions.

    Raises:
        ValueError: the requested implementation does not exist or cannot run.
    """
    versions = {name: getattr(each, op, each) for name, each in versions.items()}
    with jax.named_scope(op), on(arguments):
        chosen = choose(op, requested, unsupported, versions)
        version = _version(chosen)
        xla, fast = (functools.partial(versions[name], **settings) for name in ("xla", version))
        if version == "pallas":
            fast = functools.partial(fast, interpret=chosen == "pallas_interpret")
        else:  # only kernels add up parts while they load
            arguments = totals(arguments)
        derived = versions if xla_derivatives is True else xla_derivatives
        if chosen != "xla" and version in derived:
            return with_gradients_of(lambda *sums: xla(*totals(sums)), fast)(*arguments)
        return fast(*arguments)


def with_gradients_of(twin: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fast`, which becomes `twin` under differentiation, in every mode and to every order.

    Derivatives need the intermediate results of `twin`, so `fast` does not run then: a value
    computed with its gradient may differ in rounding from the value alone.
    """
    run = jax.custom_jvp(fast)

    @run.defjvp
    def derivative(arguments: tuple, tangents: tuple) -> tuple[Any, Any]:
        return jax.jvp(twin, arguments, tangents)

    return run


def choose(
    op: str,
    requested: str | None,
    unsupported: Mapping[str, str | None] = _NONE,
    versions: Collection[str] = ("xla", "pallas"),
) -> str:
    """The implementation to run on the default device; a ValueError if the requested one cannot.

    Arguments are those of `run`; "xla" stands in for those of `IMPLEMENTATIONS` that the op lacks.
    """
    known = tuple(dict.fromkeys((*IMPLEMENTATIONS, *versions)))
    if requested not in (None, *known):
        raise ValueError(f"unknown implementation {requested!r} of {op}; known: {known}")
    device = default_device()
    elsewhere = "native" if device.platform == "cpu" else "xla"
    chosen = requested or ("pallas" if device_obstacle(device) is None else elsewhere)
    version = _version(chosen)
    obstacle = _machine_obstacle(version) or unsupported.get(version)
    if requested and obstacle:
        raise ValueError(f"{op} cannot run as {requested!r}: {obstacle}; use 'xla'")
    taken = "xla" if obstacle or version not in versions else chosen
    if taken == "pallas":
        _warn_of_old_jax(jax.__version_info__)
    record = _RECORD.get()
    if record is not None and (obstacle or op not in record):
        record[op] = f"{taken}, since {obstacle}" if obstacle else taken
    return taken


@contextlib.contextmanager
def kernel(
    op: str, requested: str | None, fits: Callable[[], bool], arrays: Any
) -> Iterator[bool | None]:
    """Yields whether a kernel of these arrays is interpreted; None: it does not run, or fits not.

    For ops that are several others where their kernel does not run.
    """
    with on(arrays):
        runs = not (triton.UNAVAILABLE or device_obstacle())
        if not ((_version(requested) == "pallas" if requested else runs) and fits()):
            yield None
            return
        with jax.named_scope(op):
            yield choose(op, requested) == "pallas_interpret"


@functools.cache
def _warn_of_old_jax(version: tuple[int, ...]) -> None:
    """Once: graphs of such a jax leave our kernels out, so that each is launched by the host."""
    if version < (0, 11, 2):
        warnings.warn(
            f"jax {'.'.join(map(str, version))} launches our kernels one by one (jax #27988), which"
            " made steps of small models 2.5 times as long; jax 0.11.2 captures them in a graph",
            stacklevel=2,
        )


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Yields what each op that is traced inside runs as, and what kept it from the fastest way."""
    before = _RECORD.set({})
    try:
        record = _RECORD.get()
        assert record is not None
        yield record
    finally:
        _RECORD.reset(before)


@contextlib.contextmanager
def to_the_bit(wanted: bool) -> Iterator[None]:
    """Makes ops that are traced inside add up in one order, also where another one is faster.

    The result of a trace depends on it, and jax does not know that. So only a program enters it
    that is compiled for one answer, such as a decoder's. An op gives its own jitted function
    `wants_bits()` as a static argument.
    """
    before = _TO_THE_BIT.set(wanted)
    try:
        yield
    finally:
        _TO_THE_BIT.reset(before)


def wants_bits() -> bool:
    """True inside of `to_the_bit(True)`."""
    return _TO_THE_BIT.get()


def explain(device: Any = None) -> str:
    """One line: what runs on a device (None: the default device); why, if it is XLA's code."""
    device = default_device() if device is None else device
    obstacle = triton.UNAVAILABLE or device_obstacle(device)
    if not obstacle:
        return (
            "pallas, and xla for shapes that the kernels refuse; in bfloat16 and 8 bits texts are"
            " exact with small trees, and with all if to_the_bit=True"
        )
    if device.platform == "tpu":
        return f"xla, compiled for TPUs at every change and never run on one: {obstacle}"
    if device.platform != "cpu":
        return f"xla: {obstacle}"
    if missing := native.obstacle():
        return f"xla: {obstacle}; {missing}"
    return f"CPU code for {native.NAMES[native.library()[0]]}; texts exact"


def device_obstacle(device: Any = None) -> str | None:
    """Why the kernels cannot run on a device (None: the default device), or None if they can."""
    device = default_device() if device is None else device
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}, the kernels need an NVIDIA GPU"
    if (generation(device) or 0) < 8:
        capability = getattr(device, "compute_capability", "unknown")
        return f"the device's compute capability is {capability}, the kernels need 8.0 or later"
    return None


def generation(device: Any = None) -> int | None:
    """A GPU's major compute capability (None: the default device's), or None if it has none."""
    device = default_device() if device is None else device
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return int(major) if major.isdigit() else None  # AMD's are words


def on_tpu() -> bool:
    """True if programs are for a TPU, where XLA wants some products in another form."""
    return default_device().platform == "tpu"


def _machine_obstacle(version: str) -> str | None:
    """Why a version cannot run on this machine, whatever the op and its arguments, or None."""
    platform = default_device().platform
    if version == "native" and platform != "cpu":
        return f"the device is a {platform.upper()}, native code is for CPUs"
    if version == "native":
        return native.obstacle()
    return triton.UNAVAILABLE if version == "pallas" else None


def _version(implementation: str) -> str:
    """The key of an implementation in `versions`."""
    return "pallas" if implementation == "pallas_interpret" else implementation


def default_device() -> Any:
    """The device that jax runs on unless committed arguments say otherwise."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def device_of(arrays: Any) -> Any:
    """The device of a computation with a pytree of arrays, one of this process; see the table."""
    default = default_device()
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.core.Tracer):
            of_mesh = jax.typeof(leaf).sharding.mesh.abstract_device
            if of_mesh is not None and _kind(of_mesh) != _kind(default):
                with contextlib.suppress(RuntimeError):  # this machine may only compile for it
                    there = jax.devices(of_mesh.platform)
                    return next((d for d in there if _kind(d) == _kind(of_mesh)), default)
                return default
        elif isinstance(leaf, jax.Array) and leaf.committed:
            devices: list[Any] = list(leaf.sharding.addressable_devices)
            devices.sort(key=lambda d: d.id)
            return default if default in devices else devices[0]
    return default


@contextlib.contextmanager
def on(*arrays: Any) -> Iterator[None]:
    """Makes the device of these arrays the default device, if it is of another kind.

    Ops choose their implementation and their block sizes for the default device. Transfers are
    meant here, whatever `jax.transfer_guard` says.
    """
    device = device_of(arrays)
    is_default = _kind(device) == _kind(default_device())
    with (
        jax.transfer_guard("allow"),
        contextlib.nullcontext() if is_default else jax.default_device(device),
    ):
        yield


def _kind(device: Any) -> tuple[str, str]:
    return device.platform, getattr(device, "device_kind", "")
