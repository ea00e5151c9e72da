"""Drafters and verifiers that users write, and what the abilities of a drafter do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from stree_jax.decoding.drafters import draft_models, drawn_by
from stree_jax.decoding.plan import plan
from stree_jax.testing import perturbed, random_model, tiny_model
from stree_jax.tuning import tune
from tests.decoding.texts import steps
from tests.drafters import Answering, Delegating, Plain, Recording, Sharing
from tests.helpers import heads_of, refusal, with_weight
from tests.methods import CHAIN, PROMPTS, SAMPLED, drafts

thorough = pytest.mark.thorough

OTHER_VOCABULARY = st.ModelConfig.tiny(vocab_size=29)


@thorough
@pytest.mark.parametrize(
    ("name", "children"),
    [("greedy", None), ("without_replacement", "without_replacement")],
)
def test_a_wrapped_verifier_is_the_verifier(name, children, monkeypatch):
    """As an object, and by a name of its own."""
    model, common = tiny_model(), dict(max_new_tokens=9, **drafts(tiny_model()))
    if children:
        drafter = st.ModelDrafter(perturbed(model, 0.1), child_sampling=children)
        common |= dict(drafter=drafter, **SAMPLED)
    monkeypatch.setitem(st.VERIFIERS, "mine", Delegating(st.VERIFIERS[name]))
    want = st.generate(model, PROMPTS, verifier=name, **common)
    assert want.stats.num_accepted > 0
    for verifier in ("mine", st.VERIFIERS["mine"]):
        got = st.generate(model, PROMPTS, verifier=verifier, **common)
        assert_array_equal(got.tokens, want.tokens)
        assert_array_equal(got.stats.accepted_per_depth, want.stats.accepted_per_depth)


@thorough
@pytest.mark.parametrize("limit", [1, 2, 30])
def test_commit_gets_the_hidden_states_of_all_nodes_and_the_accepted_one_after_any_cut(limit):
    """The logits of the accepted node's state are those that gave the last emitted token."""
    # A model that repeats tokens, so that drafts are accepted and the limit cuts paths.
    model = random_model(st.ModelConfig.tiny(d_model=16), seed=3)
    model = with_weight(model, "embedding", lambda rows: 40 * rows)
    accepted = set()
    prefill = jax.jit(st.HybridLM.prefill)
    options = dict(drafter=Recording(), topology=st.TreeTopology.chain(2), max_new_tokens=limit)
    for before, _, verdict, state in steps(model, count=6, **options):
        for row in np.flatnonzero(~before.done):
            length = int(state.context.length[row])
            text = np.asarray(state.context.tokens)[row, : length - 1]  # all but the last emitted
            lengths = jnp.array([length - 1], jnp.int32)
            padded = np.pad(text, (0, 48 - len(text)))[None]  # one program for all lengths
            want, _ = prefill(model, jnp.asarray(padded), lengths)
            last = state.drafter["last"][row]
            got = model.logits(state.drafter["hidden"][row, last][None, None])
            assert_allclose(got[0, 0], want[0], atol=2e-3, rtol=1e-4)
            accepted.add(int(verdict.num_accepted[row]))
    assert max(accepted) == min(limit - 1, 2)


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
