"""Drafting with a small model: a static tree, level by level, from one state."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding.drafters.base import root_token
from stree_jax.decoding.drafters.children import (
    check_child_sampling,
    chosen_child_sampling,
    draw,
    shared_scores,
)
from stree_jax.decoding.drafters.levels import (
    MAX_UNROLLED,
    Level,
    level_behind,
    levels_of,
    padded,
    with_level,
    with_zeros,
)
from stree_jax.decoding.prefill import prefill
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.models.cache import Cache, Path, Pending, empty_path, path_to
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.tree import Tree, TreeTopology


class OwnTree(NamedTuple):
    """The nodes that a draft model ran to choose the shape of a tree.

    Attributes:
        tree: the nodes that it ran, the root first.
        place: index of each node of the draft tree among them; -1 for nodes that it did not run.
    """

    tree: Tree
    place: Int[Array, "B N"]


class ModelDraftState(NamedTuple):
    """A draft model's state between steps.

    The draft model never runs the leaves of its tree. When the accepted path ends in a leaf, that
    token is missing in its cache. It is the *catch-up* token, which runs with the next root. So the
    draft model's own tree has the catch-up token as node 0 (not valid if there is none), then the
    topology's inner nodes.
    """

    cache: Cache
    pending: Pending  # pending record of the draft model's own tree
    path: Path  # accepted path in that tree, to be replayed
    catch_up: Int[Array, " B"]
    has_catch_up: Bool[Array, " B"]
    own: OwnTree | None = None  # of a dynamic tree, below the catch-up token


class ModelDrafter(nnx.Module):
    """A draft model that fills a static tree level by level, from one state.

    Args:
        model: any model with the target's vocabulary.
        child_sampling: choice of siblings: "top_k" (the most probable), "shared" (the most
            probable after adding the noise that the target draws its tokens with), "iid" (sampled
            independently), "without_replacement" (sampled, all different, in the order drawn), or
            "auto": top-k at temperature 0, shared above it. Verifiers that test drafts by their
            probabilities need "iid" or "without_replacement".

    Raises:
        ValueError: another value of `child_sampling`, or `model` is not a model.
    """

    runs_on_mesh = True

    def __init__(self, model: HybridLM, *, child_sampling: str = "auto"):
        check_child_sampling(child_sampling)
        check_model(model)
        self.model = model
        self._child_sampling = child_sampling

    def models(self) -> list[HybridLM]:
        """See `Drafter`."""
        return [self.model]

    def default_topology(self) -> TreeTopology:
        """The 13-node tree of the paper's main experiment."""
        return TreeTopology.paper("A")

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
        """See `Drafter`."""
        return chosen_child_sampling(self._child_sampling, temperature_is_zero=temperature_is_zero)

    def prepare(self, context: Context, topology: TreeTopology, max_length: int) -> ModelDraftState:
        """See `Drafter`."""
        batch = context.length.shape[0]
        num_nodes = 1 + self._num_read(topology)
        return ModelDraftState(
            cache=prefill(self.model, context.tokens, context.length - 1, max_length),
            pending=self.model.init_pending(batch, num_nodes),
            path=empty_path(batch, num_nodes),
            catch_up=jnp.zeros(batch, jnp.int32),
            has_catch_up=jnp.zeros(batch, bool),
        )

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

        def choose(
            logits: Array, depth: int | Array, width: int
        ) -> tuple[Array | None, Array, Array]:
            """Children of nodes of one depth, and the distributions that they were drawn from."""
            log_probs = None
            if how == "shared":
                assert noise is not None  # child_sampling refuses temperature 0
                logits = shared_scores(logits, sampling, noise, depth)
            elif how != "top_k":
                logits = log_probs = token_log_probs(logits, sampling)
            return log_probs, *draw(how, logits, width, _level_keys(keys, depth))

        root = root_token(context)
        tokens, valid = root, jnp.ones_like(root, bool)
        queries = jnp.concatenate([state.catch_up[:, None], root], axis=1)
        replay: tuple[Pending, Path] | None = (state.pending, state.path)
        cache, pending = state.cache, None
        levels = levels_of(topology)
        num_unrolled = len(levels) if len(levels) <= MAX_UNROLLED else 1
        log_probs_of, finite = [], []
        for depth, level in enumerate(levels[:num_unrolled]):
            logits, pending, cache = self.model.tree_forward(
                queries,
                _own_tree(topology, valid, state.has_catch_up, depth),
                cache,
                replay=replay,
                prefix_pending=pending,
                num_logits=len(level.inner),
            )
            replay = None
            logits = logits[..., : self.model.config.vocab_size]
            log_probs, drawn, exists = choose(logits, depth, level.width)
            finite.append(exists[..., 0].all(axis=-1))
            log_probs_of += [] if log_probs is None else [log_probs]
            below = exists[:, level.source, level.rank] & valid[:, level.parents]
            below_tokens = drawn[:, level.source, level.rank]
            tokens = jnp.concatenate([tokens, below_tokens], axis=1)
            valid = jnp.concatenate([valid, below], axis=1)
            queries = below_tokens[:, level.next_inner]

        assert pending is not None  # a tree with drafts has a level
        grown = _Grown(
            tokens,
            valid,
            pending,
            jnp.concatenate(log_probs_of, axis=1) if log_probs_of else None,
            jnp.stack(finite).all(axis=0),
        )
        if num_unrolled < len(levels):
            grown = self._grow(grown, levels[1:], choose, state, cache, topology)
        inner = list(_inner_nodes(topology))
        log_prob_row = np.full(topology.num_nodes, -1, np.int32)
        log_prob_row[inner] = np.arange(len(inner))
        draft = DraftTree(
            tokens=grown.tokens,
            tree=topology.tree(grown.valid),
            log_probs=grown.log_probs,
            log_prob_row=jnp.asarray(log_prob_row),
            finite=grown.finite,
        )
        return draft, state._replace(cache=cache, pending=grown.pending)

    def _grow(
        self,
        start: "_Grown",
        levels: list[Level],
        choose: Callable[[Array, Array, int], tuple[Array | None, Array, Array]],
        state: ModelDraftState,
        cache: Cache,
        topology: TreeTopology,
    ) -> "_Grown":
        """Grows the levels below the root's in one loop, see `levels`."""
        num_nodes, num_read = topology.num_nodes, 1 + self._num_read(topology)
        position = {node: 1 + at for at, node in enumerate(_inner_nodes(topology))}
        width = max(level.width for level in levels)
        places = {
            "depth": np.arange(1, 1 + len(levels)),
            "inner": padded([level.inner for level in levels]),
            "read": padded([[position[n] for n in level.inner] for level in levels], num_read),
            "children": padded([level.children for level in levels], num_nodes),
            "parents": padded([level.parents for level in levels]),
            "source": padded([level.source for level in levels]),
            "rank": padded([level.rank for level in levels]),
        }

        def grow(so_far: _Grown, at: dict[str, Array]) -> tuple[_Grown, None]:
            own_tree = _own_tree(topology, so_far.valid, state.has_catch_up, topology.depth - 1)
            logits, read, _ = self.model.tree_forward(
                so_far.tokens[:, at["inner"]],
                level_behind(own_tree, at["read"]),
                cache,
                prefix_pending=so_far.pending,
                num_logits=len(at["inner"]),
            )
            logits = logits[..., : self.model.config.vocab_size]
            new, drawn, exists = choose(logits, at["depth"], width)
            log_probs = so_far.log_probs
            if log_probs is not None:
                log_probs = log_probs.at[:, at["read"] - 1].set(new, mode="drop")
            below = exists[:, at["source"], at["rank"]] & so_far.valid[:, at["parents"]]
            below_tokens = drawn[:, at["source"], at["rank"]]
            return (
                _Grown(
                    so_far.tokens.at[:, at["children"]].set(below_tokens, mode="drop"),
                    so_far.valid.at[:, at["children"]].set(below, mode="drop"),
                    with_level(so_far.pending, read, at["read"]),
                    log_probs,
                    so_far.finite & exists[..., 0].all(axis=-1),
                ),
                None,
            )

        start = _Grown(
            with_zeros(start.tokens, num_nodes),
            with_zeros(start.valid, num_nodes),
            jax.tree.map(lambda leaf: with_zeros(leaf, num_read), start.pending),
            None if start.log_probs is None else with_zeros(start.log_probs, num_read - 1),
            start.finite,
        )
        return lax.scan(grow, start, jax.tree.map(jnp.asarray, places))[0]

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        topology: TreeTopology,
        hidden: Float[Array, "B M"],
    ) -> ModelDraftState:
        """See `Drafter`."""
        inner = _inner_nodes(topology)
        position = np.full(
            topology.num_nodes, -1, np.int32
        )  # index of each inner node in the own tree
        position[list(inner)] = 1 + np.arange(len(inner))
        ended = verdict.last < 0
        last = jnp.maximum(verdict.last, 0)
        is_leaf = jnp.asarray(position < 0)[last] & ~ended
        read = jnp.where(is_leaf, jnp.asarray(topology.parents)[last], last)
        own_last = jnp.where(ended, -1, jnp.asarray(position)[read])
        own_tree = _own_tree(topology, draft.tree.valid, state.has_catch_up, topology.depth - 1)
        catch_up = jnp.take_along_axis(draft.tokens, last[:, None], axis=1)[:, 0]
        return state._replace(
            path=path_to(own_tree, own_last), catch_up=catch_up, has_catch_up=is_leaf
        )

    def _num_read(self, topology: TreeTopology) -> int:
        """Number of nodes that the draft model runs to grow the tree."""
        return len(_inner_nodes(topology))


