"""Texts of autoregressive decoding and of trees, whose rows have different ways of sampling."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


class Told(nnx.Module):
    """Drafts that know the text: in each step one path of the tree is right, in turn to every node.

    So all accepted lengths and all branches occur, and no draft model has to be compiled.

    Args:
        prompts: token ids of each row.
        texts: its new tokens, `[rows, T]`.
        vocab_size: number of tokens.
    """

    def __init__(self, prompts, texts, vocab_size):
        self.starts = jnp.array([len(prompt) for prompt in prompts])
        self.texts, self.vocab_size = jnp.asarray(texts), vocab_size

    def default_topology(self):
        return st.TreeTopology.chain(4)

    def init(self, batch, topology, max_length):
        return None

    def read(self, state, tokens, hidden, lengths):
        return None

    def propose(self, state, step, topology):
        (rows, length), nodes = self.texts.shape, topology.num_nodes
        context, row = step.context, jnp.arange(rows)
        after = (context.length - self.starts)[:, None] + np.array(topology.depths) - 1
        right = jnp.take_along_axis(self.texts, jnp.clip(after, 0, length - 1), axis=1)
        end = (7 * context.length + row) % nodes
        tree = topology.tree(jnp.ones((rows, nodes), bool))
        is_right = tree.ancestor_mask[row, end]
        tokens = jnp.where(is_right, right, (right + 1 + np.arange(nodes)) % self.vocab_size)
        tokens = tokens.at[:, 0].set(context.tokens[row, context.length - 1])
        none, finite = jnp.full(nodes, -1, jnp.int32), jnp.ones(rows, bool)
        return st.DraftTree(tokens.astype(jnp.int32), tree, None, none, finite), None

    def commit(self, state, draft, verdict, hidden, topology):
        return None


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
