"""`stree-jax tune-tree`, in this process, and `generate` with its result."""

import json
import sys

import pytest
from flax import nnx

import stree_jax as st
from stree_jax.cli.main import main
from stree_jax.testing import perturbed, randomised
from stree_jax.tuning import Costs


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two tiny checkpoints with the tokenizer of the embedded ones."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    config = st.ModelConfig.tiny(
        vocab_size=tokenizer.get_vocab_size(), num_layers=1, tie_embeddings=False
    )
    target = randomised(st.HybridLM(config, rngs=nnx.Rngs(0)), 0)
    for name, model in (("target", target), ("draft", perturbed(target, 0.05))):
        st.save_pretrained(model, folder / name, tokenizer=tokenizer)
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setenv("STREE_JAX_CACHE", "off")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stree-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


def test_a_tuned_tree_is_used(pair, command, tmp_path, monkeypatch):
    # Timing parts of a step compiles most of what `tune` does, and has tests of its own.
    costs = Costs({1: 1.0, 2: 1.1}, 0.1, {1: 0.1}, 0.0)
    monkeypatch.setattr("stree_jax.tuning.tuner.measure_costs", lambda *_, **__: costs)
    monkeypatch.setattr("stree_jax.tuning.tuner._ROUNDS", 1)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("Once upon a time\n\nThe train was late\n")
    models = [pair / "target", "--draft", pair / "draft"]
    code, text, _ = command(
        "tune-tree", *models, "--prompts", prompts, "--output", output,
        *("--max-nodes", 2, "--max-depth", 1, "--tokens", 12),
    )  # fmt: skip
    assert code == 0
    result = json.loads(output.read_text())
    assert result["advice"] in text
    assert "warning: acceptance was measured on 12 tokens" in text
    assert f"sharpness of dynamic trees: {result['sharpness']:g}" in text
    names = set(result["decoded"])
    assert "no draft" in names
    assert any(name.startswith("dynamic ") for name in names)
    assert result["temperature"] == 0
    if result["parents"] is not None:
        spec = "parents:" + ",".join(map(str, result["parents"]))
        assert f"--tree {spec}" in text

    # Which tree wins is a matter of luck here.
    result["parents"] = [-1, 0]
    output.write_text(json.dumps(result))
    options = ["-p", "Once", "--max-new-tokens", 12]
    plain = command("generate", pair / "target", *options)[1].splitlines()
    for tree in ([f"@{output}"], ["budget:2,1", "--sharpness", result["sharpness"]]):
        code, text, _ = command("generate", *models, *options, "--tree", *tree)
        assert code == 0
        assert text.splitlines()[:-1] == plain[:-1]
        assert "tau 1.00" in plain[-1]
        assert "tau 1.00" not in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --draft DRAFT, --ngram or --medusa HEADS"),
        (["--ngram", "--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read"),
        (["--ngram", "--output", "nowhere/tree.json"], "the folder nowhere does not exist"),
        (["--ngram", "--prompts", "one.jsonl"], 'one.jsonl, line 2: not an object with a "prompt"'),
        (["--ngram", "--max-nodes", "1"], "max_nodes must be an integer, at least 2; got 1"),
    ],
)
def test_errors_are_one_line(arguments, message, pair, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"prompt": "Once"}\n[]\n')
    code, _, error = command("tune-tree", pair / "target", *arguments)
    assert code == 2
    assert error.startswith("stree-jax: error: ")
    assert error.count("\n") == 1
    assert message in error
