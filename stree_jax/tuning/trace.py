"""Ranks of the target's tokens among the drafter's candidates, at every token of a text.

Children of a node are the drafter's candidates in order of rank, so the ranks of the tokens that
the target emits determine which nodes of any static tree would be accepted.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Int, Key
from stree_jax.decoding.drafters import Drafter, drawn_by
from stree_jax.decoding.drafters.base import first_state, inner_layers
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.sampling import filtered_logits, position_noise
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

TRACED_DEPTHS = 8  # levels of which `head_trace` says how often they are right
_BATCH = 32  # positions per batch


class RankTrace(NamedTuple):
    """Ranks of emitted tokens among the drafter's candidates.

    Attributes:
        ranks: for each text `[T]`, the rank of every new token among the candidates after the
            tokens before it: 0 for the first, `num_ranks` if it is not among them. If candidates
            depend on the depth of a node `[T, D]`: of token t + d among the candidates of depth
            d + 1 in a step that has emitted t tokens.
        num_ranks: number of candidates.
    """

    ranks: list[np.ndarray]
    num_ranks: int

    @property
    def max_depth(self) -> int | None:
        """The depth of the deepest tree that these ranks describe; None: any depth."""
        return self.ranks[0].shape[1] if self.ranks[0].ndim == 2 else None


def rank_trace(
    drafter: Drafter, target: HybridLM, request: Plan, tokens: Sequence[np.ndarray], num_ranks: int
) -> RankTrace:
    """Drafts one level at every position of the target's texts, and ranks the target's tokens.

    `tune` calls this for a drafter without a `rank_trace` of its own. `request` is the plan that
    generated `tokens`, the new ones of each row.

    Raises:
        ValueError: the drafter samples its candidates with its own random numbers.
    """
    check_how(drafter, request.sampling, num_ranks)
    topology = TreeTopology.from_branching((num_ranks,))
    texts, starts = whole_texts(request, tokens), np.asarray(request.context.length)
    rows = np.repeat(np.arange(len(tokens)), [len(new) for new in tokens])
    emitted = np.concatenate([np.arange(len(new), dtype=np.int32) for new in tokens])
    ranks = []
    for first in range(0, len(rows), _BATCH):
        # The last batch is padded with its last position.
        at = np.minimum(np.arange(first, first + _BATCH), len(rows) - 1)
        row, lengths = rows[at], (starts[rows[at]] + emitted[at]).astype(np.int32)
        keys, sampling = jax.tree.map(operator.itemgetter(row), (request.keys, request.sampling))
        tokens_at, lengths_at, new = jax.device_put((texts[row], lengths, emitted[at]))
        context = Context(tokens_at, lengths_at)
        state = first_state(drafter, context.length, topology, request.decoder.max_length)
        state = _read(drafter, target, state, context, inner_layers(drafter))
        step = Step(context, keys, None, sampling)
        drafted, valid = _drafts(drafter, state, step, new, topology, target.config.vocab_size)
        match = (np.asarray(drafted) == texts[row, lengths][:, None]) & np.asarray(valid)
        ranks.append(np.where(match.any(axis=1), match.argmax(axis=1), num_ranks))
    ends = np.cumsum([len(new) for new in tokens])
    return RankTrace(np.split(np.concatenate(ranks)[: ends[-1]], ends[:-1]), num_ranks)


def head_trace(
    drafter: Drafter,
    model: Any,
    target: HybridLM,
    request: Plan,
    tokens: Sequence[np.ndarray],
    num_ranks: int,
) -> RankTrace:
    """The trace of a head on the target's states, whose candidates depend on the depth."""
    check_how(drafter, request.sampling, num_ranks)
    starts, most = np.asarray(request.context.length), max(map(len, tokens))
    tables = []
    texts = zip(whole_texts(request, tokens), starts, tokens, strict=True)
    for row, (text, start, new) in enumerate(texts):
        of_row = operator.itemgetter(slice(row, row + 1))
        key, sampling = jax.tree.map(of_row, (request.keys, request.sampling))
        ranks = _head_ranks(
            target,
            model,
            jnp.asarray(text[None]),
            jnp.asarray(start),
            key,
            sampling,
            most=most,
            inner=inner_layers(drafter),
        )
        table = np.array(ranks)[: len(new)]
        ends = np.arange(len(new))[:, None] + np.arange(table.shape[1]) >= len(new)
        # The first step after a prompt of one token has no drafts.
        table[ends | (np.arange(len(new)) + start < 2)[:, None]] = num_ranks
        tables.append(np.minimum(table, num_ranks))
    return RankTrace(tables, num_ranks)


