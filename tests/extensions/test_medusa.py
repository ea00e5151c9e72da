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


def shared_outcomes(models, children):
    """Drafts of two and two children whose depths are one draw each, and their probabilities."""
    one_branch = st.TreeTopology.from_parents([-1, 0, 0, 1, 1])
    tokens, weights = en.draft_outcomes(models, one_branch, children)
    return tokens[:, [0, 1, 2, 3, 4, 3, 4]], weights


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
    drafts = shared_outcomes(models, children)
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
