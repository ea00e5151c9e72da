"""Drafters that users write, and what the abilities of a drafter do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.decoding.drafters import draft_models, drawn_by
from stree_jax.decoding.plan import plan
from stree_jax.testing import perturbed, random_model, tiny_model
from stree_jax.tuning import tune
from tests.drafters import Answering, Plain, Sharing
from tests.helpers import heads_of, refusal
from tests.methods import CHAIN, PROMPTS, SAMPLED

thorough = pytest.mark.thorough

OTHER_VOCABULARY = st.ModelConfig.tiny(vocab_size=29)


@thorough
def test_a_drafters_first_state_may_share_arrays():
    """The loop donates it, and yet model, drafter and request serve again."""
    drafter = Sharing(jnp.arange(9.0))
    want = st.generate(tiny_model(), PROMPTS, max_new_tokens=5)
    for _ in range(2):
        out = st.generate(tiny_model(), PROMPTS, max_new_tokens=5, drafter=drafter)
        assert_array_equal(out.tokens, want.tokens)
    assert_array_equal(drafter.table[...], np.arange(9.0))


def test_draft_models_are_found_wherever_they_are_and_share_the_vocabulary():
    models = [random_model(OTHER_VOCABULARY, seed=seed) for seed in range(2)]
    held = Plain(tiny_model(), others={"both": models})
    inner = draft_models(held)
    assert [model.config.vocab_size for model in inner] == [37, 29, 29]
    assert all(any(model is one for one in inner) for model in models)
    said = Answering(models[0])
    inside = Plain(tiny_model(), others=said)  # models of a drafter in a drafter
    assert [model.config.vocab_size for model in draft_models(inside)] == [37, 29]
    for drafter in (held, said, inside):
        refusal(
            "different vocabularies: 29 and 37 tokens", plan, tiny_model(), [[1]], drafter=drafter
        )


@thorough
@pytest.mark.parametrize(("kind", "depth"), [("own", 3), ("Medusa", 2)])
def test_tune_measures_trees_as_deep_as_the_trace(kind, depth, monkeypatch):
    class Measured(Exception):
        pass

    def measure_costs(*_, max_depth, **__):
        raise Measured(max_depth)

    monkeypatch.setattr("stree_jax.tuning.tuner.measure_costs", measure_costs)
    model = tiny_model()
    heads = heads_of(model, num_heads=2)
    drafter = Answering(model) if kind == "own" else st.MedusaDrafter(model, heads)
    with pytest.raises(Measured, match=str(depth)):
        tune(model, drafter, [[1], [2]], max_new_tokens=7, max_depth=5, key=jax.random.key(0))


@pytest.mark.parametrize("said", [None, "iid", st.Drawn("iid", by_depth=True)])
def test_a_drafter_says_how_children_are_drawn_or_is_taken_as_it_is(said):
    class Saying(Plain):
        def child_sampling(self, topology, *, temperature_is_zero):
            return said

    drafter = (Saying if said else Plain)(perturbed(tiny_model(), 0.1))
    assert draft_models(None) == draft_models(st.NgramDrafter()) == []
    drawn = drawn_by(drafter, CHAIN, temperature_is_zero=said is None)
    assert drawn == (said if isinstance(said, st.Drawn) else st.Drawn(said or "top_k"))
    plan(tiny_model(), [[1]], drafter=drafter, **SAMPLED if said else {})
