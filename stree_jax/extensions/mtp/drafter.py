"""Drafting with a multi-token-prediction head: what `ModelDrafter` does, without a draft model."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import HybridLM, ModelDrafter, Sampling
from stree_jax.array_types import Array, Int, Key
from stree_jax.decoding import Plan
from stree_jax.extensions.mtp.model import MtpModel
from stree_jax.models import MtpHead
from stree_jax.tuning import RankTrace, ranks_by_depth, trace_by_depth

TRACED_DEPTHS = 8  # levels of which `rank_trace` says how often they are right


class MtpDrafter(ModelDrafter):
    """A multi-token-prediction head that fills a static tree level by level.

    The head reads the prompt's states through `read`, so that the first step drafts; only a prompt
    of a single token has none yet. Leaves are never run, and drafts leave nothing behind.

    Args:
        target: the model that `generate` decodes with, on one device.
        head: a head for that model, see `load_mtp`.
        child_sampling: see `ModelDrafter`.

    Raises:
        ValueError: another value of `child_sampling`, or a head of other sizes.
    """

    def __init__(self, target: HybridLM, head: MtpHead, *, child_sampling: str = "auto"):
        super().__init__(MtpModel(target, head), child_sampling=child_sampling)

    def rank_trace(
        self, target: HybridLM, request: Plan, tokens: Sequence[np.ndarray], num_ranks: int
    ) -> RankTrace:
        """Ranks by depth: below the root the head gets its own outputs, not the target's states.

        Args:
            target: the model.
            request: the plan that generated the texts; gives prompts, keys and sampling.
            tokens: the new tokens of each row.
            num_ranks: number of candidates of each depth.

        Returns:
            Ranks `[T, D]` for each text, see `RankTrace`, of `TRACED_DEPTHS` depths.

        Raises:
            ValueError: the drafter samples its candidates with its own random numbers.
        """
        ranks = functools.partial(_ranks, target, self.model)
        return trace_by_depth(ranks, self, request, tokens, num_ranks)


@functools.partial(jax.jit, static_argnames="most")
def _ranks(
    target: HybridLM,
    model: MtpModel,
    text: Int[Array, "1 L"],
    start: Int[Array, ""],
    key: Key[Array, ""],
    sampling: Sampling,
    *,
    most: int,
) -> Int[Array, "emitted D"]:
    outputs = model.ahead(text, target.hidden(text), TRACED_DEPTHS)
    # The root is the last emitted token, and the head gets the target's state before it.
    places = jnp.maximum(start + jnp.arange(most) - 2, 0)

    def logits(depth: int) -> Array:
        return model.logits(outputs[depth][:, places])[0]

    return ranks_by_depth(logits, TRACED_DEPTHS, text, start, key, sampling, most=most)
