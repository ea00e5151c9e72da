"""Medusa heads: candidates by depth, enumerated as in test_verify.py."""

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import PROMPTS, tiny_model
from tests.decoding import enumeration as en
from tests.helpers import heads_of, refusal, some

KINDS = ("iid", "without_replacement")


def shared_outcomes(models, topology, children):
    """Drafts whose nodes of one depth and rank are one draw, and their probabilities."""
    tokens, _ = en.draft_outcomes(models, topology, children)
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


class ByDepth(en.Models):
    """A draft whose distribution depends on the depth alone."""

    def __init__(self, seed):
        super().__init__(seed)
        self.laws = np.random.default_rng(seed + 77).dirichlet(np.full(en.VOCAB, 0.7), size=3)
        self.draft[:] = self.laws[2]
        self.draft[:, en.VOCAB] = self.laws[1]
        self.draft[en.VOCAB, en.VOCAB] = self.laws[0]


@pytest.mark.parametrize("children", some(KINDS, "iid"))
def test_walks_are_exact_with_draws_that_a_depth_shares(children):
    topology, models = st.TreeTopology.from_branching((2, 2)), ByDepth(3)
    drafts = shared_outcomes(models, topology, children)
    np.testing.assert_allclose(drafts[1].sum(), 1.0)
    options = dict(replace=children == "iid")
    assert en.distance(models, topology, drafts, **options) < en.EXACT
    assert en.distance(models, topology, drafts, rule=traverse, **options) > 0.001
    models.draft[:] = models.laws[0]  # one head's distribution for all depths
    assert en.distance(models, topology, drafts, **options) > 0.01


def test_what_is_refused():
    model = tiny_model()
    heads = heads_of(model)
    drafter = st.MedusaDrafter(model, heads)
    refusal(
        "depth 5 needs as many Medusa heads, and there are 4",
        plan,
        model,
        PROMPTS,
        drafter=drafter,
        topology=st.TreeTopology.chain(5),
    )
    sampled = dict(temperature=1.0, key=jax.random.key(0))
    branching = st.TreeTopology.from_branching((2, 2))
    for children, other in (("iid", "multi_step"), ("without_replacement",) * 2):
        drafter = st.MedusaDrafter(model, heads, child_sampling=children)
        refusal(
            "child_sampling = '.*' needs temperature > 0", plan, model, PROMPTS, drafter=drafter
        )
        refusal(
            f"'traversal' is not exact where nodes of a depth.*use '{other}', or",
            plan,
            model,
            PROMPTS,
            drafter=drafter,
            topology=branching,
            verifier="traversal",
            **sampled,
        )
        chosen = plan(model, PROMPTS, drafter=drafter, topology=branching, **sampled)
        assert chosen.decoder.verifier.name == other
        chain = plan(model, PROMPTS, drafter=drafter, topology=st.TreeTopology.chain(2), **sampled)
        assert chain.decoder.verifier.name == "traversal"
    few = st.MedusaDrafter(model, heads_of(model, 2))
    assert few.default_topology().depth == 2
