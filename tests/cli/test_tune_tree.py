"""`stree-jax tune-tree`, in this process, and `generate` with its result."""

import json
import re

import pytest

import stree_jax as st
from stree_jax.tuning.tuner import SHARPNESS

pytestmark = pytest.mark.thorough


def test_without_arguments_the_embedded_pair_is_tuned(tiny_pair, output, quick_tuning, monkeypatch):
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    text = output("tune-tree", *quick_tuning)
    rows = re.findall(r"(?m)^│ (autoregressive|chain|tree|dynamic)\b", text)
    assert {"autoregressive", "chain", "dynamic"} <= {*rows}


def test_a_tuned_tree_is_used(tiny_pair, output, refused, quick_tuning, tmp_path):
    prompts, tree = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("Once upon a time\n\nThe train was late\n")
    models = [tiny_pair / "target", "--draft", tiny_pair / "draft"]
    options = ["--prompts", prompts, "--output", tree, "--thorough"]
    text = output("tune-tree", *models, *options, *quick_tuning)
    phases = [line.partition(" s  ")[2] for line in text.splitlines() if " s  " in line]
    assert phases == ["the target writes", "decoding"]  # not a terminal
    result = json.loads(tree.read_text())
    assert result["advice"] in text
    assert result["sharpness"] in SHARPNESS
    names = set(result["decoded"])
    assert "autoregressive" in names
    assert any(name.startswith("dynamic ") for name in names)
    assert result["temperature"] == 0
    spec = ",".join(map(str, result["parents"] or []))
    assert re.findall("--tree parents:(.*)", text) == ([spec] if spec else [])

    # Which tree wins is a matter of luck here.
    tree.write_text(json.dumps(result | {"parents": [-1, 0]}))
    options = ["-p", "Once", "--max-new-tokens", 12]
    plain = output("generate", tiny_pair / "target", *options).splitlines()
    assert "tau 1.00" in plain[-1]
    for spec in ([f"@{tree}"], ["budget:2,1", "--sharpness", result["sharpness"]]):
        drafted = output("generate", *models, *options, "--tree", *spec).splitlines()
        assert drafted[:-1] == plain[:-1]
        assert "tau 1.00" not in drafted[-1]

    tree.write_text('{"parents": [0]}')
    assert f"{tree} is not a tree of tune-tree" in refused("tree", f"@{tree}")
    tree.write_text('{"parents": null}')
    for spec in (f"@{tree}", "chain:0", "parents:-1"):
        assert output("generate", *models, *options, "--tree", spec).startswith(plain[0])