@functools.partial(jax.jit, static_argnames=("most", "inner"))
def _head_ranks(
    target: HybridLM,
    model: Any,
    text: Int[Array, "1 L"],
    start: Int[Array, ""],
    key: Key[Array, " 1"],
    sampling: Sampling,
    *,
    most: int,
    inner: tuple[int, ...],
) -> Int[Array, "emitted D"]:
    """Ranks of a text's tokens among the candidates of each depth, in each step."""
    outputs = model.outputs_ahead(text, target.hidden(text, inner), TRACED_DEPTHS)
    emitted, noise = jnp.arange(most, dtype=jnp.int32), None
    if not sampling.temperature_is_zero:
        zero, size = jnp.zeros(1, jnp.int32), target.config.vocab_size
        noise = position_noise(key, zero, most - 1, size)[0]

    def of_depth(ahead: int, output: Array) -> Array:
        # The root is the last emitted token, and the head gets the target's state before it.
        scores = model.logits(output[:, jnp.maximum(start + emitted - 2, 0)])[0]
        if noise is not None:
            scores = filtered_logits(scores[None], sampling)[0]
            scores += noise[jnp.minimum(emitted + ahead, most - 1)]
        token = text[0, jnp.minimum(start + emitted + ahead, text.shape[1] - 1)][:, None]
        score = jnp.take_along_axis(scores, token, axis=1)
        earlier = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] < token
        return ((scores > score) | ((scores == score) & earlier)).sum(axis=1, dtype=jnp.int32)

    return jnp.stack([of_depth(ahead, output) for ahead, output in enumerate(outputs)], axis=1)


@functools.partial(jax.jit, static_argnames="inner")
def _read(
    drafter: Any, target: HybridLM, state: Any, context: Context, inner: tuple[int, ...] | None
) -> Any:
    """A drafter's state after texts."""
    hidden = None if inner is None else target.hidden(context.tokens, inner)
    return drafter.read(state, context.tokens, hidden, context.length - 1)


@functools.partial(jax.jit, static_argnames=("topology", "vocab_size"))
def _drafts(
    drafter: Drafter,
    state: Any,
    step: Step,
    emitted: Int[Array, " B"],
    topology: TreeTopology,
    vocab_size: int,
) -> tuple[Int[Array, "B D"], Bool[Array, "B D"]]:
    """The candidates after texts, of which so many tokens are new, and which of them exist."""
    if not step.sampling.temperature_is_zero:
        noise = position_noise(step.keys, emitted, topology.depth, vocab_size)
        step = step._replace(noise=noise)
    draft, _ = drafter.propose(state, step, topology)
    return draft.tokens[:, 1:], draft.tree.valid[:, 1:]


def whole_texts(request: Plan, tokens: Sequence[np.ndarray]) -> Int[np.ndarray, "B L"]:
    """Prompts and the new tokens after them, in buffers of the plan's `max_length`."""
    prompts = np.asarray(request.context.tokens)
    starts = np.asarray(request.context.length)
    texts = np.zeros((len(tokens), request.decoder.max_length), np.int32)
    for text, prompt, start, new in zip(texts, prompts, starts, tokens, strict=True):
        text[:start] = prompt[:start]
        text[start : start + len(new)] = new
    return texts


def check_how(drafter: Drafter, sampling: Sampling, num_ranks: int) -> None:
    """Refuses drafters that sample their candidates with their own random numbers."""
    topology = TreeTopology.from_branching((num_ranks,))
    drawn = drawn_by(drafter, topology, temperature_is_zero=sampling.temperature_is_zero)
    if drawn.is_sampled:
        raise ValueError(
            f"child_sampling = {drawn.kind!r} draws new candidates in every step, so their ranks"
            " say nothing about other trees; use 'shared' or 'auto'"
        )
