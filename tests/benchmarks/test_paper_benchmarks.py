"""The benchmarks of the paper at their smallest size: they run, and the outputs agree."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from benchmarks.models import random_pair
from benchmarks.paper import batch, packed, temperature, tree_size
from benchmarks.paper.unrolled import SequentialLM, UnrolledLM, root_to_leaf_paths
from stree_jax.decoding.options import plan
from stree_jax.models.cache import path_to
from stree_jax.testing import tiny_model

TINY = st.ModelConfig.tiny(num_layers=1, tie_embeddings=False)


def test_unrolling_gives_the_worked_example():
    tree = st.TreeTopology.from_parents([-1, 0, 0, 1]).tree(jnp.ones((1, 4), bool))
    paths = root_to_leaf_paths(tree, num_rows=3, num_positions=3)
    valid = np.asarray(paths.valid[0])
    rows = [np.asarray(row)[ok].tolist() for row, ok in zip(paths.nodes[0], valid, strict=True)]
    assert rows == [[0, 2], [0, 1, 3], []]
    assert paths.place[0].tolist() == [0, 4, 1, 5]


@pytest.mark.parametrize("kind", [UnrolledLM, SequentialLM])
@pytest.mark.slow
def test_unrolled_paths_are_the_packed_tree(kind):
    """Two rows with different trees: logits and pending record of the nodes are the same."""
    model = tiny_model("mamba2attn hybrid")
    topology = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 4])
    tree = topology.tree(jnp.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]], bool))
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, 37)

    @jax.jit
    def forward(model):
        cache = model.init_cache(2, 10)
        _, cache = model.prefill(jnp.array([[3, 5, 7], [2, 4, 0]]), jnp.array([3, 2]), cache)
        return model.tree_forward(tokens, tree, cache)

    want = forward(model)
    got = forward(kind.like(model, num_rows=3, num_positions=4))
    for value, reference in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(value[tree.valid], reference[tree.valid], atol=1e-5)


@pytest.mark.parametrize("kind", [st.HybridLM, UnrolledLM, SequentialLM])
def test_a_step_leaves_a_record_of_the_kind_that_it_takes(kind):
    """A loop needs that; where the kernels run, too."""
    config = st.ModelConfig.tiny(num_layers=2, head_dim=16, state_size=16)
    structure, weights = kind.abstract(config, dtype="float32", implementation="pallas_interpret")
    topology = st.TreeTopology.from_parents([-1, 0, 0, 1])

    def step(weights):
        model = nnx.merge(structure, weights)
        model.num_rows, model.num_positions = 2, 3
        tree, tokens = topology.tree(jnp.ones((1, 4), bool)), jnp.zeros((1, 4), jnp.int32)
        replay = (model.init_pending(1, 4), path_to(tree, jnp.array([3])))
        return replay[0], model.tree(tokens, tree, model.init_cache(1, 8), replay=replay)[1]

    before, after = jax.eval_shape(step, weights)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


@pytest.mark.slow
def test_tree_size():
    result = tree_size.measure(TINY, dtype="float32", levels=(3,), sizes=(5,), count=2, rounds=2)
    assert [row["states"] for row in result["trees"]] == [1, 4, 4]
    assert [row["tokens_computed"] for row in result["trees"]] == [7, 12, 12]
    assert all(row["same_tokens"] for row in result["trees"])
    assert [row["nodes"] for row in result["sizes"]] == [5, 7]
    json.dumps(result)


def test_the_plot_of_tree_size(tmp_path):
    milliseconds = [{"nodes": n, "milliseconds": {"median": 1.0 * n}} for n in (1, 5, 15)]
    trees = [
        {"levels": 4, "method": name, "milliseconds": {"median": 1.0}}
        for name in ("packed", "unrolled", "token by token")
    ]
    result = {"trees": trees, "sizes": milliseconds, "fits": tree_size.fits(milliseconds)}
    tree_size.plot(result, tmp_path / "tree_size.png")


def test_the_fits_of_tree_size_find_the_coefficients():
    sizes = [
        {"nodes": n, "milliseconds": {"median": 0.01 * n**2 + 0.5 * n + 20}} for n in (1, 5, 15, 63)
    ]
    fit = tree_size.fits(sizes)
    np.testing.assert_allclose(fit["quadratic"]["coefficients"], [0.01, 0.5, 20], rtol=1e-6)
    assert (
        fit["quadratic"]["largest_relative_error"] < 1e-9 < fit["linear"]["largest_relative_error"]
    )
    needed = [size["milliseconds"]["median"] / 22.75 for size in sizes]
    np.testing.assert_allclose(fit["quadratic"]["tau_ratio_needed"], needed)
    np.testing.assert_allclose(fit["measured_tau_ratio_needed"], needed)


@pytest.fixture(scope="module")
def pair():
    return random_pair(TINY, TINY, "float32", 2, "tiny")


@pytest.mark.slow
def test_packed(pair, tmp_path):
    row = packed.Comparison(pair, tokens=6).measure(2, 2, rounds=2)
    rows = [row]
    assert row["same_tokens"]
    assert row["nodes"] == 5
    assert 2 <= row["leaves"]["mean"] <= row["leaves"]["most"] <= 3
    assert set(row["temporary_bytes"]) == {"packed", "unrolled"}
    json.dumps(rows)
    packed.plot(rows, tmp_path / "packed.png")
    assert "only time and memory" in pair.note()


def test_batch(pair, tmp_path, monkeypatch):
    monkeypatch.delitem(batch.METHODS, "tree A")
    rows = batch.measure(pair, batches=(2,), tokens=6, rounds=2)
    assert [row["method"] for row in rows] == ["autoregressive", "chain of 4"]
    assert all(row["same_tokens"] for row in rows)
    assert rows[0]["tau_to_break_even"] == 1
    json.dumps(rows)
    batch.plot(rows, True, tmp_path / "batch.png")


@pytest.mark.slow
def test_temperature(pair, tmp_path):
    methods = {name: temperature.METHODS[name] for name in ("autoregressive", "naive, tree A")}
    methods["naive, tree A"] = methods["naive, tree A"]._replace(
        topology=st.TreeTopology.from_branching((2,))
    )
    rows = temperature.measure(pair, methods, temperatures=(0.0, 0.5, 1.0), tokens=6, keys=2)
    assert [(row["temperature"], row["method"]) for row in rows] == [
        (t, name) for t in (0.0, 0.5, 1.0) for name in methods
    ]
    assert all(row["same_tokens"] for row in rows)  # both follow the target
    assert all(row["tau"] == 1 for row in rows if row["method"] == "autoregressive")
    assert all(row["tau"] >= 1 for row in rows)
    json.dumps(rows)
    temperature.plot(rows, tmp_path / "temperature.png")


def test_every_temperature_method_is_an_exact_pairing(pair):
    for method in temperature.METHODS.values():
        for greedy in (True, False):
            options = temperature.drafting(pair.draft, method, greedy=greedy)
            plan(
                pair.target,
                pair.prompts,
                temperature=1.0 - greedy,
                key=jax.random.key(0),
                **options,
            )
