"""`stree_jax.testing` names what is not exact; tests of decoding show that it passes what is."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.testing import (
    PROMPTS,
    assert_lossless,
    assert_same_distribution,
    assert_same_text,
    perturbed,
    random_model,
    tiny_model,
)
from stree_jax.testing.exactness import largest_distance
from tests.drafters import Delegating
from tests.helpers import by_message, refusal, with_weight

CHAIN = st.TreeTopology.chain(3)
SIX = st.ModelConfig.tiny(vocab_size=6, num_layers=1)


def drafter(kind=st.ModelDrafter, **options):
    return kind(perturbed(tiny_model(), 0.1), **options)


iid = functools.partial(drafter, child_sampling="iid")


@dataclasses.dataclass(frozen=True)
class Replaces(Delegating):
    """Says one token for another."""

    token: int = 0
    by: int = 1

    def verify(self, *arguments, **options):
        verdict = super().verify(*arguments, **options)
        token = jnp.where(verdict.next_token == self.token, self.by, verdict.next_token)
        return verdict._replace(next_token=token)


@dataclasses.dataclass(frozen=True)
class Warmer(Delegating):
    """Samples at another temperature."""

    def verify(self, draft, logits, step, topology):
        return super().verify(draft, logits / 2, step, topology)


@dataclasses.dataclass(frozen=True)
class Unfiltered(Delegating):
    """Forgets top-k."""

    def verify(self, draft, logits, step, topology):
        sampling = dataclasses.replace(step.sampling, filters=())
        return super().verify(draft, logits, step._replace(sampling=sampling), topology)


class Blind(st.ModelDrafter):
    """Its nodes of depth 2 and more do not see their ancestor of depth 1."""

    def propose(self, *arguments, **noise):
        draft, state = super().propose(*arguments, **noise)
        depth, mask = draft.tree.depth, draft.tree.ancestor_mask
        mask &= ~((depth[:, :, None] >= 2) & (depth[:, None, :] == 1))
        return draft._replace(tree=draft.tree._replace(ancestor_mask=mask)), state


class Misreporting(st.ModelDrafter):
    """Reports another distribution than the one it drew from."""

    def propose(self, *arguments, **noise):
        draft, state = super().propose(*arguments, **noise)
        return draft._replace(log_probs=jnp.roll(draft.log_probs, 1, axis=-1)), state


def test_a_drafter_with_a_wrong_tree_is_named():
    message = r"row \d, new token \d+: \d+ for \d+; a real difference: their scores differ by"
    with pytest.raises(AssertionError, match=message):
        assert_lossless(tiny_model(), Blind(tiny_model()), topology=CHAIN, max_new_tokens=12)


def test_a_near_tie_is_named():
    """Of two equal tokens the lower one is the best."""
    tokens = st.generate(tiny_model(), PROMPTS, max_new_tokens=12).tokens
    best = int(tokens[1, 5])
    equal = (best + 1) % 37
    model = with_weight(tiny_model(), "head", lambda head: head.at[equal].set(head[best]))
    token, other = sorted((best, equal))
    rule = Replaces(st.VERIFIERS["target_only"], token=token, by=other)
    options = dict(topology=CHAIN, verifier=rule, max_new_tokens=12, temperatures=(0.0,))
    with pytest.raises(AssertionError, match=f"{other} for {token}; a near tie") as error:
        assert_lossless(model, drafter(), **options)
    row, at, *_ = map(int, re.findall(r"\d+", str(error.value)))
    assert st.generate(model, PROMPTS, max_new_tokens=12).tokens[row, at] == token


def test_another_cache_is_named():
    model = tiny_model()
    request = plan(model, PROMPTS, max_new_tokens=4)
    out = st.generate(model, PROMPTS, max_new_tokens=4, return_cache=True)
    assert_same_text(model, request, out, out)
    wrong = dataclasses.replace(out, cache=jax.tree.map(lambda leaf: leaf + 1e-2, out.cache))
    with pytest.raises(AssertionError, match=r"another cache\[0\].*a wrong replay"):
        assert_same_text(model, request, wrong, out)


def pair():
    return random_model(SIX), random_model(SIX, 1)


@pytest.mark.thorough
@by_message(
    ("kind", "options", "message"),
    [
        (Misreporting, {}, "do not have the model's distribution: absolute differences sum to"),
        (st.ModelDrafter, dict(verifier=Warmer), "texts of 1 new tokens do not have the model's"),
        (st.ModelDrafter, dict(verifier=Unfiltered, top_k=2), "were sampled, and their prob"),
    ],
)
def test_other_distributions_are_named(kind, options, message):
    target, draft = pair()
    if "verifier" in options:
        options = options | dict(verifier=options["verifier"](st.VERIFIERS["multi_step"]))
    drafter = kind(draft, child_sampling="iid")
    with pytest.raises(AssertionError, match=message):
        assert_same_distribution(
            target, drafter, topology=st.TreeTopology.chain(2), temperature=3.0, **options
        )


@pytest.mark.parametrize("texts", [2, 6, 36])
def test_the_bound_is_one(texts):
    """Of exact samples so few are above it, at probabilities that can be counted."""
    rng, rows = np.random.default_rng(texts), 500
    law = rng.dirichlet(np.ones(texts))
    found = rng.multinomial(rows, law, size=20_000) / rows
    distances = np.abs(found - law).sum(axis=1)
    for error in (0.3, 0.05, 1e-3):
        assert (distances > largest_distance(texts, rows, error)).mean() <= error


@by_message(
    ("call", "message"),
    [
        (
            lambda: assert_lossless(tiny_model(dtype="bfloat16"), drafter()),
            "model has dtype bfloat16, and only float32 .*; build it with dtype='float32'",
        ),
        (
            lambda: assert_lossless(tiny_model(), iid(), temperatures=(0.7,)),
            "'multi_step' keeps the target's distribution.* 0.7; test it with assert_same_distr",
        ),
        (lambda: assert_same_distribution(tiny_model(), drafter()), "37 tokens make 1369 texts"),
        (lambda: tiny_model("gpt"), "no tiny model 'gpt'; known: .*'plain'"),
    ],
)
def test_refusals(call, message):
    refusal(message, call)
