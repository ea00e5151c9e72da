"""The optional methods of drafters, by which the core serves classes that it does not know."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.drafters import draft_models, drawn_by
from stree_jax.decoding.options import plan
from stree_jax.testing import perturbed, random_model, tiny_model
from stree_jax.tuning import RankTrace, tune

CHAIN = st.TreeTopology.chain(2)
BY_DEPTH = st.Drawn("iid", by_depth=True)
OTHER_VOCABULARY = st.ModelConfig.tiny(vocab_size=29)


class Plain(nnx.Module):
    """A drafter of a user: what the protocol requires, and attributes with other meanings."""

    def __init__(self, model, models=None):
        self.inner = st.ModelDrafter(model)
        self.models = nnx.data(models)
        self.check = 0

    def default_topology(self):
        return st.TreeTopology.chain(2)

    def init(self, batch, topology, max_length):
        return self.inner.init(batch, topology, max_length)

    def read(self, state, tokens, hidden, lengths):
        assert hidden.shape == (*tokens.shape, tiny_model().config.d_model)
        return self.inner.read(state, tokens, hidden, lengths)

    def propose(self, *arguments, **options):
        return self.inner.propose(*arguments, **options)

    def commit(self, *arguments):
        return self.inner.commit(*arguments)


class Answering(Plain):
    """The same with the optional methods."""

    def __init__(self, model, limit=None):
        self.inner = st.ModelDrafter(model)
        self.limit = limit

    def models(self):
        return [self.inner.model]

    def check(self, target, topology, *, temperature_is_zero):
        if self.limit is not None and target.config.d_model > self.limit:
            raise ValueError(f"this drafter is for targets of a width up to {self.limit}")
        if topology.num_nodes > 5 or not temperature_is_zero:
            raise ValueError("this drafter is for small trees at temperature 0")

    def rank_trace(self, target, request, tokens, num_ranks):
        assert target is tiny_model()
        assert [len(new) for new in tokens] == [7]
        return RankTrace([np.zeros((len(new), 3), int) for new in tokens], num_ranks)


def test_a_drafter_without_optional_methods_is_taken_as_it_is():
    drafter = Plain(perturbed(tiny_model(), 0.1))
    assert isinstance(drafter, st.Drafter)
    assert draft_models(None) == draft_models(st.NgramDrafter()) == []
    assert drawn_by(drafter, CHAIN, temperature_is_zero=True) == st.Drawn("top_k")
    plan(tiny_model(), [[1]], drafter=drafter)


@pytest.mark.parametrize(("said", "drawn"), [("iid", st.Drawn("iid")), (BY_DEPTH, BY_DEPTH)])
def test_how_children_are_drawn_is_a_kind_or_more(said, drawn):
    class Saying(Plain):
        def child_sampling(self, topology, *, temperature_is_zero):
            return said

    assert drawn_by(Saying(tiny_model()), CHAIN, temperature_is_zero=False) == drawn


def test_models_are_found_wherever_they_are():
    models = [random_model(OTHER_VOCABULARY, seed=seed) for seed in range(2)]
    drafter = Plain(tiny_model(), models={"both": models})
    found = draft_models(st.CascadeDrafter(random_model(OTHER_VOCABULARY), drafter))
    assert [model.config.vocab_size for model in found] == [37, 29, 29, 29]
    assert all(any(model is one for one in found) for model in models)
    with pytest.raises(ValueError, match="different vocabularies: 29 and 37 tokens"):
        plan(tiny_model(), [[1]], drafter=drafter)


def test_draft_models_must_share_the_vocabulary():
    drafter = Answering(random_model(OTHER_VOCABULARY))
    with pytest.raises(ValueError, match="different vocabularies: 29 and 37 tokens"):
        plan(tiny_model(), [[1]], drafter=drafter)
    inside = st.CascadeDrafter(tiny_model(), drafter)  # models of models
    assert [model.config.vocab_size for model in draft_models(inside)] == [29, 37]
    with pytest.raises(ValueError, match="different vocabularies"):
        plan(tiny_model(), [[1]], drafter=inside)


def test_a_drafter_refuses_a_target():
    plan(tiny_model(), [[1]], drafter=Answering(tiny_model(), limit=16))
    with pytest.raises(ValueError, match="for targets of a width up to 8"):
        plan(tiny_model(), [[1]], drafter=Answering(tiny_model(), limit=8))
    inside = st.CascadeDrafter(tiny_model(), Answering(tiny_model(), limit=8))
    for refused in (
        dict(drafter=inside),  # for the medium model
        dict(topology=st.TreeTopology.chain(5)),
        dict(temperature=1.0, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="this drafter is for"):
            plan(tiny_model(), [[1]], **{"drafter": Answering(tiny_model())} | refused)


@pytest.mark.parametrize(("kind", "depth"), [("own", 3), ("Medusa", 2)])
def test_tune_measures_trees_as_deep_as_the_trace(kind, depth, monkeypatch):
    class Measured(Exception):
        pass

    def measure_costs(*_, max_depth, **__):
        raise Measured(max_depth)

    monkeypatch.setattr("stree_jax.tuning.tuner.measure_costs", measure_costs)
    model = tiny_model()
    heads = st.MedusaHeads(model, num_heads=2, rngs=nnx.Rngs(0))
    drafter = Answering(model) if kind == "own" else st.MedusaDrafter(model, heads)
    with (
        pytest.warns(UserWarning, match="acceptance was measured on 7 tokens"),
        pytest.raises(Measured, match=str(depth)),
    ):
        tune(model, drafter, [[1], [2]], max_new_tokens=7, max_depth=5, key=jax.random.key(0))


def test_type_checkers_see_what_is_imported_lazily():
    source = Path(st.__file__).read_text()
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module if alias.name != "reasoning" else f"{node.module}.reasoning"
        for node in block.body
        for alias in node.names
    }
    assert seen == st._EXTENSIONS
    assert {*seen} <= {*st.__all__}
