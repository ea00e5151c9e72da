"""Dynamic draft trees: the draft model keeps its most probable nodes."""

import itertools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Float, Float32, Int, Key
from stree_jax.checks import check_int
from stree_jax.decoding.drafters.base import root_only
from stree_jax.decoding.drafters.children import shared_scores
from stree_jax.decoding.drafters.levels import (
    MAX_UNROLLED,
    level_behind,
    padded,
    with_level,
    with_zeros,
)
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState, OwnTree
from stree_jax.decoding.drafters.search import (
    Continuations,
    Found,
    append,
    below_catch_up,
    best_continuations,
    first_nodes,
)
from stree_jax.decoding.sampling import all_finite
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.messages import shown
from stree_jax.models.cache import Cache, Path, Pending, path_to
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology


class DynamicDrafter(ModelDrafter):
    """A draft model that grows a larger tree than requested, and keeps the best nodes.

    The score of a node is the sum of log-probabilities along its path. Level by level the
    `expand` best nodes are expanded into their `expand` best children; of all scored nodes the
    best N - 1 become the tree. (EAGLE-2, Li et al., 2024, arXiv:2406.16858.) The
    topology, such as `TreeTopology.budget(N, D)`, gives sizes only: its nodes and its depth.

    The tree depends on the draft's own probabilities, so no node is a sample of them: only
    verifiers that follow the target accept it, "greedy" and "target_only". Above temperature 0
    children are scored with the noise that the target draws its tokens with.

    Args:
        model: any model with the target's vocabulary.
        expand: number of nodes to expand in each level below the root, and children of each.
        sharpness: factor of the logits before the softmax. Draft models are under-confident: with
            their own probabilities (1.0) trees are too wide. `tune` measures it.

    Raises:
        ValueError: `model` is not a model, `expand` not a positive integer, or `sharpness` not a
            positive number.
    """

    runs_on_mesh = True

    def __init__(self, model: HybridLM, *, expand: int = 8, sharpness: float = 2.5):
        super().__init__(model)
        is_number = isinstance(sharpness, numbers.Real) and math.isfinite(sharpness)
        if not is_number or sharpness <= 0:
            raise ValueError(f"sharpness must be a number above 0, got {shown(sharpness)}")
        self.expand = check_int("expand", expand, 1)
        self.sharpness = jnp.float32(sharpness)  # an array: one program for all values

    def default_topology(self) -> TreeTopology:
        """16 nodes, and at most 5 drafts on a path."""
        return TreeTopology.budget(16, 5)

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
        """See `Drafter`."""
        widths = self.widths(topology)
        most = sum(
            width * min(below, self.model.config.vocab_size)
            for width, below in itertools.pairwise(widths)
        )
        if most < topology.num_nodes - 1:
            raise ValueError(
                f"expand = {self.expand} scores at most {most} drafts in {topology.depth} levels,"
                f" fewer than the {topology.num_nodes - 1} of a tree of {topology.num_nodes} nodes;"
                " raise expand or use a smaller tree"
            )
        return super().child_sampling(topology, temperature_is_zero=temperature_is_zero)

    def prepare(self, context: Context, topology: TreeTopology, max_length: int) -> ModelDraftState:
        """See `Drafter`."""
        state = super().prepare(context, topology, max_length)
        batch, num_read = context.length.shape[0], self._num_read(topology)
        shape = (batch, num_read)
        tree = Tree(
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.int32),
            jnp.zeros((*shape, num_read), bool),
            jnp.zeros(shape, bool),
        )
        return state._replace(own=OwnTree(tree, jnp.zeros((batch, topology.num_nodes), jnp.int32)))

    def propose(
        self,
        state: ModelDraftState,
        context: Context,
        keys: Key[Array, " B"],
        sampling: Sampling,
        topology: TreeTopology,
        noise: Float32[Array, "B _ V"] | None = None,
    ) -> tuple[DraftTree, ModelDraftState]:
        """See `Drafter`."""
        how = self.child_sampling(topology, temperature_is_zero=sampling.temperature_is_zero)

        def weigh(logits: Array, depth: int | Array) -> Array:
            """Logits at nodes of one depth, whose softmax has the children's probabilities."""
            if how == "shared":
                assert noise is not None  # child_sampling refuses temperature 0
                logits = shared_scores(logits, sampling, noise, depth)
            return logits * self.sharpness

        found, cache = self._search(state, context, topology, weigh)
        tokens, tree, place = self._choose(found, topology)
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        own = OwnTree(first_nodes(found.tree, self._num_read(topology)), place)
        return (
            DraftTree(tokens, tree, None, none, found.finite),
            state._replace(cache=cache, pending=found.pending, own=own),
        )

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        topology: TreeTopology,
        hidden: Float[Array, "B M"],
    ) -> ModelDraftState:
        """See `Drafter`."""
        assert state.own is not None
        ended = verdict.last < 0
        last = jnp.maximum(verdict.last, 0)[:, None]

        def at(values: Array, nodes: Array) -> Array:
            return jnp.take_along_axis(values, nodes, axis=1)

        place = at(state.own.place, last)
        unread = (place < 0)[:, 0] & ~ended
        # A node has children only if the model ran it, so it ran the parent too.
        read = jnp.where(place < 0, at(state.own.place, at(draft.tree.parents, last)), place)[:, 0]
        return state._replace(
            path=path_to(
                below_catch_up(state.own.tree, state.has_catch_up),
                jnp.where(ended, -1, 1 + read),
            ),
            catch_up=at(draft.tokens, last)[:, 0],
            has_catch_up=unread,
        )

    def widths(self, topology: TreeTopology) -> list[int]:
        """Nodes of each level of the search, the root's first; the model does not run the last."""
        widths = [1]
        for depth in range(1, topology.depth + 1):
            # A tree of N nodes that reaches a level has at most N - depth of them there.
            children = min(self.expand, topology.num_nodes - depth)
            widths.append(min(children, widths[-1] * self.model.config.vocab_size))
        return widths

    def _num_read(self, topology: TreeTopology) -> int:
        """Nodes that the model runs: the root and the beams of all levels but the last."""
        return sum(self.widths(topology)[:-1])

    def _search(
        self,
        state: ModelDraftState,
        context: Context,
        topology: TreeTopology,
        weigh: Callable[[Array, int | Array], Array],
    ) -> tuple[Found, Cache]:
        """Beam search that keeps all candidates."""
        start = root_only(context)
        tree, tokens = start.tree, start.tokens
        score = jnp.zeros(tokens.shape)  # log-probability of each path of the level
        queries = jnp.concatenate([state.catch_up[:, None], tokens], axis=1)
        replay: tuple[Pending, Path] | None = (state.pending, state.path)
        cache, pending = state.cache, None
        widths, finite, candidates = self.widths(topology), [], []
        num_unrolled = topology.depth if topology.depth <= MAX_UNROLLED else 1
        for depth in range(num_unrolled):
            logits, pending, cache = self.model.tree_forward(
                queries,
                below_catch_up(tree, state.has_catch_up),
                cache,
                replay=replay,
                prefix_pending=pending,
                num_logits=widths[depth],
            )
            replay = None
            logits = logits[..., : self.model.config.vocab_size]
            finite.append(all_finite(logits).all(axis=-1))
            score, beam, queries, level = best_continuations(
                score, weigh(logits, depth), widths[depth + 1]
            )
            candidates.append(jax.tree.map(lambda part: part[None], level))
            first = tree.parents.shape[1] - widths[depth]  # index of the level's first node
            tree = append(tree, first + beam, jnp.isfinite(score))
            tokens = jnp.concatenate([tokens, queries], axis=1)

        assert pending is not None  # a tree with drafts has a level
        all_finite_yet = jnp.stack(finite).all(axis=0)
        found = Found(tokens, tree, score, pending, all_finite_yet, candidates)
        if num_unrolled < topology.depth:
            found = self._search_below(found, state, cache, widths, weigh)
        return found, cache

    def _search_below(
        self,
        start: Found,
        state: ModelDraftState,
        cache: Cache,
        widths: list[int],
        weigh: Callable[[Array, Array], Array],
    ) -> Found:
        """Searches the levels below the root's in one loop, see `levels`."""
        num_nodes, num_read, most = sum(widths), sum(widths[:-1]), max(widths)
        firsts = itertools.accumulate(widths, initial=0)
        nodes_of = [list(range(first, after)) for first, after in itertools.pairwise(firsts)]
        places = (
            np.arange(1, len(widths) - 1),
            padded(nodes_of[1:-1], width=most),
            1 + padded(nodes_of[1:-1], num_read, most),  # after the catch-up token
            padded(nodes_of[2:], num_nodes, most),
        )

        def grow(
            so_far: Found, at: tuple[Array, Array, Array, Array]
        ) -> tuple[Found, Continuations]:
            tree, (depth, nodes, queries, added) = so_far.tree, at
            own_tree = below_catch_up(first_nodes(tree, num_read), state.has_catch_up)
            logits, read, _ = self.model.tree_forward(
                so_far.tokens[:, nodes],
                level_behind(own_tree, queries),
                cache,
                prefix_pending=so_far.pending,
                num_logits=most,
            )
            logits = logits[..., : self.model.config.vocab_size]
            score, beam, tokens, level = best_continuations(
                so_far.score, weigh(logits, depth), most
            )
            score = jnp.where(added < num_nodes, score, -jnp.inf)  # no beams beyond the level's
            valid, parents = jnp.isfinite(score), nodes[0] + beam
            above = jnp.take_along_axis(tree.ancestor_mask, parents[..., None], axis=1)
            itself = (jnp.arange(num_nodes) == added[:, None]) & valid[..., None]
            node_depth = jnp.take_along_axis(tree.depth, parents, axis=1) + 1

            def put(before: Array, new: Array) -> Array:
                return before.at[:, added].set(new, mode="drop")

            return (
                Found(
                    put(so_far.tokens, tokens),
                    Tree(*map(put, tree, (parents, node_depth, above | itself, valid))),
                    score,
                    with_level(so_far.pending, read, queries),
                    so_far.finite & all_finite(logits).all(axis=-1),
                    [],
                ),
                level,
            )

        tree = Tree(*(with_zeros(part, num_nodes) for part in start.tree))
        no_beam = jnp.full((start.score.shape[0], most - widths[1]), -jnp.inf)
        found, candidates = lax.scan(
            grow,
            Found(
                with_zeros(start.tokens, num_nodes),
                tree._replace(ancestor_mask=with_zeros(tree.ancestor_mask, num_nodes, axis=2)),
                jnp.concatenate([start.score, no_beam], axis=1),
                jax.tree.map(lambda leaf: with_zeros(leaf, 1 + num_read), start.pending),
                start.finite,
                [],
            ),
            jax.tree.map(jnp.asarray, places),
        )
        return found._replace(candidates=[*start.candidates, candidates])

    def _choose(
        self, found: Found, topology: TreeTopology
    ) -> tuple[Int[Array, "B N"], Tree, Int[Array, "B N"]]:
        """Tokens and tree of the N best nodes, and the index of each among the run nodes, or -1.

        All candidates are in one row, level by level, the continuations of a beam next to each
        other and best first. A node scores at most as high as its parent and comes after it, and
        ties go to the first; so the parents of chosen nodes are chosen.

        Worked example, `expand = 2`, budget(5, 2): the row has the root 0, its children 1 and 2,
        the children 3 and 4 of 1, and 5 and 6 of 2. Say 0 1 2 3 5 are the best: the tree's nodes 0
        to 4, with parents -1 0 0 1 2. The model ran 0 1 2, so places are 0 1 2 -1 -1.
        """
        widths, batch = self.widths(topology), found.tokens.shape[0]

        def row(parts: Array) -> Array:
            return jnp.moveaxis(parts, 1, 0).reshape(batch, -1)

        score, tokens = [jnp.zeros((batch, 1))], [found.tokens[:, :1]]
        depths, parents = [np.zeros(1, int)], [np.zeros(1, int)]  # the root's parent is itself
        read = [
            jnp.zeros((batch, 1), jnp.int32)
        ]  # index in the row of each node that the model ran
        depth, first, first_in_row = 0, 0, 1
        for group in found.candidates:
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
            read.append(row(group.kept)[:, np.array(kept, int)] + np.array(starts, np.int32))

        scores = jnp.concatenate(score, axis=1)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # the row fails; its root stays
        best, chosen = lax.top_k(scores, topology.num_nodes)
        order = jnp.argsort(chosen, axis=1)
        chosen = jnp.take_along_axis(chosen, order, axis=1)
        valid = jnp.isfinite(jnp.take_along_axis(best, order, axis=1))
        places = jnp.concatenate(read, axis=1)
        same = (chosen[:, :, None] == places[:, None, :]) & valid[..., None]
        place = jnp.where(same.any(axis=2), jnp.argmax(same, axis=2), -1)
        node = (chosen[:, :, None] < places[:, None, :]).sum(
            axis=1
        )  # tree node of each run node, if chosen

        own_parent = jnp.asarray(np.concatenate(parents))[chosen]
        above = jnp.take_along_axis(found.tree.ancestor_mask, own_parent[..., None], axis=1)
        above = jnp.take_along_axis(above, jnp.maximum(place, 0)[:, None, :], axis=2)
        mask = above & (place >= 0)[:, None, :] | jnp.eye(topology.num_nodes, dtype=bool)
        is_root = jnp.arange(topology.num_nodes) == 0
        parent = jnp.where(valid, jnp.take_along_axis(node, own_parent, axis=1), 0)
        tree = Tree(
            parents=jnp.where(is_root, -1, parent).astype(jnp.int32),
            depth=jnp.asarray(np.concatenate(depths), jnp.int32)[chosen],
            ancestor_mask=mask & valid[:, None, :],
            valid=valid,
        )
        words = jnp.take_along_axis(jnp.concatenate(tokens, axis=1), chosen, axis=1)
        return words, tree, place.astype(jnp.int32)
