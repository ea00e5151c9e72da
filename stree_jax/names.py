"""Weights by their dotted names. A quantised matrix is one weight."""

from typing import Any

import jax

from pallas_kernels.matmul import QuantizedMatrix


def dotted(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree` as a name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def flatten(tree: object) -> dict[str, Any]:
    """The leaves of a tree by their dotted path."""
    return {
        dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_quantized)
    }


def unflatten(leaves: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`, with the structure of `like`."""
    structure = jax.tree.structure(like, is_leaf=_is_quantized)
    return jax.tree.unflatten(structure, [leaves[name] for name in flatten(like)])


def _is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedMatrix)
