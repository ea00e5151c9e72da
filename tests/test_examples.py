"""The examples run, and do what they say."""

import importlib.util
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest

import stree_jax as st
from stree_jax.testing import assert_lossless, tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the tests run without a checkout")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4], [5, 9, 2, 30], [3]]


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = {"steps": 12, "num_layers": 1}
FASTER = {"train_a_pair": SMALL, "own_mixer": SMALL}


@pytest.mark.docs
@pytest.mark.parametrize("name", sorted({f.stem for f in EXAMPLES.glob("*.py")} - {"ray_data"}))
def test_it_runs(name, tiny_pair, monkeypatch, capsys):
    """In this process, with tiny models in the place of the embedded ones; Ray has workers."""
    if name == "rollouts":
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
    with pytest.raises(ValueError, match="drafts chains, this tree is 3 nodes wide"):
        st.generate(tiny_model(), PROMPTS, drafter=drafter, topology=st.TreeTopology.paper("A"))
