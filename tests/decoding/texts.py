"""Texts of autoregressive decoding and of trees, whose rows have different ways of sampling."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.decoding.results import statistics_of
from stree_jax.decoding.types import Sampling, Step
from stree_jax.testing import CONFIGS, PROMPTS, apply, random_model, tiny_model
from tests.helpers import state_after, with_weight
from tests.numpy_parts import log_softmax

NEW_TOKENS = 24
SIZES = {"head_dim": 16, "state_size": 16, "d_model": 48}
HYBRID = "mamba2attn hybrid"


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt with its key and its way of sampling."""

    prompt: tuple
    key: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


_FILTERS = (dict(), dict(top_p=0.9), dict(top_k=8), dict(top_k=8, top_p=0.9))
_WAYS = [(0.0, {}), *itertools.product((0.3, 0.7, 1.0, 1.3), _FILTERS)]
# All ways of sampling, each with every prompt, as one batch. The first rows have temperature 0.
ROWS = [
    Row(tuple(prompt), 10 * i + j, temperature, **filters)
    for i, (temperature, filters) in enumerate(_WAYS)
    for j, prompt in enumerate(PROMPTS)
]


def planned(model, rows, own=None, **options):
    """A request of rows with their own sampling, and with more options of `own` for each."""
    names = ("temperature", "top_k", "top_p", "key")
    each = [
        st.Options(max_new_tokens=NEW_TOKENS, **{n: getattr(row, n) for n in names}, **more)
        for row, more in zip(rows, own or [{}] * len(rows), strict=True)
    ]
    return plan(model, [row.prompt for row in rows], each, **options)


def started(model, request):
    """The first state of the decode loop."""
    start = request.drafter, request.context, request.keys, request.sampling
    return request.decoder.start(model, *start)


def ended(model, request, decoder=None):
    """The last state of the decode loop, perhaps of another decoder."""
    state, decoder = started(model, request), decoder or request.decoder
    return decoder.run(model, request.drafter, state, request.limits, request.sampling)


def decoded(model, request):
    """The result of `generate`, cache included, for a request that was planned by hand."""
    state = ended(model, request)
    tokens, starts = np.asarray(state.context.tokens), np.asarray(request.context.length)
    new = np.stack([row[at : at + NEW_TOKENS] for row, at in zip(tokens, starts, strict=True)])
    new = np.where(np.arange(NEW_TOKENS) < np.asarray(state.emitted)[:, None], new, st.PAD)
    stats = statistics_of(jax.tree.map(np.asarray, state.statistics), request, None)
    return st.Generation(new, np.asarray(state.emitted), stats, state.cache)


def resized(config, resize):
    """A config with the values `resize(name, value)` of its fields, and of those inside of it."""

    def changed(name, value):
        if dataclasses.is_dataclass(value):
            return resized(value, resize)
        if isinstance(value, tuple):
            return tuple(changed("", part) for part in value)
        return resize(name, value)

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: changed(name, fields[name]) for name in fields})


def in_native_sizes(config):
    """A config in sizes that native code takes."""
    return resized(config, SIZES.get)


@functools.cache
def model_of(family, seed=0):
    """A tiny model; with ", int8" or ", int4" behind its name as a CPU loads that, to the bit."""
    name, _, kind = family.partition(", ")
    if not kind:
        return tiny_model(name, seed)
    return random_model(in_native_sizes(CONFIGS[name]), seed).quantized(kind).packed()


@functools.cache
def autoregressive(family="plain"):
    """The texts of `ROWS`; all tables of a process share them."""
    model = model_of(family)
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


def of_rows(pieces, row):
    """The tokens of a row of a stream."""
    return [token for piece in pieces for token in piece[row]]


def steps(target, *, count=10**9, prompts=PROMPTS, **options):
    """The first steps of a request: what was before, the draft, the verdict, and the state after.

    Before are `tokens` and `length` of the texts, which rows were `done`, and how many `drafted`.
    """
    request = plan(target, prompts, **dict(max_new_tokens=NEW_TOKENS) | options)
    state = started(target, request)
    while count and not state.done.all():
        count -= 1
        (tokens, length), done, drafted = jax.tree.map(
            np.array, (state.context, state.done, state.statistics.drafted)
        )
        before = types.SimpleNamespace(tokens=tokens, length=length, done=done, drafted=drafted)
        state, draft, verdict = request.decoder.step(
            target, request.drafter, state, request.limits, request.sampling
        )
        yield before, *jax.tree.map(np.asarray, (draft, verdict)), state


def proposed(drafter, topology, text, *, temperature=0.0, key=0, length=None, noise=None):
    """The first draft after a text, of a buffer that may have more tokens than its `length`."""
    length = jnp.array([len(text) if length is None else length], jnp.int32)
    context = st.Context(jnp.array([text], jnp.int32), length)
    sampling = Sampling(jnp.full(1, temperature or 1.0), temperature_is_zero=temperature == 0)
    step = Step(context, jax.random.split(jax.random.key(key), 1), noise, sampling)

    @jax.jit
    def propose(drafter, step):
        state = state_after(drafter, step.context, topology, 64)
        return drafter.propose(state, step, topology)[0]

    return propose(drafter, step)


def log_probs_after(model, text, paths, sharpness=1.0, noise=None, temperature=1.0):
    """Of the token after a text and each of some paths, which are of one length."""
    padded = np.zeros((max(4, len(paths)), 96), np.int32)
    for row, path in zip(padded, paths, strict=False):
        row[: len(text) + len(path)] = [*text, *path]
    last = len(text) + len(paths[0]) - 1
    logits = np.asarray(apply(model, padded), np.float64)
    logits = logits[: len(paths), last, : model.config.vocab_size]
    if noise is not None:
        logits = logits / temperature + np.asarray(noise)[0, len(paths[0])]
    return log_softmax(sharpness * logits)


def broken_at(token, value=np.nan, model=None):
    """A model whose embedding of one token is not finite: only rows that read it fail."""
    model = tiny_model("groups", seed=4) if model is None else model
    return with_weight(model, "embedding", lambda rows: rows.at[token].set(value))


def dynamic_tree(next_log_probs, num_nodes, depth, expand):
    """Dynamic trees by definition: the kept paths with their scores, and those that were read."""
    level, scores, read = [()], {(): 0.0}, set()
    for _ in range(depth):
        read |= set(level)
        below = []
        for path, log_probs in zip(level, next_log_probs(level), strict=True):
            for token in np.argsort(-log_probs, kind="stable")[:expand]:
                below.append((*path, int(token)))
                scores[below[-1]] = scores[path] + log_probs[token]
        level = sorted(below, key=lambda path: -scores[path])[:expand]
    kept = sorted(scores, key=lambda path: (-scores[path], len(path)))[:num_nodes]
    return {path: scores[path] for path in kept}, read


def paths_of(tokens, parents, valid):
    """The path of each node that exists; parents come first."""
    paths = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], int(tokens[node])))
    return [path for path, exists in zip(paths, valid, strict=True) if exists]
