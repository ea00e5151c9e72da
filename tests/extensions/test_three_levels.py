"""Drafts of two models: enumerated as in test_verify.py, and in the loop."""

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import apply, assert_lossless, perturbed, random_model, tiny_model
from tests.decoding import enumeration as en
from tests.decoding.texts import steps
from tests.drafters import Plain
from tests.helpers import some
from tests.methods import PROMPTS, SAMPLED, drafts

RULES = (try_children, traverse)


def with_draft(target, draft):
    """`Models` of two tables."""
    models = en.Models(0)
    models.target, models.draft = target, draft
    return models


def three_models(seed):
    return en.Models(seed).target, en.Models(seed).draft, en.Models(seed + 100).draft


def by_turns(medium, small, pattern):
    """The table of a drafter whose letter of each depth says which model draws."""
    of = {"q": medium, "s": small}
    table = of[pattern[2]].copy()
    table[:, en.VOCAB] = of[pattern[1]][:, en.VOCAB]
    table[en.VOCAB, en.VOCAB] = of[pattern[0]][en.VOCAB, en.VOCAB]
    return table


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pattern", some(["sqs", "ssq", "qss"], "sqs"))
def test_turns_are_exact_with_the_distribution_of_whose_turn_it_was(pattern, rule):
    target, medium, small = three_models(len(pattern))
    models = with_draft(target, by_turns(medium, small, pattern))
    topology = st.TreeTopology.chain(3)
    tokens, weights = en.draft_outcomes(models, topology, "iid")
    options = dict(replace=True, rule=rule, length=3)
    joint, _ = en.enumerated(models, topology, tokens, weights, **options)
    assert en.total_variation(joint, en.target_joint(models, 3)) < en.EXACT
    models.draft = medium  # the classic mistake: one model's distribution for both
    wrong, _ = en.enumerated(models, topology, tokens, weights, **options)
    assert en.total_variation(wrong, en.target_joint(models, 3)) > 0.01


def cascade_outcomes(medium, small, num_drafts, rounds, rule):
    """All chains of a cascade and their probabilities; -1 where a chain has ended."""
    inner = st.TreeTopology.chain(num_drafts)
    chains = {(): 1.0}
    for _ in range(rounds):
        longer = {}
        for prefix, chance in chains.items():
            # Both models after this prefix; the tables know two tokens.
            models = with_draft(*(shifted(table, prefix) for table in (medium, small)))
            tokens, weights = en.draft_outcomes(models, inner, "iid")
            for weight, walk in en.walks(models, inner, tokens, weights, replace=True, rule=rule):
                for row, w, last, probs in zip(tokens, weight, walk.last, walk.probs, strict=True):
                    path = (*prefix, *en.prefix_of(inner, row, last))
                    for token in range(en.VOCAB) if w else ():
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
        after[en.VOCAB, en.VOCAB] = table[prefix[0], en.VOCAB]
        after[: en.VOCAB] = table[prefix[0], : en.VOCAB, None]
    return after


@pytest.mark.parametrize("rule", some(RULES, try_children))
@pytest.mark.parametrize("num_drafts_and_rounds", some([(1, 1), (2, 1), (1, 2)], (1, 1)))
def test_a_cascade_is_exact_although_its_length_is_random(num_drafts_and_rounds, rule):
    num_drafts, rounds = num_drafts_and_rounds
    target, medium, small = three_models(num_drafts + 5)
    chains, weights = cascade_outcomes(medium, small, num_drafts, rounds, rule)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-5)
    assert len({tuple(chain >= 0) for chain in chains}) > 1  # ragged
    models = with_draft(target, medium)
    topology = st.TreeTopology.chain(chains.shape[1] - 1)
    for outer in RULES:
        joint, _ = en.enumerated(
            models, topology, chains, weights, replace=True, rule=outer, length=3
        )
        assert en.total_variation(joint, en.target_joint(models, 3)) < en.EXACT
    # A chain that is cut by its own last token's probability is no such chain.
    own = en.Models.at(medium, [])[chains[:, 1]]
    cut = np.where((own < 0.3)[:, None], -1, chains)
    wrong, _ = en.enumerated(models, topology, cut, weights, replace=True, length=3)
    assert en.total_variation(wrong, en.target_joint(models, 3)) > 0.01


