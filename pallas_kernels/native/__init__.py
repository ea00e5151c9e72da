"""Our own code for CPUs, called inside jitted programs by XLA's foreign-function interface.

C++ with the compilers' vector extensions, built when the package is installed (`build_backend.py`)
and loaded when first used, for the best instructions that this processor has. The environment
variable `STREE_JAX_NATIVE` chooses:

    off      XLA runs
    v3       AVX2 (x86-64-v3), on processors that have more too
    v4       AVX-512 (x86-64-v4)
    v3vnni, v4vnni   the same with products of 8-bit numbers by AVX-VNNI, AVX-512 VNNI
    neon     NEON
    dotprod  NEON with dot products of 8-bit numbers

`obstacle` says why it cannot run, `call` runs a function of it.
"""

import ctypes
import functools
import math
import os
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import build_backend

NAMES = {
    "v3": "AVX2",
    "v4": "AVX-512",
    "v3vnni": "AVX2 and AVX-VNNI",
    "v4vnni": "AVX-512 VNNI",
    "neon": "NEON",
    "dotprod": "NEON with dot products",
}
LANES = 16  # the widest vector's; functions without tails need multiples of it

_INSTALL = "`pip install .` builds it, in a checkout `pip install -e .`"


@functools.cache
def obstacle() -> str | None:
    """Why the library cannot run here, or None.

    Raises:
        ValueError: `STREE_JAX_NATIVE` names instructions that are none, or whose library is not
            there or older than its sources.
    """
    try:
        library()
        register("stree_jax_matmul")  # XLA refuses all of the library's functions, or none
    except OSError as error:
        if (chosen := _wanted()) not in ("", "off"):
            raise ValueError(f"STREE_JAX_NATIVE={chosen}: {error}") from None
        return str(error)
    return None


def level() -> str | None:
    """The instructions that it runs with, such as "v4"; None: it does not run."""
    return None if obstacle() else library()[0]


def unsupported(*arrays: Any, **sizes: int) -> str | None:
    """Why functions for float32 and whole vectors cannot run, or None."""
    others = {array.dtype.name for array in arrays} - {"float32"}
    if others:
        return f"native code is for float32, got {', '.join(sorted(others))}"
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % LANES]
    return f"{odd[0]} is not a multiple of {LANES}" if odd else None


def rows_of(array: jax.Array) -> jax.Array:
    """All rows of an array `[..., M]` in one axis."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def call(
    name: str,
    results: Any,
    *arrays: jax.Array | None,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """Calls a function of the library, such as "matmul", in a program for a CPU.

    An array that is None becomes no numbers. The function checks all their sizes. `aliases` says
    which argument it writes in place, and as which result. Attributes are static, floats in
    float32.
    """
    target = f"stree_jax_{name}"
    register(target)
    function = jax.ffi.ffi_call(
        target, results, input_output_aliases=aliases, vmap_method="sequential"
    )
    given = (jnp.zeros(0, jnp.float32) if array is None else array for array in arrays)
    floats = {key: np.float32(v) for key, v in attributes.items() if isinstance(v, float)}
    return function(*given, **attributes | floats)


@functools.cache
def register(target: str) -> None:
    """Tells XLA of a function of the library; an OSError if it was built for a newer version."""
    function = getattr(library()[1], target)
    try:
        # Before the CPU has started, the function would wait, and a refusal make the start fail.
        jax.devices("cpu")
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    except RuntimeError as error:
        raise OSError(f"jax {jax.__version__} refuses the native library: {error}") from None


@functools.cache
def library() -> tuple[str, ctypes.CDLL]:
    """Returns the instructions and the loaded library, or raises an OSError that says why not."""
    chosen = chosen_level()
    file = build_backend.library(chosen)
    if not file.is_file():
        why = build_backend.failure()  # as the build has left it
        reason = why.read_text().strip() if why.is_file() else _INSTALL
        raise OSError(f"the native library is not built: {reason}")
    try:
        _check(file)
        loaded = ctypes.CDLL(str(file))
        made_of = ctypes.c_char_p.in_dll(loaded, "stree_jax_sources").value or b""
    except (OSError, ValueError) as error:
        raise OSError(f"the native library cannot be loaded: {error}; {_INSTALL}") from None
    if build_backend.digest() not in ("", made_of.decode()):
        raise OSError(f"the native library is older than its sources: {_INSTALL}")
    return chosen, loaded


def _check(file: Path) -> None:
    """Raises an OSError for a file of Linux that is cut short: loading it would end the process."""
    with file.open("rb") as opened:
        head = opened.read(64)
    if head.startswith(b"\x7fELF") and len(head) == 64:
        start, size, count = struct.unpack_from("<Q10xHH", head, 40)  # its end: a table of sections
        if file.stat().st_size < start + size * count:
            raise OSError(f"{file} is cut short")


def _wanted() -> str:
    return os.environ.get("STREE_JAX_NATIVE", "").lower()


def chosen_level() -> str:
    """Returns the chosen instructions, or the best of this processor's that were built."""
    lacking = {name: build_backend.lacks(name) for name in build_backend.levels()}
    chosen = _wanted()
    if chosen == "off":
        raise OSError("STREE_JAX_NATIVE=off")
    if chosen:
        if chosen not in lacking:
            raise ValueError(f"STREE_JAX_NATIVE must be one of {('off', *lacking)}, got {chosen!r}")
        if lacking[chosen]:
            raise ValueError(f"STREE_JAX_NATIVE={chosen}: this processor has no {lacking[chosen]}")
        return chosen
    if not lacking:
        raise OSError("there is no native code for this processor")
    able = [name for name, missing in lacking.items() if not missing]
    if not able:
        raise OSError(f"this processor has no {next(iter(lacking.values()))}")
    return next((name for name in able[::-1] if build_backend.library(name).is_file()), able[-1])
