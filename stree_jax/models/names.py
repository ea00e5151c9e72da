"""Weights by their dotted names."""

from typing import Any

import jax


def flatten(tree: object) -> dict[str, Any]:
    """The leaves of a tree by their dotted path."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in where): leaf
        for where, leaf in jax.tree.leaves_with_path(tree)
    }


def unflatten(leaves: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flatten(like)])
