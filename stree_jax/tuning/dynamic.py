"""Acceptance of dynamic trees, and the best sharpness of the draft's probabilities."""

from collections.abc import Sequence

import jax
import numpy as np

from stree_jax.array_types import Int
from stree_jax.decoding.drafters import DynamicDrafter
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.reader import DraftModel
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology
from stree_jax.tuning.trace import drafts_at, positions, state_at

SHARPNESS = (1.0, 1.5, 2.5, 3.5, 5.0, 7.0)


def dynamic_tau(
    draft: HybridLM | DraftModel,
    target: HybridLM,
    request: Plan,
    tokens: Sequence[np.ndarray],
    topology: TreeTopology,
    *,
    expand: int = 8,
    grid: Sequence[float] = SHARPNESS,
) -> dict[float, float]:
    """Tokens per target call of dynamic trees of a size on the target's own texts, by sharpness.

    A tree is drafted at every position of the texts. It depends only on the text before it, so
    stepping through these trees replays decoding: the numbers are exact, as for static trees.
    """
    drafters = {sharp: DynamicDrafter(draft, expand=expand, sharpness=sharp) for sharp in grid}
    accepted: dict[float, list[np.ndarray]] = {sharp: [] for sharp in grid}
    for at in positions(request, tokens, topology.depth):
        first, max_length = drafters[grid[0]], request.decoder.max_length
        state = state_at(first, target, at.context, topology, max_length)
        for sharp, drafter in drafters.items():
            drafts = drafts_at(drafter, state, at, topology, target.config.vocab_size)
            drafted, tree = jax.tree.map(np.asarray, drafts)
            right = _num_accepted(drafted, tree, at.following)
            accepted[sharp].append(right[: at.num_places])
    ends = np.cumsum([len(new) for new in tokens])
    texts = {sharp: np.split(np.concatenate(found), ends[:-1]) for sharp, found in accepted.items()}
    return {sharp: ends[-1] / sum(map(_num_calls, rows)) for sharp, rows in texts.items()}


def _num_accepted(
    tokens: Int[np.ndarray, "B N"], tree: Tree, following: Int[np.ndarray, "B D"]
) -> Int[np.ndarray, " B"]:
    """Number of accepted drafts of each tree, given the tokens that followed."""
    rows = np.arange(len(following))
    on_path = np.zeros(tree.parents.shape, bool)
    on_path[:, 0] = True
    for node in range(1, tree.parents.shape[1]):
        token = following[rows, np.maximum(tree.depth[:, node] - 1, 0)]
        on_path[:, node] = (
            on_path[rows, tree.parents[:, node]] & tree.valid[:, node] & (tokens[:, node] == token)
        )
    return np.where(on_path, tree.depth, 0).max(axis=1)


def _num_calls(accepted: Int[np.ndarray, " T"]) -> int:
    """Target calls to decode a text, given the drafts accepted at each position."""
    at = calls = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        calls += 1
    return calls
