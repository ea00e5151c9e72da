"""Drafts of two models: enumerated as in test_verify.py, and in the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse_chain
from stree_jax.testing import PROMPTS, assert_lossless, perturbed, tiny_model
from tests.decoding.enumeration import (
    EXACT,
    VOCAB,
    Models,
    draft_outcomes,
    enumerated,
    prefix_of,
    target_joint,
    total_variation,
    walks,
)

RULES = (try_children, traverse_chain)


# Enumeration: a target, a medium and a small model.


def with_draft(target, draft):
    """`Models` of two tables."""
    models = Models(0)
    models.target, models.draft = target, draft
    return models


def three_models(seed):
    return Models(seed).target, Models(seed).draft, Models(seed + 100).draft


def by_turns(medium, small, pattern):
    """The table of a drafter whose letter of each depth says which model draws."""
    of = {"q": medium, "s": small}
    table = of[pattern[2]].copy()
    table[:, VOCAB] = of[pattern[1]][:, VOCAB]
    table[VOCAB, VOCAB] = of[pattern[0]][VOCAB, VOCAB]
    return table


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pattern", ["sqs", "ssq", "qss"])
def test_turns_are_exact_with_the_distribution_of_whose_turn_it_was(pattern, rule):
    target, medium, small = three_models(len(pattern))
    models = with_draft(target, by_turns(medium, small, pattern))
    topology = st.TreeTopology.chain(3)
    tokens, weights = draft_outcomes(models, topology, "iid")
    options = dict(replace=True, rule=rule, length=3)
    joint, _ = enumerated(models, topology, tokens, weights, **options)
    assert total_variation(joint, target_joint(models, 3)) < EXACT
    models.draft = medium  # the classic mistake: one model's distribution for both
    wrong, _ = enumerated(models, topology, tokens, weights, **options)
    assert total_variation(wrong, target_joint(models, 3)) > 0.01


def cascade_outcomes(medium, small, num_drafts, rounds, rule):
    """All chains of a cascade and their probabilities; -1 where a chain has ended."""
    inner = st.TreeTopology.chain(num_drafts)
    chains = {(): 1.0}
    for _ in range(rounds):
        longer = {}
        for prefix, chance in chains.items():
            # Both models after this prefix; the tables know two tokens.
            models = with_draft(*(shifted(table, prefix) for table in (medium, small)))
            tokens, weights = draft_outcomes(models, inner, "iid")
            for weight, walk in walks(models, inner, tokens, weights, replace=True, rule=rule):
                for row, w, last, probs in zip(tokens, weight, walk.last, walk.probs, strict=True):
                    path = (*prefix, *prefix_of(inner, row, last))
                    for token in range(VOCAB) if w else ():
                        chain = (*path, token)
                        longer[chain] = longer.get(chain, 0) + chance * w * float(probs[token])
        chains = longer
    most = rounds * (num_drafts + 1)
    rows = [[-1, *chain, *[-1] * (most - len(chain))] for chain in chains]
    return np.array(rows), np.array([*chains.values()])


def shifted(table, prefix):
    """The table of a model that has read a prefix."""
    if not prefix:
        return table
    after = table.copy()
    if len(prefix) >= 2:
        after[:] = table[tuple(prefix[:2])]
    else:
        after[VOCAB, VOCAB] = table[prefix[0], VOCAB]
        after[:VOCAB] = table[prefix[0], :VOCAB, None]
    return after


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_drafts", "rounds"), [(1, 1), (2, 1), (1, 2)])
def test_a_cascade_is_exact_although_its_length_is_random(num_drafts, rounds, rule):
    target, medium, small = three_models(num_drafts + 5)
    chains, weights = cascade_outcomes(medium, small, num_drafts, rounds, rule)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-5)
    assert len({tuple(chain >= 0) for chain in chains}) > 1  # ragged
    models = with_draft(target, medium)
    topology = st.TreeTopology.chain(chains.shape[1] - 1)
    for outer in RULES:
        joint, _ = enumerated(models, topology, chains, weights, replace=True, rule=outer, length=3)
        assert total_variation(joint, target_joint(models, 3)) < EXACT
    # A chain that is cut by its own last token's probability is no such chain.
    own = Models.at(medium, [])[chains[:, 1]]
    cut = np.where((own < 0.3)[:, None], -1, chains)
    wrong, _ = enumerated(models, topology, cut, weights, replace=True, length=3)
    assert total_variation(wrong, target_joint(models, 3)) > 0.01


# In the loop.


@functools.cache
def models():
    target = tiny_model()
    return target, perturbed(target, 0.05), perturbed(target, 0.15, seed=1)


def drafter(name, **options):
    _, medium, small = models()
    match name:
        case "ssq" | "sqqsss":
            return st.InterleavedDrafter(medium, small, name, **options)
        case "lookup":
            return st.CascadeDrafter(medium, st.NgramDrafter(), rounds=3, **options)
        case "small":
            inner = options.pop("inner", st.ModelDrafter(small))
            return st.CascadeDrafter(medium, inner, rounds=2, **options)
        case "tree":
            tree = st.TreeTopology.from_parents([-1, 0, 0, 1])
            inner = st.ModelDrafter(small)
            return st.CascadeDrafter(medium, inner, rounds=2, inner_topology=tree, **options)


def test_ragged_chains_count_what_was_drafted():
    """Each round adds at least one draft, and seldom all."""
    many = drafter("lookup")
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=24, drafter=many)
    calls, most = out.stats.num_target_calls, many.default_topology().depth
    assert many.rounds * calls <= out.stats.num_drafted < most * calls


@pytest.mark.slow
def test_models_that_agree_accept_everything():
    """So all tokens that can be missed are, in each model."""
    target = tiny_model()
    for every in (
        st.InterleavedDrafter(target, target, "qsss"),
        st.CascadeDrafter(
            target, st.ModelDrafter(target), rounds=1, inner_topology=st.TreeTopology.chain(3)
        ),
    ):
        (out,) = assert_lossless(target, every, temperatures=(0.0,))
        assert out.stats.tau == 24 / np.ceil(24 / 5)


def cache_after(model, tokens):
    padded = np.zeros((1, 48), np.int32)
    padded[0, : len(tokens)] = tokens
    return read(model, jnp.asarray(padded), jnp.array([len(tokens)], jnp.int32))[1]


@jax.jit
def read(model, tokens, lengths):
    return model.prefill(tokens, lengths)


@jax.jit
def replayed(model, part):
    return model.replay(part.cache, part.pending, part.path)


def readers(drafter, state):
    """Model, state and number of catch-up tokens `[B]` of each reader, as it starts a step."""
    if isinstance(drafter, st.InterleavedDrafter):
        both = (drafter.medium, state["q"]), (drafter.small, state["s"])
    else:
        inner = state.rounds[0].state.reader
        both = (drafter.medium, state.reader), (drafter.inner.model, inner)
    return [(model, part, part.has_catch_up.sum(axis=1)) for model, part in both]


@pytest.mark.parametrize("name", ["sqqsss", pytest.param("small", marks=pytest.mark.slow)])
def test_all_models_have_read_the_text(name):
    """All but the root and the catch-up tokens, after every step, whatever was accepted."""
    target, many, accepted = tiny_model(), drafter(name), set()
    request = plan(target, PROMPTS, drafter=many, max_new_tokens=14)
    state = request.decoder.start(target, many, request.context, request.keys)
    missed = set()
    for _ in range(7):
        done = np.asarray(state.done)
        state, _, verdict = request.decoder.step(
            target, many, state, request.limits, request.sampling
        )
        text, length = np.asarray(state.context.tokens), np.asarray(state.context.length)
        parts = readers(many, state.drafter)
        caches = [replayed(model, part) for model, part, _ in parts]
        for row in np.flatnonzero(~done):
            accepted.add(int(verdict.num_accepted[row]))
            for (model, part, catch_up), cache in zip(parts, caches, strict=True):
                num_missed = int(catch_up[row])
                num_read = length[row] - 1 - num_missed
                missed.add(num_missed)
                unread = np.ravel(part.catch_up[row])[-num_missed:] if num_missed else []
                assert list(unread) == text[row, num_read : length[row] - 1].tolist()
                jax.tree.map(
                    lambda a, b, row=row: np.testing.assert_allclose(a[row], b[0], atol=1e-4),
                    cache,
                    cache_after(model, text[row, :num_read]),
                )
    assert len(accepted) > 2
    assert len(missed) > 1


class NotAModule:
    default_topology = init = read = propose = commit = st.NgramDrafter.init


def test_what_is_refused():
    target, medium, small = models()
    other = st.HybridLM(st.ModelConfig.tiny(vocab_size=5), rngs=nnx.Rngs(0))
    for pattern in ("qqq", "sx", "", "qs" * 9):
        with pytest.raises(ValueError, match="pattern must have letters q .medium. and s .small"):
            st.InterleavedDrafter(medium, small, pattern)
    with pytest.raises(ValueError, match="child_sampling must be 'auto' or 'iid', got 'shared'"):
        st.InterleavedDrafter(medium, small, "sq", child_sampling="shared")
    with pytest.raises(ValueError, match="medium and small have different vocabularies: 37 and 5"):
        st.InterleavedDrafter(medium, other, "sq")
    with pytest.raises(ValueError, match="inner must be a drafter that is a flax.nnx.Module"):
        st.CascadeDrafter(medium, NotAModule())
    for rounds in (0, 22, True):
        with pytest.raises(
            ValueError, match="rounds, for chains of .* must be an integer, from 1 to 21"
        ):
            st.CascadeDrafter(medium, st.NgramDrafter(), rounds=rounds)
    with pytest.raises(ValueError, match="inner_topology must be a TreeTopology with at least one"):
        st.CascadeDrafter(medium, st.NgramDrafter(), inner_topology=st.TreeTopology.chain(0))
    sampled = dict(temperature=1.0, key=jax.random.key(0))
    iid = drafter("ssq", child_sampling="iid")
    refused = {
        "different vocabularies: 5 and 37": dict(
            drafter=st.CascadeDrafter(small, st.ModelDrafter(other))
        ),
        "fills a chain of 3 drafts and no other tree": dict(
            drafter=drafter("ssq"), topology=st.TreeTopology.chain(4)
        ),
        "cascade of 2 rounds fills a chain of 6 drafts": dict(
            drafter=drafter("small"), topology=st.TreeTopology.paper("A")
        ),
        "'iid' needs temperature > 0": dict(drafter=iid),
        "child_sampling = 'iid' needs temperature > 0": dict(
            drafter=drafter("small", inner=st.ModelDrafter(small, child_sampling="iid"))
        ),
        "'traversal' is not exact for child_sampling = 'shared'": dict(
            drafter=drafter("small"), verifier="traversal", **sampled
        ),
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            plan(target, PROMPTS, **options)
    assert plan(target, PROMPTS, drafter=iid, **sampled).decoder.verifier.name == "traversal"
    shared = plan(target, PROMPTS, drafter=drafter("small"), **sampled)
    assert shared.decoder.verifier.name == "target_only"
