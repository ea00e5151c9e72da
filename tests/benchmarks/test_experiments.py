"""Every experiment at its smallest size, on tiny models, and what they calculate."""

import importlib
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from benchmarks import (
    common,
    experiments,
    lossless,
    methods,
    models,
    seed,
    serving,
    temperature,
    tree_size,
    tuned,
)
from benchmarks.methods import PLAIN, Method
from benchmarks.unrolled import UnrolledLM, root_to_leaf_paths
from stree_jax.testing import tiny_model
from tests.helpers import saved_pair

TINY = st.ModelConfig.tiny(num_layers=1, tie_embeddings=False)
SIZES = "--prompts 1 --tokens 4 --rounds 1"
SMALLEST = {
    "decode": f"{SIZES} --temperatures 0",
    "tuned": f"{SIZES} --temperatures 0",
    "peer": SIZES,
    "medusa": f"{SIZES} --temperatures 1",
    "hierarchical": f"{SIZES} --small SMALL --temperatures 0",
    "serving": "--requests 5 --rows 2 --rounds 1",
    "seed": "--tasks gsm8k --problems 1 --rounds 1 --rows 4 --chain 2",
    "lossless": "--families Mamba-2 --tokens 20",
    "attention_share": f"SHARES {SIZES} --temperatures 0",
    "batch": "--pair random --batches 2 --tokens 6 --rounds 1",
    "packed": "--pair random --beams 2 --steps 2 --prompts 2 --tokens 6 --rounds 1",
    "temperature": "--prompts 1 --tokens 4 --keys 1",
    "tree_size": "--rounds 1",
}
QUICK = ("attention_share", "batch", "tree_size")
# Keys of committed results that are no longer written, and dictionaries whose keys are data.
GONE = {
    *("exactness", "lengths", "rates", "seconds_of_a_call", "tau_by_key", "same_tokens", "aims"),
    *("lossy_typical", "lossy_typical_distance", "sizes", "ranks", "speed_up_by_role", "simulated"),
    *("accepted_of_drafted", "thoughts_per_second", "unparsed_values", "milliseconds_a_step"),
    *("trees_of_equal_size", "decoding_of_equal_size", "trees", "same_tokens_in_float32"),
    *("weight_bytes", "temporary_bytes", "mean", "device", "jax"),
}
DATA = {"machine", "relative_to"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = saved_pair(tmp_path_factory.mktemp("demo"))
    for share in (0, 25, 50):
        (folder / f"attention-{share}").symlink_to(folder / "target")
        (folder / f"attention-{share}-draft").symlink_to(folder / "draft")
    return folder


@pytest.fixture
def tiny(folder, monkeypatch, tmp_path):
    """Tiny models in the place of the embedded ones, built-in prompts, and few methods."""
    trees = {"tree A": st.TreeTopology.from_branching((2,))}
    for module in ("experiments", "tuned", "peer", "attention_share", "batch"):
        name = "PAPER_TREES" if module in ("experiments", "tuned") else "TREES"
        monkeypatch.setattr(f"benchmarks.{module}.{name}", trees)
    monkeypatch.setattr(st, "demo_path", folder.joinpath)
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    monkeypatch.setattr(st.ModelConfig, "preset", lambda name: TINY)
    monkeypatch.setitem(lossless.FAMILIES, "Mamba-2", TINY)
    for module, name, value in (
        (models, "SMALL", TINY),
        (models, "SMALL_DRAFT", TINY),
        (serving, "LIMITS", (2, 9)),
        (tuned, "MAX_DEPTH", 2),
        (lossless, "NEW_TOKENS", 6),
        (tuned, "TUNING_PROMPTS", 2),
        (tree_size, "SIZES", (1, 2, 5)),
        (temperature, "TEMPERATURES", (0.0, 1.0)),
    ):
        monkeypatch.setattr(module, name, value)
    ways = {name: temperature.WAYS[name] for name in ("naive, tree A", "traversal, chain of 4")}
    monkeypatch.setattr(temperature, "WAYS", ways)
    monkeypatch.setattr(seed, "K_CONFIGS", dict.fromkeys(seed.K_CONFIGS, ((2, 1),)))
    return folder


def missing(old, new, path=""):
    """Keys of `old` that `new` lacks, in dictionaries and in the first elements of lists."""
    if isinstance(old, list) and isinstance(new, list) and old and new:
        return missing(old[0], new[0], path + "[0]")
    if not isinstance(old, dict):
        return []
    if not isinstance(new, dict):
        return [path]
    lacking = [f"{path}.{key}" for key in set(old) - set(new) - GONE]
    shared = (set(old) & set(new)) - DATA
    return lacking + [
        line for key in shared for line in missing(old[key], new[key], f"{path}.{key}")
    ]


def slow_unless_quick(name):
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [*map(slow_unless_quick, experiments.EXPERIMENTS)])
def test_an_experiment(name, tiny, tmp_path, capsys):
    """Its records have the keys of the committed results, and its tokens are right."""
    if name == "peer":
        pytest.importorskip("transformers")
        pytest.importorskip("torch")
    arguments = SMALLEST[name].replace("SMALL", str(tiny / "draft")).replace("SHARES", str(tiny))
    module = importlib.import_module(f"benchmarks.{name}")
    experiments.main(name, module.__doc__, [*arguments.split(), "--output", str(tmp_path)])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])[name]
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert line["different"] == []
    assert found["question"] == module.__doc__.splitlines()[0]
    committed = common.RESULTS / f"{name.replace('_', '-')}-cpu.json"
    assert path.name.startswith(committed.stem[:-3])
    assert missing(json.loads(committed.read_text()), found) == []
    if name == "lossless":
        assert found["rounds"] == 1
        assert len(found["work"]) == 2 * lossless.NUM_METHODS
        assert found["tokens"] == sum(row["tokens"] for row in found["work"])
        assert all(row["right"] and row["distinct"] > 3 for row in found["work"])


