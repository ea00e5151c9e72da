"""Every experiment at its smallest size, on tiny models, and what they calculate."""

import importlib
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from benchmarks import common, lossless, methods, models, seed
from stree_jax.decoding.plan import plan
from stree_jax.decoding.sampling import position_noise
from stree_jax.measuring.methods import PLAIN, Method
from stree_jax.testing import exactness

TINY = st.ModelConfig.tiny(num_layers=1, tie_embeddings=False)
SIZES = "--prompts 1 --tokens 4 --rounds 1"
GREEDY = f"{SIZES} --temperatures 0"
# By what comes after `python -m benchmarks.`: the smallest size; then the name of the list of
# records, and fields of a record.
SMALLEST = {
    "decode": (GREEDY, "decoding tau speed_up accepted_per_depth"),
    "peer": (SIZES, "methods times_transformers identical_prompts"),
    "first_text": ("", "texts first_seconds longest_wait_ms"),
    "methods auto": (f"--rows 2 {GREEDY} --prompts 2", "decoding rows tau speed_up"),
    "methods batch": (f"--rows 2 {GREEDY} --prompts 2", "decoding rows tau speed_up"),
    "methods hierarchical": (f"{GREEDY} --small SMALL", "decoding tau speed_up"),
    "methods medusa": (f"{SIZES} --temperatures 1", "decoding tau speed_up identical"),
    "methods precision": (GREEDY, "decoding method tokens_per_second tau"),
    "methods temperature": (SIZES, "decoding temperature tau identical"),
    "serving": (
        "--requests 4 --rows 2 --rounds 1 --workloads system thoughts",
        "ways speed_up same_tokens reused first pauses",
    ),
    "seed": (
        "--tasks gsm8k --problems 1 --rounds 1 --rows 4 --chain 2",
        "ways task tau speed_up bytes_of_rows solved",
    ),
    "lossless": ("--families Mamba-2 --tokens 20", "work tokens tau differences"),
    "native_levels": ("--rounds 1 --types float32", "levels type level gigabytes_per_second"),
    "text": ("--rounds 1", "grammars schema seconds table_bytes peak_bytes"),
    "tree_size": ("--rounds 1", "sizes nodes milliseconds"),
}
QUICK = ("methods batch", "tree_size")
TREES = {"tree A": st.TreeTopology.from_branching((2,))}
SMALLER = {
    "decode.PAPER_TREES": TREES,
    "methods.TWO_DEFAULTS": TREES,
    "methods.TWO_TREES": TREES,
    "methods.PAPER_TREES": {"tree B": TREES["tree A"]},
    "methods.RULES": dict(itertools.islice(methods.RULES.items(), 1, 3)),
    "methods.TYPES": dict(itertools.islice(methods.TYPES.items(), 2)),
    "tree_size.DEFAULT": TINY,
    "tree_size.SIZES": (1, 2, 5),
    "workloads.SYSTEM_PROMPT": 20,
    "workloads.SHOTS": 1,
    "lossless.NEW_TOKENS": 6,
    "seed.K_CONFIGS": dict.fromkeys(seed.K_CONFIGS, ((2, 1),)),
}


@pytest.fixture
def tiny(tiny_pair, monkeypatch, tmp_path):
    """Tiny models in the place of the embedded ones, built-in prompts, and few methods."""
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    for module in ("prompts", "text", "seed"):
        monkeypatch.setattr(f"benchmarks.{module}.SHARED", tmp_path / "nowhere")
    monkeypatch.setattr(st.ModelConfig, "preset", lambda name: TINY)
    monkeypatch.setitem(lossless.FAMILIES, "Mamba-2", TINY)
    for name, value in SMALLER.items():
        monkeypatch.setattr(f"benchmarks.{name}", value)
    return tiny_pair


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.thorough if n in QUICK else pytest.mark.slow)
        for n in SMALLEST
    ],
)
@pytest.mark.filterwarnings("ignore:acceptance was measured on")
def test_an_experiment(name, tiny, tmp_path, capsys):
    """It writes its records, and its tokens are right."""
    if name == "peer":
        pytest.importorskip("transformers")
        pytest.importorskip("torch")
    arguments, fields = SMALLEST[name]
    records, *fields = fields.split()
    words = [*name.split(), *arguments.replace("SMALL", str(tiny / "draft")).split()]
    module = importlib.import_module(f"benchmarks.{words.pop(0)}")
    common.main(module.run, module.OPTIONS, [*words, "--output", str(tmp_path)])
    name = name.split()[-1]  # of a comparison
    line = json.loads(capsys.readouterr().out.splitlines()[-1])[name]
    (path,) = tmp_path.glob("*.json")
    assert path.name == f"{name.replace('_', '-')}-cpu.json"
    found = json.loads(path.read_text())
    asked = getattr(module, "COMPARISONS", {}).get(name, module).__doc__.splitlines()[0]
    assert (line["different"], found["question"]) == ([], asked)
    assert all({*fields} <= {*row} for row in found[records])
    assert name != "lossless" or all(row["right"] and row["distinct"] > 3 for row in found["work"])


