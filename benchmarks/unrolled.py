"""The paper's baseline: a tree verified as a batch of its root-to-leaf paths.

`UnrolledLM` has the interface of `HybridLM`, so the same loop and the same benchmark run on both.
Hidden states and pending record are in the order of the packed tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from stree_jax.models.matrices import loaded_for


class Paths(NamedTuple):
    """Root-to-leaf paths of a tree, `R` rows of `L` positions, and where each node ends up."""

    nodes: jax.Array  # [B, R, L]; 0 past the end of a path
    valid: jax.Array  # [B, R, L]
    place: jax.Array  # [B, N]: row * L + position of a node


def root_to_leaf_paths(tree: st.Tree, num_rows: int, num_positions: int) -> Paths:
    """Unrolls a tree with at most `num_rows` leaves and `num_positions` levels.

    Worked example, parents (-1, 0, 0, 1): the leaves are 2 and 3, so rows are 0 2 and 0 1 3;
    nodes 0 1 2 3 are computed at row 0 position 0, row 1 position 1, 0 1, 1 2.
    """
    nodes = jnp.arange(tree.parents.shape[1])
    is_child = (tree.parents[:, :, None] == nodes) & tree.valid[:, :, None]
    is_leaf = tree.valid & ~is_child.any(axis=1)
    leaves = jnp.argsort(~is_leaf, axis=1)[:, :num_rows]
    exists = jnp.take_along_axis(is_leaf, leaves, axis=1)
    on_path = jnp.take_along_axis(tree.ancestor_mask, leaves[..., None], axis=1)
    on_path &= exists[..., None]
    at_depth = tree.depth[:, None, :] == jnp.arange(num_positions)[:, None]
    at = on_path[:, :, None, :] & at_depth[:, None]  # [B, R, L, N]
    row = jnp.argmax(on_path, axis=1)
    return Paths(jnp.argmax(at, axis=-1), at.any(-1), row * num_positions + tree.depth)


class UnrolledLM(st.HybridLM):
    """Verifies each path as a row with its own state; shared nodes are computed in each."""

    num_rows: int  # most leaves of a tree
    num_positions: int  # most nodes of a path

    @classmethod
    def like(cls, model: st.HybridLM, num_rows: int, num_positions: int) -> "UnrolledLM":
        """The same weights, run on unrolled paths."""
        structure, _ = cls.abstract(model.config, dtype=model.dtype)
        unrolled = nnx.merge(structure, nnx.to_pure_dict(nnx.state(model.in_first())))
        unrolled = loaded_for(model, unrolled)
        unrolled.num_rows, unrolled.num_positions = num_rows, num_positions
        return unrolled

    def tree(  # type: ignore[override]
        self, tokens: jax.Array, tree: st.Tree, cache: Any, *, replay: Any = None, **options: Any
    ) -> tuple[jax.Array, Any, Any]:
        """As `HybridLM.tree` of a whole tree."""
        if replay is not None:
            cache = self.replay(cache, *replay)
        paths = root_to_leaf_paths(tree, self.num_rows, self.num_positions)
        batch, num_nodes = tokens.shape
        unrolled = jnp.take_along_axis(tokens[:, None], paths.nodes, axis=2)
        valid = paths.valid.reshape(-1, self.num_positions)
        hidden, pending, _ = super().tree(
            unrolled.reshape(valid.shape),
            st.TreeTopology.chain(self.num_positions - 1).tree(valid),
            jax.tree.map(lambda value: jnp.repeat(value, self.num_rows, axis=0), cache),
            **options,
        )

        def packed(value: jax.Array) -> jax.Array:
            flat = value.reshape(batch, -1, *value.shape[2:])
            place = paths.place.reshape(batch, num_nodes, *(1,) * (value.ndim - 2))
            return jnp.take_along_axis(flat, place, axis=1)

        return *jax.tree.map(packed, (hidden, pending)), cache
