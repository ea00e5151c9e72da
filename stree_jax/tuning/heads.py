"""Ranks of emitted tokens among the candidates of Medusa heads."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Int, Key
from stree_jax.decoding.drafters import MedusaDrafter
from stree_jax.decoding.options import Plan
from stree_jax.decoding.sampling import filtered_logits, position_noise
from stree_jax.decoding.types import Sampling
from stree_jax.models.lm import HybridLM, output_logits
from stree_jax.tuning.trace import RankTrace, check_how, whole_texts


def head_trace(
    model: HybridLM,
    drafter: MedusaDrafter,
    request: Plan,
    tokens: Sequence[np.ndarray],
    num_ranks: int,
) -> RankTrace:
    """Ranks by depth: the candidates for a token depend on how far ahead it is drafted.

    Reads the texts as sequences. Exact like `rank_trace`.

    Args:
        model: the target.
        drafter: heads of it.
        request: the plan by which the texts were written; gives prompts, keys and sampling.
        tokens: the new tokens of each row.
        num_ranks: candidates to look at.

    Returns:
        Ranks `[T, D]` for each text: of token t + d among the candidates of depth d + 1 in a step
        that has emitted t tokens; `num_ranks` if it is none of them, as in the first step, which
        has no drafts.

    Raises:
        ValueError: the drafter draws its candidates with random numbers of its own.
    """
    check_how(drafter, request.sampling, num_ranks)
    starts = np.asarray(request.context.length)
    texts, most = whole_texts(request, tokens), max(map(len, tokens))
    ranks = []
    for row, (start, new) in enumerate(zip(starts, tokens, strict=True)):
        text = jnp.asarray(texts[row : row + 1])
        sampling = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], request.sampling)
        found = _ranks(model, drafter, text, start, request.keys[row], sampling, most=most)
        table = np.array(found)[: len(new)]
        ends = np.arange(len(new))[:, None] + np.arange(table.shape[1]) >= len(new)
        table[ends | (np.arange(len(new)) == 0)[:, None]] = num_ranks
        ranks.append(np.minimum(table, num_ranks))
    return RankTrace(ranks, num_ranks)


@functools.partial(jax.jit, static_argnames="most")
def _ranks(
    model: HybridLM,
    drafter: MedusaDrafter,
    text: Int[Array, "1 L"],
    start: Int[Array, ""],
    key: Key[Array, ""],
    sampling: Sampling,
    *,
    most: int,
) -> Int[Array, "emitted D"]:
    emitted = jnp.arange(most)
    # The root is the last emitted token, and the heads see the state before it.
    hidden = model.hidden(text)[0, jnp.maximum(start + emitted - 2, 0)]
    ahead = drafter.heads(hidden[None])[0]
    noise = None
    if not sampling.temperature_is_zero:
        zero = jnp.zeros(1, jnp.int32)
        noise = position_noise(key[None], zero, most - 1, drafter.vocab_size)[0]

    def of_depth(depth: int) -> Array:
        scores = output_logits(ahead[None, :, depth], drafter.output_head[...], drafter.multiplier)
        scores = scores[..., : drafter.vocab_size]
        if noise is not None:
            scores = filtered_logits(scores, sampling)
            scores += noise[jnp.minimum(emitted + depth, most - 1)]
        places = jnp.minimum(start + emitted + depth, text.shape[1] - 1)
        token = text[0, places][:, None]
        own = jnp.take_along_axis(scores[0], token, axis=1)
        earlier = jnp.arange(drafter.vocab_size) < token
        return ((scores[0] > own) | ((scores[0] == own) & earlier)).sum(axis=1)

    return jnp.stack([of_depth(depth) for depth in range(drafter.heads.num_heads)], axis=1)