@pytest.mark.slow
def test_models_that_agree_accept_everything():
    """So all tokens that can be missed are, in each model."""
    target, chain = tiny_model(), st.TreeTopology.chain(3)
    for every in (
        st.InterleavedDrafter(target, target, "qsss"),
        st.CascadeDrafter(target, st.ModelDrafter(target), rounds=1, inner_topology=chain),
    ):
        (out,) = assert_lossless(target, every, temperatures=(0.0,))
        assert out.stats.tau == 24 / np.ceil(24 / 5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["turns", pytest.param("cascade", marks=pytest.mark.slow)])
def test_all_models_have_read_the_text(name):
    """Each draft is the best token of whose turn it is, after whatever was accepted before."""
    target, accepted = tiny_model(), set()
    options = drafts(target, name)
    drafter, depth = options["drafter"], options["drafter"].default_topology().depth
    # At temperature 0 a cascade drafts the text of its medium model.
    whose = drafter.pattern if name == "turns" else "q" * depth
    for before, draft, verdict, _ in steps(target, count=7, **options):
        accepted |= {*verdict.num_accepted.tolist()}
        for row, read in enumerate(before.tokens):
            text = [*read[: before.length[row]], *draft.tokens[row, 1:]]
            padded = np.pad([text], ((0, 0), (0, 64 - len(text))))
            best = {
                letter: np.asarray(apply(model, padded))[0].argmax(-1)
                for letter, model in (("q", drafter.medium), ("s", getattr(drafter, "small", None)))
                if model is not None
            }
            for node in np.flatnonzero(draft.tree.valid[row, 1:]):
                at = before.length[row] + node
                assert text[at] == best[whose[node]][at - 1]
    assert len(accepted) > 2


def models():
    """A medium and a small model, and one of another vocabulary."""
    medium, small = perturbed(tiny_model(), 0.05), perturbed(tiny_model(), 0.15, seed=1)
    return medium, small, random_model(st.ModelConfig.tiny(vocab_size=5))


def turns(pattern="sq", small=1, **options):
    return lambda: st.InterleavedDrafter(models()[0], models()[small], pattern, **options)


def cascade(make=st.NgramDrafter, **options):
    return lambda: st.CascadeDrafter(models()[0], make(), **options)


def iid():
    return st.ModelDrafter(models()[1], child_sampling="iid")


REFUSED = [
    (turns("qqq"), {}, "pattern must have letters q .medium. and s .small"),
    (turns("qs" * 9), {}, "pattern must have letters q .medium. and s .small"),
    (turns(child_sampling="shared"), {}, "child_sampling must be 'auto' or 'iid', got 'shared'"),
    (turns(small=2), {}, "medium and small have different vocabularies: 37 and 5"),
    (cascade(lambda: Plain(tiny_model())), {}, "a Plain, which .* with inner_layers = None, such"),
    (cascade(rounds=22), {}, "rounds, for chains of .* must be an integer, from 1 to 21"),
    (cascade(inner_topology=st.TreeTopology.chain(0)), {}, "inner_topology must be a TreeTopol"),
    (cascade(lambda: st.ModelDrafter(models()[2])), {}, "different vocabularies: 5 and 37"),
    (turns("ssq"), dict(topology=st.TreeTopology.chain(4)), "fills a chain of 3 drafts and no"),
    (cascade(rounds=2), dict(topology=st.TreeTopology.paper("A")), "of 2 rounds fills a chain of"),
    (turns(child_sampling="iid"), {}, "'iid' needs temperature > 0"),
    (cascade(iid), {}, "child_sampling = 'iid' needs temperature > 0"),
    (cascade(), dict(verifier="traversal", **SAMPLED), "'traversal' is not exact"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_is_refused(make, options, message):
    """When it is made, or with a request."""
    with pytest.raises(ValueError, match=message):
        plan(tiny_model(), PROMPTS, drafter=make(), **options)
    for make, rule in ((turns(child_sampling="iid"), "traversal"), (cascade(), "target_only")):
        chosen = plan(tiny_model(), PROMPTS, drafter=make(), **SAMPLED)
        assert chosen.decoder.verifier.name == rule
