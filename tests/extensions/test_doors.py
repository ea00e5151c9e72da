"""The optional methods of drafters, by which the core serves classes that it does not know."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.drafters import draft_models
from stree_jax.decoding.drafters.base import runs_on_mesh
from stree_jax.decoding.options import plan
from stree_jax.testing import perturbed, random_model, tiny_model
from stree_jax.tuning import RankTrace, tune

OTHER_VOCABULARY = st.ModelConfig.tiny(vocab_size=29)


class Plain(nnx.Module):
    """A drafter of a user: the methods of the protocol, and attributes with other meanings."""

    def __init__(self, model, models=None):
        self.inner = st.ModelDrafter(model)
        self.models = nnx.data(models)

    def default_topology(self):
        return st.TreeTopology.chain(2)

    def child_sampling(self, topology, *, temperature_is_zero):
        return self.inner.child_sampling(topology, temperature_is_zero=temperature_is_zero)

    def prepare(self, context, topology, max_length):
        return self.inner.prepare(context, topology, max_length)

    def propose(self, *arguments, **options):
        return self.inner.propose(*arguments, **options)

    def commit(self, *arguments):
        return self.inner.commit(*arguments)


class Answering(Plain):
    """The same with the optional methods."""

    runs_on_mesh = True

    def __init__(self, model, limit=None):
        self.inner = st.ModelDrafter(model)
        self.limit = limit

    def models(self):
        return [self.inner.model]

    def check_target(self, target):
        if self.limit is not None and target.config.d_model > self.limit:
            raise ValueError(f"this drafter is for targets of a width up to {self.limit}")

    def rank_trace(self, target, request, tokens, num_ranks):
        assert target is tiny_model()
        assert [len(new) for new in tokens] == [7]
        return RankTrace([np.zeros((len(new), 3), int) for new in tokens], num_ranks)


def test_a_drafter_without_optional_methods_is_taken_as_it_is():
    drafter = Plain(perturbed(tiny_model(), 0.1), models=[random_model(OTHER_VOCABULARY)])
    assert isinstance(drafter, st.Drafter)
    assert draft_models(drafter) == draft_models(None) == []
    assert not runs_on_mesh(drafter)
    plan(tiny_model(), [[1]], drafter=drafter)


def test_draft_models_must_share_the_vocabulary():
    drafter = Answering(random_model(OTHER_VOCABULARY))
    with pytest.raises(ValueError, match="different vocabularies: 29 and 37 tokens"):
        plan(tiny_model(), [[1]], drafter=drafter)
    inside = st.CascadeDrafter(tiny_model(), drafter)  # models of models
    assert [model.config.vocab_size for model in draft_models(inside)] == [37, 29]
    with pytest.raises(ValueError, match="different vocabularies"):
        plan(tiny_model(), [[1]], drafter=inside)


def test_a_drafter_refuses_a_target():
    plan(tiny_model(), [[1]], drafter=Answering(tiny_model(), limit=16))
    with pytest.raises(ValueError, match="for targets of a width up to 8"):
        plan(tiny_model(), [[1]], drafter=Answering(tiny_model(), limit=8))


def test_the_own_class_says_that_it_runs_on_a_mesh():
    class Changed(Answering):
        pass

    assert runs_on_mesh(Answering(tiny_model()))
    assert not runs_on_mesh(Changed(tiny_model()))
    for kind in (st.ModelDrafter, st.DynamicDrafter, st.BeamDrafter):
        assert runs_on_mesh(kind(tiny_model()))
    assert runs_on_mesh(st.NgramDrafter())
    assert not runs_on_mesh(st.InterleavedDrafter(tiny_model(), tiny_model(), "qs"))


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
