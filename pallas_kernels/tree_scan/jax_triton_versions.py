"""Which versions go with jax-triton 0.3.1, the extra; others fail late, with obscure messages.

What works was found by lowering on a machine without a GPU. jax-triton 0.4 is refused: it fails
with jax 0.12, and calls kernels in another way.
"""

import importlib.metadata
import re

import jax

# From, below.
_JAX_TRITON, _JAX = ((0, 3, 1), (0, 4)), ((0, 10, 2), (0, 13))
_TRITON = (3, 6)


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
    works = (
        _JAX_TRITON[0] <= _numbers(jax_triton) < _JAX_TRITON[1]
        and _JAX[0] <= _numbers(jax_version) < _JAX[1]
        and _numbers(triton) >= _TRITON
    )
    if works:
        return None
    return (
        f"jax-triton {jax_triton}, jax {jax_version} and triton {triton} were never seen to work"
        " together; jax-triton 0.3.1, jax from 0.10.2, before 0.13, and triton from 3.6 do"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """`(0, 12, 0)` for "0.12.0rc1"."""
    return tuple(map(int, re.findall(r"^\d+|(?<=\.)\d+", version)[:3]))
