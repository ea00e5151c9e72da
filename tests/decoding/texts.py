"""Texts of autoregressive decoding and of trees, whose rows have different ways of sampling."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.results import statistics_of
from stree_jax.testing import PROMPTS, tiny_model
from tests.helpers import with_weight

NEW_TOKENS = 24
HYBRID = "mamba2attn hybrid"


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt with its key and its way of sampling."""

    prompt: tuple
    seed: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


_FILTERS = (dict(), dict(top_p=0.9), dict(top_k=8), dict(top_k=8, top_p=0.9))
_WAYS = [(0.0, {}), *itertools.product((0.3, 0.7, 1.0, 1.3), _FILTERS)]
# A batch of all ways of sampling, each with every prompt: one program decodes all of it. The first
# rows have temperature 0.
ROWS = [
    Row(tuple(prompt), 10 * i + j, temperature, **filters)
    for i, (temperature, filters) in enumerate(_WAYS)
    for j, prompt in enumerate(PROMPTS)
]


def planned(model, rows, **options):
    """A request of rows with their own sampling."""
    return plan(
        model,
        [row.prompt for row in rows],
        max_new_tokens=NEW_TOKENS,
        temperature=[row.temperature for row in rows],
        top_k=[row.top_k for row in rows],
        top_p=[row.top_p for row in rows],
        key=[row.seed for row in rows],
        **options,
    )


def ended(model, request):
    """The last state of the decode loop."""
    start = request.drafter, request.context, request.keys, request.sampling
    state = request.decoder.start(model, *start)
    return request.decoder.run(model, request.drafter, state, request.limits, request.sampling)


def decoded(model, request):
    """The result of `generate`, cache included, for a request that was planned by hand."""
    state = ended(model, request)
    tokens, starts = np.asarray(state.context.tokens), np.asarray(request.context.length)
    new = np.stack([row[at : at + NEW_TOKENS] for row, at in zip(tokens, starts, strict=True)])
    new = np.where(np.arange(NEW_TOKENS) < np.asarray(state.emitted)[:, None], new, st.PAD)
    stats = statistics_of(jax.tree.map(np.asarray, state.statistics))
    return st.Generation(new, np.asarray(state.emitted), stats, state.cache)


@functools.cache
def autoregressive(family="plain"):
    """The texts of `ROWS`; all tables of a process share them."""
    model = tiny_model(family)
    return decoded(model, planned(model, ROWS))


@functools.cache
def greedy(family="plain"):
    """Those of `PROMPTS` at temperature 0."""
    return rows_of(autoregressive(family), range(len(PROMPTS)))


def rows_of(generation, rows):
    """Some rows of a generation; its statistics are those of all."""
    rows = np.array(rows)
    return dataclasses.replace(
        generation,
        tokens=generation.tokens[rows],
        lengths=generation.lengths[rows],
        cache=jax.tree.map(lambda leaf: leaf[rows], generation.cache),
    )


def steps(target, drafter, topology, *, count):
    """The first steps at temperature 0: the text before, the draft, the verdict."""
    request = plan(target, PROMPTS, max_new_tokens=NEW_TOKENS, drafter=drafter, topology=topology)
    state = request.decoder.start(target, drafter, request.context, request.keys)
    for _ in range(count):
        before = jax.tree.map(np.asarray, state.context)
        state, draft, verdict = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        yield before, jax.tree.map(np.asarray, draft), jax.tree.map(np.asarray, verdict)


def with_head(scale, model):
    """The model with sharper logits, or with logits that are all equal."""
    return with_weight(model, "head", lambda head: scale * head)
