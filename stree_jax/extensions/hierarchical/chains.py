"""Joining trees, for `CascadeDrafter`."""

import jax.numpy as jnp

from stree_jax import Tree
from stree_jax.array_types import Array, Int


def append_subtree(tree: Tree, node: Int[Array, " B"], lower: Tree) -> Tree:
    """Appends `lower` as a subtree of `node`."""
    batch, num_nodes = tree.parents.shape
    at = node[:, None]
    above = jnp.take_along_axis(tree.ancestor_mask, at[..., None], axis=1)
    above = jnp.broadcast_to(above, (*lower.parents.shape, num_nodes))
    depth = jnp.take_along_axis(tree.depth, at, axis=1) + 1 + lower.depth
    parents = jnp.where(lower.parents < 0, at, num_nodes + lower.parents)
    none = jnp.zeros((batch, num_nodes, lower.parents.shape[1]), bool)
    old = jnp.concatenate([tree.ancestor_mask, none], axis=2)
    new = jnp.concatenate([above, lower.ancestor_mask], axis=2)
    return Tree(
        parents=jnp.concatenate([tree.parents, parents], axis=1),
        depth=jnp.concatenate([tree.depth, depth], axis=1),
        ancestor_mask=jnp.concatenate([old, new], axis=1),
        valid=jnp.concatenate([tree.valid, lower.valid], axis=1),
    )
