"""`stree-jax tune-tree`, and `generate` with its result; commands with a head in a folder `mtp`."""

import json
import re

import jax.numpy as jnp
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.extensions.mtp.training import new_head
from stree_jax.loading import parse_tree
from stree_jax.tuning.tuner import SHARPNESS
from tests.helpers import saved_model

pytestmark = pytest.mark.thorough


def test_without_arguments_the_embedded_pair_is_tuned(tiny_pair, output, quick_tuning, monkeypatch):
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    text = output("tune-tree", *quick_tuning)
    rows = re.findall(r"(?m)^│ (no drafts|chain|tree|dynamic)\b", text)
    assert {"no drafts", "chain", "dynamic"} <= {*rows}


def test_a_tuned_tree_is_used(tiny_pair, output, refused, quick_tuning, tmp_path):
    prompts, tree = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("Once upon a time\n\nThe train was late\n")
    models = [tiny_pair / "target", "--draft", tiny_pair / "draft"]
    options = ["--prompts", prompts, "--output", tree, "--thorough"]
    text = output("tune-tree", *models, *options, *quick_tuning)
    phases = [line.partition(" s  ")[2] for line in text.splitlines() if " s  " in line]
    assert phases == ["the target writes", "runs of the best trees"]  # not a terminal
    result = json.loads(tree.read_text())
    assert result["advice"] in text
    assert result["sharpness"] in SHARPNESS
    names = set(result["decoded"])
    assert "no drafts" in names
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
    few = parse_tree(f"auto@{tree}")
    assert few[0] == st.TreeTopology.chain(2)
    assert 1 <= len(few) <= 3

    tree.write_text('{"parents": [0]}')
    assert f"{tree} is not a tree of tune-tree" in refused("tree", f"@{tree}")
    tree.write_text('{"parents": null}')
    for spec in (f"@{tree}", "chain:0", "parents:-1"):
        assert output("generate", *models, *options, "--tree", spec).startswith(plain[0])


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """It repeats its words, having tied embeddings; that is what the head predicts untrained."""
    folder, tokenizer = tmp_path_factory.mktemp("mtp"), st.load_tokenizer(st.demo_path("target"))
    model = saved_model(folder / "native", tokenizer)
    sizes = st.MtpConfig(model.config.d_model, st.AttentionConfig(2, 1, 8), st.MlpConfig(8))
    text = jnp.arange(16)[None]
    head = new_head(sizes, model, text, rngs=nnx.Rngs(0))
    st.save_mtp(head, model, folder / "native" / "mtp")
    return folder / "native"


def test_inspect_and_convert_name_the_head(native, output, tmp_path):
    shown = " ".join(output("inspect", native).split())
    for text in ("stree-jax (native)", "multi-token prediction (attention, mlp), "):
        assert text in shown
    assert "generate --mtp drafts with it" in shown
    shown = output("convert", native, tmp_path / "hf", "--to", "hf")
    assert "without the multi-token prediction head: no family of transformers can hold" in shown
    assert "mamba2 has no place for this multi-token prediction head: it has no such" in shown
    assert f"wrote {tmp_path / 'hf'} (hf)" in shown
    assert st.from_pretrained(tmp_path / "hf").config == st.from_pretrained(native).config


def test_generate_with_the_head(native, output):
    common = ["generate", native, "-p", "Once upon a time", "--max-new-tokens", 12]
    plain = output(*common).splitlines()
    drafted = output(*common, "--mtp", "--tree", "chain:1").splitlines()
    assert drafted[:-1] == plain[:-1]
    assert "12 tokens, 12 target calls" in plain[-1]
    assert "tau 1.00" not in drafted[-1]
