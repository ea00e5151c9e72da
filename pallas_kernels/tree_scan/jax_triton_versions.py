"""Which versions of jax-triton work, and how to call it.

jax-triton is an extra, and is imported only when an op is asked for "jax_triton" by name. Which
versions work together was found by lowering on a machine without a GPU; others are refused, because
they fail late, with obscure messages or silently.
"""

import importlib.metadata
import inspect
import re
import warnings

import jax

# jax-triton from, below; jax from, below; triton from.
_KNOWN = (
    ((0, 3, 1), (0, 4), (0, 10, 2), (0, 13), (3, 6)),
    # The dead code rule of 0.4 takes other arguments than jax 0.12 passes: every jit fails.
    ((0, 4), (0, 5), (0, 11), (0, 12), (3, 7)),
)


def obstacle() -> str | None:
    """Why jax-triton cannot run here, or None."""
    versions = {}
    for package in ("jax-triton", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return incompatible(versions["jax-triton"], jax.__version__, versions["triton"])


def incompatible(jax_triton: str, jax_version: str, triton: str) -> str | None:
    """Why these versions do not work together, or None."""
    together = f"jax-triton {jax_triton}, jax {jax_version} and triton {triton}"
    for first, end, first_jax, end_jax, first_triton in _KNOWN:
        if first <= _numbers(jax_triton) < end:
            if not first_jax <= _numbers(jax_version) < end_jax:
                low, high = (".".join(map(str, version)) for version in (first_jax, end_jax))
                return f"{together} do not work together: it needs jax from {low}, before {high}"
            if _numbers(triton) < first_triton:
                low = ".".join(map(str, first_triton))
                return f"{together} do not work together: it needs triton from {low}"
            return None
    return f"{together} were never tried together"


def call(*arguments, kernel, out_shape, **kwargs):
    """`jax_triton.triton_call` of 0.3 and of 0.4, which renamed the argument for the outputs.

    0.4 also deprecates aliases in favour of a `Ref`, which 0.3 does not have.
    """
    import jax_triton

    outputs = {"out_shape" if passes_aliased_outputs() else "out_type": out_shape}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        return jax_triton.triton_call(*arguments, kernel=kernel, **outputs, **kwargs)


def passes_aliased_outputs() -> bool:
    """True if a kernel gets a second pointer to an array that it updates in place: before 0.4."""
    import jax_triton

    return "out_type" not in inspect.signature(jax_triton.triton_call).parameters


def _numbers(version: str) -> tuple[int, ...]:
    """`(0, 12, 0)` for "0.12.0rc1"."""
    return tuple(map(int, re.findall(r"^\d+|(?<=\.)\d+", version)[:3]))
