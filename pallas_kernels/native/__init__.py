"""Ops in C++ for CPUs, called through `jax.ffi`."""


def obstacle() -> str | None:
    """Why no native version can run on this machine, or None."""
    return "the native library is not part of this version"
