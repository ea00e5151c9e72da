"""Medusa heads: candidates by depth, enumerated as in test_verify.py, and in the loop."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.decoding.options import plan
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import PROMPTS, apply, assert_lossless, tiny_model
from stree_jax.tuning.search import acceptance, replay_tau
from tests.decoding.enumeration import (
    EXACT,
    VOCAB,
    Models,
    draft_outcomes,
    enumerated,
    target_joint,
    total_variation,
)
from tests.decoding.texts import NEW_TOKENS
from tests.helpers import heads_of

KINDS = ("iid", "without_replacement")
TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 2, 3])


# Exactness.


def shared_outcomes(models, topology, children):
    """Drafts whose nodes of one depth and rank are one draw, and their probabilities."""
    tokens, weights = draft_outcomes(models, topology, children)
    rank = [0] * topology.num_nodes
    for below in topology.children:
        for at, child in enumerate(below):
            rank[child] = at
    place = [*zip(topology.depths, rank, strict=True)]
    first = [place.index(p) for p in place]
    shared = (tokens == tokens[:, first]).all(axis=1)
    # One draw for all: the probability of the first nodes alone.
    weights = np.ones(len(tokens))
    for node, below in enumerate(topology.children):
        if not below or node != next(
            n for n, c in enumerate(topology.children)
            if c and topology.depths[n] == topology.depths[node]
        ):  # fmt: skip
            continue
        law = models.laws[topology.depths[node]]
        left = np.ones(len(tokens))
        for child in below:
            weights *= law[tokens[:, child]] / left
            if children == "without_replacement":
                left -= law[tokens[:, child]]
    return tokens[shared], weights[shared]


class ByDepth(Models):
    """A draft whose distribution depends on the depth alone."""

    def __init__(self, seed):
        super().__init__(seed)
        self.laws = np.random.default_rng(seed + 77).dirichlet(np.full(VOCAB, 0.7), size=3)
        self.draft[:] = self.laws[2]
        self.draft[:, VOCAB] = self.laws[1]
        self.draft[VOCAB, VOCAB] = self.laws[0]


@pytest.mark.parametrize("children", KINDS)
def test_walks_are_exact_with_draws_that_a_depth_shares(children):
    topology, models = st.TreeTopology.from_branching((2, 2)), ByDepth(3)
    tokens, weights = shared_outcomes(models, topology, children)
    np.testing.assert_allclose(weights.sum(), 1.0)
    fine, wrong = (
        enumerated(models, topology, tokens, weights, replace=children == "iid", rule=rule)[0]
        for rule in (try_children, traverse)
    )
    assert total_variation(fine, target_joint(models)) < EXACT
    assert total_variation(wrong, target_joint(models)) > 0.001
    models.draft[:] = models.laws[0]  # one head's distribution for all depths
    wrong, _ = enumerated(models, topology, tokens, weights, replace=children == "iid")
    assert total_variation(wrong, target_joint(models)) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranks_by_depth_give_the_tau_of_every_tree(temperature):
    """Without decoding with the tree; texts end inside paths, too."""
    model = repeating()
    drafter = st.MedusaDrafter(model, heads_of(model, 3, 0.1))
    options = dict(max_new_tokens=23, temperature=temperature, key=jax.random.key(0))
    request = plan(model, PROMPTS_24, **options)
    texts = st.generate(model, PROMPTS_24, **options)
    trace = drafter.rank_trace(model, request, list(texts.tokens), 6)
    assert trace.ranks[0].shape == (23, 3)
    for topology in (st.TreeTopology.chain(3), st.TreeTopology.from_branching((3, 2))):
        out = st.generate(model, PROMPTS_24, drafter=drafter, topology=topology, **options)
        assert out.stats.tau > 1.1
        np.testing.assert_allclose(replay_tau(topology, trace), out.stats.tau, rtol=1e-12)
    accept = acceptance(trace, 4)
    assert accept[3].sum() == 0  # there is no such head
    first = np.concatenate([ranks[:, 0] for ranks in trace.ranks])
    np.testing.assert_allclose(accept[0], [(first == rank).mean() for rank in range(6)])


# The text.


@functools.cache
def repeating():
    """With tied embeddings a random model repeats itself, for a while."""
    return tiny_model("mamba_in_llama")


PROMPTS_24 = np.random.default_rng(0).integers(37, size=(24, 5)).tolist()


def test_heads_that_are_zero_repeat_the_next_token():
    """So drafts are accepted exactly where the text repeats its last token."""
    model = repeating()
    heads = st.MedusaHeads(model, num_heads=4, rngs=nnx.Rngs(0))
    (out,) = assert_lossless(
        *(model, st.MedusaDrafter(model, heads)),
        topology=st.TreeTopology.chain(4),
        temperatures=(0.0,),
        prompts=PROMPTS_24,
        max_new_tokens=NEW_TOKENS,
    )
    # In the first step they repeat what the target expected in place of the prompt's last token.
    expected = np.asarray(apply(model, np.array(PROMPTS_24, np.int32)))[:, -2].argmax(axis=-1)
    counts = out.stats.target_calls_per_row
    for text, first, calls in zip(out.tokens, expected, counts, strict=True):
        at = steps = 0
        while at < NEW_TOKENS:
            run, repeated = 0, text[at - 1] if at else first
            while run < 4 and at + run < NEW_TOKENS and text[at + run] == repeated:
                run += 1
            at, steps = at + run + 1, steps + 1
        assert calls == steps
    assert 1.2 < out.stats.tau < 4


def test_the_hidden_state_after_every_cut():
    """It is that of a forward pass over the text; rows that have ended keep theirs."""
    model = tiny_model()
    drafter = st.MedusaDrafter(model, heads_of(model))
    request = plan(model, PROMPTS, drafter=drafter, topology=TREE, max_new_tokens=9)
    limits = request.limits._replace(max_new_tokens=jnp.array([2, 9, 5]))
    state = request.decoder.start(model, drafter, request.context, request.keys)
    lengths = np.asarray(request.context.length)
    np.testing.assert_array_equal(state.drafter.known, lengths > 1)
    for step in range(9):
        done, before = np.asarray(state.done), np.asarray(state.drafter.hidden)
        drafted = np.asarray(state.statistics.drafted)
        state, _, _ = request.decoder.step(model, drafter, state, limits, request.sampling)
        new = np.asarray(state.statistics.drafted) - drafted
        drafts = ~done & (lengths + step > 1)
        np.testing.assert_array_equal(new, drafts * (TREE.num_nodes - 1))
        assert state.drafter.known.all()
        text, length = np.asarray(state.context.tokens), np.asarray(state.context.length)
        hidden = np.asarray(hidden_of(model, state.context.tokens))
        for row in range(3):
            want = before[row] if done[row] else hidden[row, length[row] - 2]
            np.testing.assert_allclose(state.drafter.hidden[row], want, atol=1e-4)
        assert text.shape[1] >= length.max()
    assert state.done.all()


def test_heads_draft_at_once_after_forks_and_continued_prefixes(monkeypatch):
    """The state depends on the text alone, however it was prefilled."""
    module = importlib.import_module("stree_jax.decoding.prefill")
    monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    model = tiny_model()
    drafter, text = st.MedusaDrafter(model, heads_of(model)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    request = plan(model, [text], drafter=drafter, topology=TREE, max_new_tokens=9)
    decoder, keys = request.decoder, request.keys
    tokens = jnp.asarray(np.pad(text, (0, 53))[None], jnp.int32)

    def context(length):
        return Context(tokens, jnp.array([length], jnp.int32))

    whole = decoder.read(model, drafter, context(len(text)))
    want = hidden_of(model, tokens)[:, len(text) - 2]
    for at in (1, 2, 7):
        prefix = decoder.read(model, drafter, context(at))
        assert bool(prefix.drafter.known[0]) == (at > 1)
        joined = decoder.read(model, drafter, context(len(text)), prefix)
        for state in (whole.drafter, joined.drafter):
            assert state.known.all()
            np.testing.assert_allclose(state.hidden, want, atol=1e-4)

    state = slots.empty(decoder, model, drafter, rows=2)
    state = slots.insert(decoder, model, state, [1], joined, keys)
    state = decoder.run(model, drafter, state, request.limits, request.sampling, max_steps=2)
    assert int(state.statistics.drafted[1]) == 2 * (TREE.num_nodes - 1)
    taken = slots.take(state, 1)
    length = int(taken.context.length[0])
    want = hidden_of(model, taken.context.tokens)[:, length - 2]
    np.testing.assert_allclose(taken.drafter.hidden, want, atol=1e-4)


@jax.jit
def hidden_of(model, tokens):
    return model.hidden(tokens)


@pytest.mark.parametrize("children", ["top_k", "iid"])
def test_candidates_are_those_of_the_heads(children):
    """With multipliers and vocabulary padding; laws by depth, ranks by sibling."""
    for name in ("falcon_h1 hybrid", "groups"):
        model = tiny_model(name)
        heads = heads_of(model)
        drafter = st.MedusaDrafter(model, heads, child_sampling=children)
        state = drafter.init(2, TREE, 9)
        hidden = jax.random.normal(jax.random.key(1), state.hidden.shape)
        state = state._replace(hidden=hidden, known=jnp.array([True, False]))
        sampling = Sampling(jnp.ones(2), temperature_is_zero=children == "top_k")
        context = Context(jnp.full((2, 3), 7, jnp.int32), jnp.array([3, 1]))
        keys = jax.random.split(jax.random.key(2), 2)
        draft, _ = drafter.propose(state, Step(context, keys, None, sampling), TREE)
        np.testing.assert_array_equal(draft.tree.valid, [[True] * 8, [True] + [False] * 7])
        assert draft.finite.all()
        logits = model.logits(heads(hidden[:, None])[:, 0])[:, :3, :37]
        tokens = np.asarray(draft.tokens[0])
        assert tokens[0] == 7
        assert tokens[3] == tokens[5]
        assert tokens[4] == tokens[6]
        if children == "top_k":
            best = np.argsort(-np.asarray(logits[0]), axis=-1)
            assert tokens[1:].tolist() == [*best[0, :2], *best[1, :2], *best[1, :2], best[2, 0]]
            assert draft.log_probs is None
        else:
            want = token_log_probs(logits, sampling)
            np.testing.assert_allclose(draft.log_probs, want, atol=1e-5)
            assert draft.log_prob_row.tolist() == [0, 1, 1, 2, -1, -1, -1, -1]


def test_the_output_head_is_not_copied():
    for name in ("plain", "mamba_in_llama"):  # untied, tied
        model = tiny_model(name)
        drafter = st.MedusaDrafter(model, heads_of(model))
        head = model.embedding if model.head is None else model.head
        assert drafter.output_head[...] is head[...]


def test_what_is_refused():
    model, wide = tiny_model(), st.HybridLM(st.ModelConfig.tiny(d_model=32), rngs=nnx.Rngs(0))
    heads = heads_of(model)
    for number in (0, 17, True):
        with pytest.raises(ValueError, match="num_heads must be an integer, from 1 to 16"):
            st.MedusaHeads(model, num_heads=number, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the heads are of a model of width 16, and the target's"):
        st.MedusaDrafter(wide, heads)
    with pytest.raises(ValueError, match="child_sampling must be 'auto' or one of"):
        st.MedusaDrafter(model, heads, child_sampling="best")
    drafter = st.MedusaDrafter(model, heads)
    with pytest.raises(ValueError, match=r"output head of shape .37, 16., and the target's has"):
        plan(wide, PROMPTS, drafter=drafter)
    with pytest.raises(ValueError, match="depth 5 needs as many Medusa heads, and there are 4"):
        plan(model, PROMPTS, drafter=drafter, topology=st.TreeTopology.chain(5))
    sampled = dict(temperature=1.0, key=jax.random.key(0))
    branching = st.TreeTopology.from_branching((2, 2))
    for children, other in (("iid", "multi_step"), ("without_replacement",) * 2):
        drafter = st.MedusaDrafter(model, heads, child_sampling=children)
        with pytest.raises(ValueError, match="child_sampling = '.*' needs temperature > 0"):
            plan(model, PROMPTS, drafter=drafter)
        with pytest.raises(
            ValueError, match=f"'traversal' is not exact where nodes of a depth.*use '{other}', or"
        ):
            plan(
                model, PROMPTS, drafter=drafter, topology=branching, verifier="traversal", **sampled
            )
        chosen = plan(model, PROMPTS, drafter=drafter, topology=branching, **sampled)
        assert chosen.decoder.verifier.name == other
        chain = plan(model, PROMPTS, drafter=drafter, topology=st.TreeTopology.chain(2), **sampled)
        assert chain.decoder.verifier.name == "traversal"
    for fewer in (1, 2, 3):
        few = st.MedusaDrafter(model, heads_of(model, fewer))
        assert few.default_topology().depth == fewer
