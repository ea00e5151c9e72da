"""Medusa heads: which rules take their drafts; samples are in test_distributions.py."""

import jax

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.testing import PROMPTS, tiny_model
from tests.helpers import heads_of, refusal


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
