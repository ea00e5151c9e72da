"""Trees of the draft models of `InterleavedDrafter` and `CascadeDrafter`, which draft chains."""

import jax.numpy as jnp

from stree_jax import Tree
from stree_jax.array_types import Array, Bool, Int


def chain_of(valid: Bool[Array, "B N"]) -> Tree:
    """A chain of nodes, of which some at both ends may be missing."""
    nodes = jnp.arange(valid.shape[1], dtype=jnp.int32)
    above = jnp.pad(valid[:, :-1], ((0, 0), (1, 0)))
    return Tree(
        parents=jnp.where(above, nodes - 1, -1),
        depth=jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0),
        ancestor_mask=(nodes <= nodes[:, None]) & valid[:, None, :],
        valid=valid,
    )


def append_subtree(tree: Tree, node: Int[Array, " B"], lower: Tree) -> Tree:
    """Appends `lower` as a subtree of `node`; where `node` is -1, as a second root."""
    num_nodes = tree.parents.shape[1]
    exists, at = node[:, None] >= 0, jnp.maximum(node, 0)[:, None]
    above = jnp.take_along_axis(tree.ancestor_mask, at[..., None], axis=1) & exists[..., None]
    above = jnp.broadcast_to(above, (*lower.parents.shape, num_nodes))
    depth = jnp.take_along_axis(tree.depth, at, axis=1) + 1
    depth = jnp.where(exists, depth, 0) + lower.depth
    parents = jnp.where(lower.parents < 0, node[:, None], num_nodes + lower.parents)
    none = jnp.zeros((*tree.parents.shape, lower.parents.shape[1]), bool)
    old = jnp.concatenate([tree.ancestor_mask, none], axis=2)
    new = jnp.concatenate([above, lower.ancestor_mask], axis=2)
    return Tree(
        parents=jnp.concatenate([tree.parents, parents], axis=1),
        depth=jnp.concatenate([tree.depth, depth], axis=1),
        ancestor_mask=jnp.concatenate([old, new], axis=1),
        valid=jnp.concatenate([tree.valid, lower.valid], axis=1),
    )
