"""The examples run, and do what they say."""

import collections
import importlib.util
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import (
    assert_lossless,
    assert_same_distribution,
    perturbed,
    random_model,
    random_mtp_head,
    tiny_model,
)
from tests.decoding import enumeration as en
from tests.helpers import refusal, some

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the tests run without a checkout")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4], [5, 9, 2, 30], [3]]


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = {"steps": 12, "num_layers": 1}
FASTER = {"train_a_pair": SMALL, "own_mixer": SMALL, "grpo": {"steps": 3, "new_tokens": 8}}


@pytest.mark.docs
@pytest.mark.parametrize("name", sorted({f.stem for f in EXAMPLES.glob("*.py")} - {"ray_data"}))
def test_it_runs(name, tiny_pair, monkeypatch, capsys):
    """In this process, with tiny models in the place of the embedded ones; Ray has workers."""
    if name == "tunix_sampler":
        warnings.simplefilter("ignore")  # those of Tunix; pytest restores the filters
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    load(name).main(**FASTER.get(name, {}))
    text = capsys.readouterr().out
    assert "tokens per target call" in text
    assert ": True" in text
    assert ": False" not in text


def test_the_table_drafts_what_followed_the_same_pair():
    drafter = load("own_drafter").PairTable()
    (out,) = assert_lossless(
        tiny_model(), drafter, prompts=PROMPTS, max_new_tokens=24, temperatures=(0.8,)
    )
    assert 0 < out.stats.num_drafted < 4 * out.stats.num_target_calls
    context = st.Context(
        jnp.array([[5, 6, 7, 5, 6, 0, 0], [5, 6, 7, 7, 0, 0, 0]]), jnp.array([5, 4])
    )
    topology = drafter.default_topology()
    step = st.Step(context, None, None, None)
    draft, _ = drafter.propose(drafter.init(2, topology, 7), step, topology)
    assert draft.tokens[0].tolist() == [6, 7, 5, 6, 7]
    assert draft.tree.valid.tolist() == [[True] * 5, [True] + [False] * 4]
    refusal(
        "drafts chains, this tree is 3 nodes wide",
        st.generate,
        tiny_model(),
        PROMPTS,
        drafter=drafter,
        topology=st.TreeTopology.paper("A"),
    )


def cascade_outcomes(models, num_drafts, rule):
    """All chains of one round of a cascade, and their probabilities; -1 where a chain has ended."""
    inner, chains = st.TreeTopology.chain(num_drafts), collections.Counter()
    tokens, weights = en.draft_outcomes(models, inner, "iid")
    for weight, walk in en.walks(models, inner, tokens, weights, replace=True, rule=rule):
        for row, w, last, probs in zip(tokens, weight, walk.last, walk.probs, strict=True):
            path = en.prefix_of(inner, row, last)
            for token in range(en.VOCAB) if w else ():
                chains[*path, token] += w * float(probs[token])
    rows = [[-1, *chain, *[-1] * (num_drafts + 1 - len(chain))] for chain in chains]
    return np.array(rows), np.array([*chains.values()])


@pytest.mark.parametrize("rule", some([try_children, traverse], try_children))
@pytest.mark.parametrize("num_drafts", some([1, 2], 1))
def test_a_cascade_is_exact_although_its_length_is_random(num_drafts, rule):
    """Of one round. Whole texts of two are sampled below."""
    models, inner_models = en.Models(num_drafts + 5), en.Models(num_drafts + 105)
    inner_models.target = models.draft
    chains, weights = drafts = cascade_outcomes(inner_models, num_drafts, rule)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-5)
    assert len({tuple(chain >= 0) for chain in chains}) > 1  # ragged
    topology = st.TreeTopology.chain(num_drafts + 1)
    for outer in (try_children, traverse):
        options = dict(replace=True, rule=outer, length=3)
        assert en.distance(models, topology, drafts, **options) < en.EXACT
    # A chain that is cut by its own last token's probability is no such chain.
    last = en.Models.at(models.draft, [])[chains[:, 1]]
    cut = np.where((last < 0.3)[:, None], -1, chains)
    assert en.distance(models, topology, (cut, weights), replace=True, length=3) > 0.01


@pytest.mark.thorough
def test_a_cascade_drafts_what_its_medium_model_does():
    """If the inner drafter is always right; else it drafts the beginning of that."""
    cascade, target = load("cascade").CascadeDrafter, tiny_model()
    medium, small = perturbed(target, 0.05), perturbed(target, 0.15, seed=1)
    drafters = (
        (st.ModelDrafter(medium), st.TreeTopology.chain(6)),
        (cascade(medium, st.ModelDrafter(medium)), None),
    )
    outs = [assert_lossless(target, drafter, topology=tree) for drafter, tree in drafters]
    for want, got in zip(*outs, strict=True):
        accepted = got.stats.accepted_per_depth
        np.testing.assert_array_equal(accepted, want.stats.accepted_per_depth)
        assert (np.asarray(accepted) > 0).all()
    tree = st.TreeTopology.from_parents([-1, 0, 0, 1])
    for out in assert_lossless(
        target, cascade(medium, st.ModelDrafter(small), inner_topology=tree)
    ):
        assert out.stats.num_accepted > 0


@pytest.mark.thorough
def test_samples_of_a_cascade_have_the_targets_distribution():
    config = st.ModelConfig.tiny(vocab_size=3, num_layers=1)
    target, *models = (random_model(config, seed) for seed in range(3))
    medium, inner = models[0], st.ModelDrafter(models[1], child_sampling="iid")
    drafter = load("cascade").CascadeDrafter(medium, inner, child_sampling="iid")
    out = assert_same_distribution(target, drafter, temperature=6.0, num_tokens=3)
    assert out.stats.num_accepted > 0


def test_what_a_cascade_refuses():
    model, cascade = tiny_model(), load("cascade").CascadeDrafter
    head = st.MtpDrafter(model, random_mtp_head(model))
    refused = {
        "MtpDrafter, which drafts from its target's hidden states": lambda: cascade(model, head),
        "'iid' needs temperature > 0": lambda: generate(child_sampling="iid"),
        "2 rounds fill a chain of 6 drafts": lambda: generate(topology=st.TreeTopology.chain(2)),
    }

    def generate(topology=None, **options):
        drafter = cascade(model, st.NgramDrafter(), **options)
        return st.generate(model, PROMPTS, drafter=drafter, topology=topology)

    for message, call in refused.items():
        refusal(message, call)
