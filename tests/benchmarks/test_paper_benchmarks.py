"""The paper's benchmarks at their smallest size: they run, and what they compare is the same."""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from benchmarks import batch, packed, temperature, thunks, tree_size
from benchmarks.models import random_pair
from benchmarks.unrolled import SequentialLM, UnrolledLM, root_to_leaf_paths
from stree_jax.decoding.generate import plan
from stree_jax.models.cache import path_to
from tests.tiny import tiny_model

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
        return replay[0], model.tree_best(tokens, tree, model.init_cache(1, 8), replay=replay)[1]

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
    rows = packed.measure(pair, beams=(2,), steps=(2,), tokens=6, rounds=2)
    (row,) = rows
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
    assert [row["same_tokens"] for row in rows] == [True, True, None, None, None, None]
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


THUNKS = """\
000: kCopy         [source | next=002 (1)] kCopy
001: kKernel       [source | next=002 (1)] wrapped_add grid: [1, 1, 1]
002: kWhile        [prev=000 (1) | sink]
condition:
    003: kKernel   [source | sink] compare
  body:
    004: kKernel   [source | next=005 (1)] replay_3 grid: [1] shared_memory: 512 bytes
    005: kGemm     [prev=004 (1) | sink] custom-call
    006: kMemzero  [source | sink] kMemzero
    007: kAsyncStart [source | next=010 (1)] stream=computation_stream[0], async_id=7
        009: kDynamicSliceFusion [source | sink] params=1, results=1
            008: kCopy [source | sink] kCopy
    010: kAsyncDone  [source | sink] async_id=7
011: kKernel       [prev=002 (1) | sink] fusion
"""


def test_what_xla_launches_is_counted():
    found = thunks.Thunks.parse(THUNKS)
    assert [thunk.kind for thunk in found.outside] == ["kCopy", "kKernel", "kWhile", "kKernel"]
    assert found.inside[0] == ("kKernel", "replay", 512)
    assert thunks.num_loops(found.outside) == 1
    assert thunks.by_name(found.outside) == {"kCopy": 1, "wrapped_add": 1, "fusion": 1}
    put = [thunk.kind for thunk in thunks.work(found.inside)]
    assert put == ["kKernel", "kGemm", "kMemzero", "kCopy"]
    assert thunks.launches(found.outside) == (3, 1)
    assert thunks.launches(found.inside) == (4, 2)


HLO = """\
ENTRY %main.1 (a.1: f32[64,2], w.1: bf16[2]) -> (f32[64,2], pred[3]) {
  %w.1 = bf16[2]{0} parameter(1), sharding={mesh['x'=1], [{}]}
  %a.1 = f32[64,2]{1,0} parameter(0)
  %gemm-2 = f32[64,2]{1,0} custom-call(%a.1, %w.1), custom_call_target="__cublas$gemm"
  ROOT %call.3 = (f32[64,2]{1,0}, /*index=1*/pred[3]{0}) custom-call(%gemm-2, %w.1, %n.1), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="x"}
  %n.1 = s32[] constant(1)
  %q.1 = f32[3,8]{1,0} parameter(2)
  %q.2 = (f32[3,8]{1,0}, f32[8,3]{1,0}) custom-call(%q.1), custom_call_target="__gpu$xla.gpu.triton"
"""


def test_bytes_of_our_kernels_are_counted():
    """In a process of its own, since the module changes XLA's flags."""
    code = (
        "from benchmarks.static import kernel_bytes; import sys;"
        "print(kernel_bytes(sys.stdin.read(), {'f32[3,8]': 3}))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=HLO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == [512 + 3 + 512 + 4 + 4, 32 + 96 + 32]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the plugin is installed"
)
def test_without_the_plugin_static_says_what_to_install():
    """In a process of its own, since it changes XLA's flags."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.static"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "install jax-cuda13-plugin and jax-cuda13-pjrt" in result.stderr