class _Grown(NamedTuple):
    """A draft tree while it grows."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    pending: Pending
    log_probs: Float32[Array, "B Z V"] | None
    finite: Bool[Array, " B"]


def _inner_nodes(topology: TreeTopology) -> tuple[int, ...]:
    """Nodes with children, in level order."""
    return tuple(node for node, children in enumerate(topology.children) if children)


def _own_tree(
    topology: TreeTopology, valid: Bool[Array, "B N"], has_catch_up: Bool[Array, " B"], level: int
) -> Tree:
    """The draft model's own tree down to `level`: the catch-up token, then the inner nodes."""
    inner = [n for n in _inner_nodes(topology) if topology.depths[n] <= level]
    nodes = np.array(inner)
    batch, num_nodes = valid.shape[0], len(inner) + 1
    position = {node: 1 + i for i, node in enumerate(inner)}
    parents = np.array([-1, -1] + [position[topology.parents[n]] for n in inner[1:]], np.int32)
    static_mask = np.eye(num_nodes, dtype=bool)
    static_mask[1:, 1:] = topology.ancestor_mask[np.ix_(nodes, nodes)]
    depth = np.array([0] + [topology.depths[n] for n in inner], np.int32)

    below = jnp.asarray(np.arange(num_nodes) > 0)
    own_valid = jnp.concatenate([has_catch_up[:, None], valid[:, nodes]], axis=1)
    # The catch-up token is above all other nodes, if there is one.
    mask = (jnp.asarray(static_mask) | (below[:, None] & ~below)) & own_valid[:, None, :]
    is_root = jnp.asarray(np.arange(num_nodes) == 1)
    return Tree(
        parents=jnp.where(is_root & has_catch_up[:, None], 0, jnp.asarray(parents)),
        depth=jnp.broadcast_to(depth, (batch, num_nodes)) + (below & has_catch_up[:, None]),
        ancestor_mask=mask,
        valid=own_valid,
    )


def _level_keys(keys: Array, depth: int | Array) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, depth)
