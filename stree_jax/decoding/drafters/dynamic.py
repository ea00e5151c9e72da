"""Dynamic draft trees: the draft model keeps its most probable nodes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.numerics import argsort
from stree_jax.array_types import Array, Int
from stree_jax.checks import check_int, is_above_zero
from stree_jax.decoding.draft_model import DraftModel
from stree_jax.decoding.drafters.children import shared_scores
from stree_jax.decoding.drafters.search import BeamDrafter, Continuations, SearchTree
from stree_jax.decoding.types import Step
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology


class DynamicDrafter(BeamDrafter):
    """A beam search that grows a larger tree than requested, and keeps the best nodes.

    The score of a node is the sum along its path of log-probabilities, and of log-confidences from
    a head that has them. Level by level the `expand` best nodes are expanded into their `expand`
    best children; of all scored nodes the best N - 1 become the tree. (EAGLE-2, Li et al., 2024,
    arXiv:2406.16858.) The topology, such as `TreeTopology.budget(N, D)`, gives its sizes only.

    The tree depends on the draft's own probabilities, so no node is a sample of them: only
    verifiers that follow the target accept it, "greedy" and "target_only". Above temperature 0
    children are scored with the noise that the target draws its tokens with.

    Args:
        model: any model with the target's vocabulary, or heads such as `MtpModel`.
        expand: number of nodes to expand in each level below the root, and children of each.
        sharpness: factor of the logits before the softmax. Draft models are under-confident: with
            their own probabilities (1.0) trees are too wide. `tune` measures it.

    Raises:
        ValueError: `model` is not a model, `expand` not a positive integer, or `sharpness` not a
            positive number.
    """

    _child_sampling = "auto"

    def __init__(
        self, model: HybridLM | DraftModel | Any, *, expand: int = 8, sharpness: float | Any = 2.5
    ):
        super().__init__(model)
        if not is_above_zero(sharpness):
            raise ValueError(f"sharpness must be a number above 0, got {shown(sharpness)}")
        self.expand = check_int("expand", expand, 1)
        # An array: one program for all values.
        self.sharpness = jax.device_put(np.float32(sharpness))

    def default_topology(self) -> TreeTopology:
        """16 nodes, and at most 5 drafts on a path."""
        return TreeTopology.budget(16, 5)

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        super().check(target, topology, temperature_is_zero=temperature_is_zero)
        if topology.width == 1 and topology.depth > 1 and not topology.is_budget:
            raise ValueError(
                f"a chain of {topology.depth} drafts: DynamicDrafter chooses the shape, and takes a"
                " size such as TreeTopology.budget(16, 5); for a chain use ModelDrafter"
            )
        pairs, size = itertools.pairwise(self.widths(topology)), self.model.config.vocab_size
        most = sum(width * min(below, size) for width, below in pairs)
        if most < topology.num_nodes - 1:
            raise ValueError(
                f"expand = {self.expand} scores at most {most} drafts in {topology.depth} levels,"
                f" fewer than the {topology.num_nodes - 1} of a tree of {topology.num_nodes} nodes;"
                " raise expand or use a smaller tree"
            )

    def weighed(self, logits: Array, step: Step, depth: int | Array) -> Array:
        """See `BeamDrafter`: with the target's noise above temperature 0, and sharper."""
        if not step.sampling.temperature_is_zero:
            logits = shared_scores(logits, step, depth)
        return logits * self.sharpness

    def widths(self, topology: TreeTopology) -> list[int]:
        """See `BeamDrafter`: those of `expand`."""
        widths = [1]
        for depth in range(1, topology.depth + 1):
            # A tree of N nodes that reaches a level has at most N - depth of them there.
            children = min(self.expand, topology.num_nodes - depth)
            widths.append(min(children, widths[-1] * self.model.config.vocab_size))
        return widths

    def kept(
        self, search_tree: SearchTree, candidates: list[Continuations], topology: TreeTopology
    ) -> tuple[Int[Array, "B N"], Tree, Int[Array, "B N"]]:
        """See `BeamDrafter`: the N best nodes.

        All candidates are in one row, level by level, the continuations of a beam next to each
        other and best first. A node scores at most as high as its parent and comes after it, and
        ties go to the first; so the parents of chosen nodes are chosen.

        Worked example, `expand = 2`, budget(5, 2): the row has the root 0, its children 1 and 2,
        the children 3 and 4 of 1, and 5 and 6 of 2. Say 0 1 2 3 5 are the best: the tree's nodes 0
        to 4, with parents -1 0 0 1 2. The model ran 0 1 2, so places are 0 1 2 -1 -1.
        """
        batch, widths = search_tree.tokens.shape[0], self.widths(topology)

        def row(parts: Array) -> Array:
            return jnp.moveaxis(parts, 1, 0).reshape(batch, -1)

        score, tokens = [jnp.zeros((batch, 1), jnp.float32)], [search_tree.tokens[:, :1]]
        depths, parents = [np.zeros(1, int)], [np.zeros(1, int)]  # the root's parent is itself
        read = [jnp.zeros((batch, 1), jnp.int32)]  # index in the row of each node that was run
        depth, first, first_in_row = 0, 0, 1
        for group in candidates:
            num_levels, _, num_beams, num_each = group.score.shape
            score.append(row(group.score))
            tokens.append(row(group.tokens))
            num_kept = group.kept.shape[2]
            starts, kept = [], []
            for level in range(num_levels):
                beams = np.minimum(np.arange(num_beams), widths[depth] - 1)  # there are no others
                parents.append(np.repeat(first + beams, num_each))
                depths.append(np.full(num_beams * num_each, depth + 1))
                if depth + 1 < topology.depth:
                    kept += [num_kept * level + i for i in range(widths[depth + 1])]
                    starts += [first_in_row] * widths[depth + 1]
                first, depth = first + widths[depth], depth + 1
                first_in_row += num_beams * num_each
            read.append(row(group.kept)[:, np.array(kept, int)] + np.array([starts], np.int32))

        scores = jnp.concatenate(score, axis=1)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # the row fails; its root stays
        best, chosen = lax.top_k(scores, topology.num_nodes)
        order = argsort(chosen)
        chosen = jnp.take_along_axis(chosen, order, axis=1)
        valid = jnp.isfinite(jnp.take_along_axis(best, order, axis=1))
        places = jnp.concatenate(read, axis=1)
        same = (chosen[:, :, None] == places[:, None, :]) & valid[..., None]
        place = jnp.where(same.any(axis=2), lax.argmax(same, 2, jnp.int32), -1)
        # Tree node of each node that was run, if it is chosen.
        node = (chosen[:, :, None] < places[:, None, :]).sum(axis=1, dtype=jnp.int32)

        own_parent = jnp.asarray(np.concatenate(parents), jnp.int32)[chosen]
        above = jnp.take_along_axis(search_tree.tree.ancestor_mask, own_parent[..., None], axis=1)
        above = jnp.take_along_axis(above, jnp.maximum(place, 0)[:, None, :], axis=2)
        mask = above & (place >= 0)[:, None, :] | jnp.eye(topology.num_nodes, dtype=bool)[None]
        is_root = jnp.arange(topology.num_nodes, dtype=jnp.int32)[None] == 0
        parent = jnp.where(valid, jnp.take_along_axis(node, own_parent, axis=1), 0)
        tree = Tree(
            parents=jnp.where(is_root, -1, parent),
            depth=jnp.asarray(np.concatenate(depths), jnp.int32)[chosen],
            ancestor_mask=mask & valid[:, None, :],
            valid=valid,
        )
        words = jnp.take_along_axis(jnp.concatenate(tokens, axis=1), chosen, axis=1)
        return words, tree, place
