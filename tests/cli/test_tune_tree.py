"""`stree-jax tune-tree`, in this process, and `generate` with its result."""

import functools
import json

from stree_jax.tuning import Costs, dynamic_tau


def test_a_tuned_tree_is_used(tiny_pair, command, tmp_path, monkeypatch):
    # Timing parts of a step compiles most of what `tune` does, and has its own tests.
    costs = Costs({1: 1.0, 2: 1.1}, 0.1, {1: 0.1}, 0.0)
    monkeypatch.setattr("stree_jax.tuning.tuner.measure_costs", lambda *_, **__: costs)
    monkeypatch.setattr("stree_jax.tuning.tuner._ROUNDS", 1)
    taus = functools.partial(dynamic_tau, grid=(2.5,))  # each sharpness compiles
    monkeypatch.setattr("stree_jax.tuning.tuner.dynamic_tau", taus)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("Once upon a time\n\nThe train was late\n")
    models = [tiny_pair / "target", "--draft", tiny_pair / "draft"]
    code, text, _ = command(
        "tune-tree", *models, "--prompts", prompts, "--output", output,
        *("--max-nodes", 2, "--max-depth", 1, "--tokens", 12, "--thorough"),
    )  # fmt: skip
    assert code == 0
    phases = [line.partition(" s  ")[2] for line in text.splitlines() if " s  " in line]
    assert phases == ["the target writes", "fitting dynamic trees", "decoding"]  # not a terminal
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
    plain = command("generate", tiny_pair / "target", *options)[1].splitlines()
    for tree in ([f"@{output}"], ["budget:2,1", "--sharpness", result["sharpness"]]):
        code, text, _ = command("generate", *models, *options, "--tree", *tree)
        assert code == 0
        assert text.splitlines()[:-1] == plain[:-1]
        assert "tau 1.00" in plain[-1]
        assert "tau 1.00" not in text.splitlines()[-1]
