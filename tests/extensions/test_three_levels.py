"""Drafts of two models: enumerated as in test_verify.py, and in the loop."""

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import apply, perturbed, random_model, tiny_model
from tests.decoding import enumeration as en
from tests.decoding.texts import steps
from tests.helpers import by_message, refusal, some
from tests.methods import PROMPTS, SAMPLED, drafts


def by_turns(medium, small, pattern):
    """The table of a drafter whose letter of each depth says which model draws."""
    of = {"q": medium, "s": small}
    table = of[pattern[2]].copy()
    table[:, en.VOCAB] = of[pattern[1]][:, en.VOCAB]
    table[en.VOCAB, en.VOCAB] = of[pattern[0]][en.VOCAB, en.VOCAB]
    return table


@pytest.mark.parametrize("rule", [try_children, traverse])
@pytest.mark.parametrize("pattern", some(["sqs", "ssq", "qss"], "sqs"))
def test_turns_are_exact_with_the_distribution_of_whose_turn_it_was(pattern, rule):
    target, medium, small = en.three_tables(len(pattern))
    models = en.Models.of(target, by_turns(medium, small, pattern))
    topology = st.TreeTopology.chain(3)
    chains = en.draft_outcomes(models, topology, "iid")
    options = dict(replace=True, rule=rule, length=3)
    assert en.distance(models, topology, chains, **options) < en.EXACT
    models.draft = medium  # the classic mistake: one model's distribution for both
    assert en.distance(models, topology, chains, **options) > 0.01


@pytest.mark.thorough
def test_all_models_have_read_the_text():
    """Each draft is the best token of whose turn it is, after whatever was accepted before."""
    target, accepted = tiny_model(), set()
    options = drafts(target, "turns")
    drafter = options["drafter"]
    for before, draft, verdict, _ in steps(target, count=7, **options):
        accepted |= {*verdict.num_accepted.tolist()}
        for row, read in enumerate(before.tokens):
            text = [*read[: before.length[row]], *draft.tokens[row, 1:]]
            padded = np.pad([text], ((0, 0), (0, 64 - len(text))))
            best = {
                letter: np.asarray(apply(model, padded))[0].argmax(-1)
                for letter, model in (("q", drafter.medium), ("s", drafter.small))
            }
            for node in np.flatnonzero(draft.tree.valid[row, 1:]):
                at = before.length[row] + node
                assert text[at] == best[drafter.pattern[node]][at - 1]
    assert len(accepted) > 2


def models():
    """A medium and a small model, and one of another vocabulary."""
    medium, small = perturbed(tiny_model(), 0.05), perturbed(tiny_model(), 0.15, seed=1)
    return medium, small, random_model(st.ModelConfig.tiny(vocab_size=5))


def turns(pattern="sq", small=1, **options):
    return lambda: st.InterleavedDrafter(models()[0], models()[small], pattern, **options)


REFUSED = [
    (turns("qqq"), {}, "pattern must have letters q .medium. and s .small"),
    (turns("qs" * 9), {}, "pattern must have letters q .medium. and s .small"),
    (turns(child_sampling="shared"), {}, "child_sampling must be 'auto' or 'iid', got 'shared'"),
    (turns(small=2), {}, "medium and small have different vocabularies: 37 and 5"),
    (turns("ssq"), dict(topology=st.TreeTopology.chain(4)), "fills a chain of 3 drafts and no"),
    (turns(child_sampling="iid"), {}, "'iid' needs temperature > 0"),
]


@by_message(("make", "options", "message"), REFUSED)
def test_what_is_refused(make, options, message):
    """When it is made, or with a request."""
    refusal(message, lambda: plan(tiny_model(), PROMPTS, drafter=make(), **options))


def test_samples_are_traversed():
    request = plan(tiny_model(), PROMPTS, drafter=turns(child_sampling="iid")(), **SAMPLED)
    assert request.decoder.verifier.name == "traversal"