def test_wrong_tokens_fail_an_experiment(tmp_path, capsys):
    """And what was found before the last part is saved."""

    def run(parts, *arguments):
        def fake(options):
            yield from parts

        arguments = [*arguments, "--output", str(tmp_path)]
        common.main(fake, models.CHECKPOINTS, arguments)

    parts = [common.Found({"a": 1}, [], ["tree A"]), common.Found({"a": 2}, [])]
    with pytest.raises(SystemExit, match="^1$"):
        run(parts[:1])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["test_experiments"]["different"] == ["tree A"]
    run(parts, "--target", "t", "--draft", "d", "--name", "n")
    found = json.loads((tmp_path / "test-experiments-n-cpu.json").read_text())
    assert found["question"] == __doc__.splitlines()[0]
    assert (found["a"], found["target"]) == (2, "t")


@pytest.mark.thorough
def test_a_token_that_is_not_the_targets_is_found():
    model = st.HybridLM(TINY, rngs=nnx.Rngs(0))
    given, plain = lossless.request(TINY.vocab_size, 1.0, 0, 4, 6), lossless.Way(Method(PLAIN))
    out = st.generate(model, **given, log_probs=True)
    want = np.array(out.tokens)
    assert lossless.compared(model, plain, [given], [(want, out.log_probs)])["right"]
    want[2, 3] = (want[2, 3] + 1) % TINY.vocab_size
    found = lossless.compared(model, plain, [given], [(want, out.log_probs)])
    (difference,) = found["differences"]
    assert (difference["row"], difference["place"], found["tokens"]) == (2, 3, 3 * 6 + 4)
    assert difference["gap"] > 1e-3
    assert not found["right"]


@pytest.mark.parametrize(
    ("temperature", "gap", "tie"),
    [(0, 0, True), (0, 0.01, True), (0, 0.04, False), (0.5, 1e-4, True), (0.5, 2e-3, False)],
)
def test_a_first_difference_is_a_tie_if_scores_are_that_close(temperature, gap, tie, monkeypatch):
    """Of logits relative to the largest; above temperature 0, of logits and noise at the index."""
    model = st.HybridLM(st.ModelConfig.tiny(vocab_size=4, num_layers=1), rngs=nnx.Rngs(0))
    request = plan(model, [[3, 2]], temperature=temperature, key=3, max_new_tokens=4)

    def apply(_, tokens):
        scores = jnp.array([-200, 100, 100 + gap, 0])
        if temperature:
            noise = position_noise(request.keys, jnp.array([2]), 0, 4)[0, 0]
            scores = temperature * (jnp.array([0, 2, 2 + gap, -9]) - noise)
        assert tokens[0, :4].tolist() == [3, 2, 1, 1]  # the prompt and the common text
        last = jnp.append(scores, 999)  # padding of the vocabulary
        return jnp.zeros((*tokens.shape, 5)).at[0, 3].set(last)

    monkeypatch.setattr(exactness, "apply", apply)
    new = np.array([[1, 1, 1, 3], [1, 1, 2, 0]])
    found = exactness.first_difference(model, request, 0, *new)
    assert (found.place, found.got, found.want, found.is_tie) == (2, 1, 2, tie)
    assert found.gap == pytest.approx(gap, rel=2e-2)
    assert exactness.first_difference(model, request, 0, new[0], new[0]) is None


def test_the_table_is_complete():
    """But for those with tests of their own."""
    files = [*Path(common.__file__).parent.glob("*.py")]
    runnable = {file.stem for file in files if '__name__ == "__main__"' in file.read_text()}
    assert {name.split()[0] for name in SMALLEST} == runnable - {"gpu", "peer_gpu", "pictures"}
    compared = {name.split()[1] for name in SMALLEST if name.startswith("methods ")}
    assert compared == {*methods.COMPARISONS}
