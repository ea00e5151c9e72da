"""Weights by their dotted names."""

from typing import Any

import jax


def dotted(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree` as a name."""
    keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return ".".join(map(str, keys))


def flatten(tree: object) -> dict[str, Any]:
    """The leaves of a tree by their dotted path."""
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def unflatten(leaves: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flatten(like)])