def test_every_experiment_has_its_module_and_its_smallest_size():
    for name in experiments.EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{name}")
        assert Path(module.__file__).read_text().endswith(f'    main("{name}", __doc__)\n')
        assert f"python -m benchmarks.{name}" in module.__doc__
    assert set(SMALLEST) == set(experiments.EXPERIMENTS)


def test_wrong_tokens_fail_an_experiment(monkeypatch, tmp_path, capsys):
    """And what was found before the last part is saved."""

    def run(wrong, *arguments):
        parts = [common.Found({"a": 1}, [], wrong), common.Found({"a": 2}, [])]
        parts = parts[: 1 if wrong else 2]
        fake = experiments.Experiment(lambda options: iter(parts), experiments.CHECKPOINTS)
        monkeypatch.setitem(experiments.EXPERIMENTS, "fake", fake)
        experiments.main("fake", "Is it?", [*arguments, "--output", str(tmp_path)])

    with pytest.raises(SystemExit, match="^1$"):
        run(["tree A"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fake"]["different"] == ["tree A"]
    run([], "--target", "t", "--draft", "d", "--name", "n")
    found = json.loads((tmp_path / "fake-n-cpu.json").read_text())
    assert (found["question"], found["a"], found["target"]) == ("Is it?", 2, "t")
    with pytest.raises(SystemExit):
        run([], "--name", "n")
    assert "come together" in capsys.readouterr().err


def test_the_comparison_of_methods(monkeypatch):
    """Of texts that are given: a chain with tau 2, and a tree with another token."""
    texts = {PLAIN: ([1, 2, 3, 4], 4), "chain": ([1, 2, 3, 4], 2), "tree": ([1, 2, 3, 5], 1)}

    def decode(method, pair, tokens, temperature, prompts):
        assert (prompts, tokens, temperature) == ([[7]], 4, 0.5)
        text, calls = texts[method.name]
        accepted = np.array([4 - calls])
        stats = types.SimpleNamespace(
            num_tokens=4, num_target_calls=calls, accepted_per_depth=accepted
        )
        return types.SimpleNamespace(tokens=np.array([text]), stats=stats)

    monkeypatch.setattr(Method, "decode", decode)
    pair = types.SimpleNamespace(prompts=[[7]])
    options = types.SimpleNamespace(tokens=4, rounds=2)
    ways = [Method(PLAIN), Method("chain", None, st.TreeTopology.chain(1)), Method("tree")]
    rows = methods.compare(pair, ways, [0.5], options)
    assert [row["tau"] for row in rows] == [1, 2, 4]
    assert [row["identical"] for row in rows] == [True, True, False]
    assert [row["nodes"] for row in rows] == [1, 2, 1]
    assert rows[0]["speed_up"] == {"median": 1, "low": 1, "high": 1}
    assert rows[1]["accepted_per_depth"] == [1]
    assert len(rows[1]["tokens_per_second_by_round"]) == 2
    assert methods.different(rows) == ["tree, temperature 0.5"]


def test_the_speed_relative_to_other_methods():
    """Over prompts: a method that is faster on some of them only is not slower or faster."""
    seconds = {"mine": [1, 2, 3], PLAIN: [2, 4, 6], "tree A": [0.5, 1, 1.5], "tree B": [0.5, 2, 4]}
    rows = [{"method": name, "seconds_by_prompt": each} for name, each in seconds.items()]
    ratios = tuned.relative_to("mine", rows)
    assert ratios[PLAIN] == {"all": 2.0, "low": 2.0, "high": 2.0}
    assert ratios["tree A"]["high"] == 0.5
    assert ratios["tree B"]["low"] < 1 < ratios["tree B"]["high"]
    assert "mine" not in ratios


def test_the_fits_of_tree_size_find_the_coefficients():
    sizes = [
        {"nodes": n, "milliseconds": {"median": 0.01 * n**2 + 0.5 * n + 20}} for n in (1, 5, 15, 63)
    ]
    fit = tree_size.fits(sizes)
    np.testing.assert_allclose(fit["quadratic"]["coefficients"], [0.01, 0.5, 20], rtol=1e-6)
    assert fit["quadratic"]["largest_relative_error"] < 1e-9
    assert fit["linear"]["largest_relative_error"] > 1e-9
    needed = [size["milliseconds"]["median"] / 22.75 for size in sizes]
    np.testing.assert_allclose(fit["quadratic"]["tau_ratio_needed"], needed)
    np.testing.assert_allclose(fit["measured_tau_ratio_needed"], needed)


def test_unrolling_gives_the_worked_example():
    tree = st.TreeTopology.from_parents([-1, 0, 0, 1]).tree(jnp.ones((1, 4), bool))
    paths = root_to_leaf_paths(tree, num_rows=3, num_positions=3)
    valid = np.asarray(paths.valid[0])
    rows = [np.asarray(row)[ok].tolist() for row, ok in zip(paths.nodes[0], valid, strict=True)]
    assert rows == [[0, 2], [0, 1, 3], []]
    assert paths.place[0].tolist() == [0, 4, 1, 5]


@pytest.mark.slow
def test_unrolled_paths_are_the_packed_tree():
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
    got = forward(UnrolledLM.like(model, num_rows=3, num_positions=4))
    for value, reference in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(value[tree.valid], reference[tree.valid], atol=1e-5)
