"""Commands with a multi-token prediction head: in a native folder `mtp`, or beside a Qwen model."""

import json

import jax.numpy as jnp
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.extensions.mtp.training import new_head
from stree_jax.testing import random_model

pytestmark = pytest.mark.thorough

PROMPTS = ("Once upon a time", "The train was late")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """It repeats its words, having tied embeddings; that is what the head predicts untrained."""
    folder, tokenizer = tmp_path_factory.mktemp("mtp"), st.load_tokenizer(st.demo_path("target"))
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    model = random_model(config)
    st.save_pretrained(model, folder / "native", tokenizer=tokenizer)
    sizes = st.MtpConfig(config.d_model, st.AttentionConfig(2, 1, 8), st.MlpConfig(8))
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


def test_generate_and_a_tuned_tree(native, output, quick_tuning, tmp_path):
    common = ["generate", native, "-p", PROMPTS[0], "--max-new-tokens", 12]
    plain = output(*common).splitlines()
    drafted = output(*common, "--mtp", "--tree", "chain:1").splitlines()
    assert drafted[:-1] == plain[:-1]
    assert "12 tokens, 12 target calls" in plain[-1]
    assert "tau 1.00" not in drafted[-1]

    prompts, tree = tmp_path / "prompts.txt", tmp_path / "tree"
    prompts.write_text("\n".join(PROMPTS))
    options = ["--mtp", "--prompts", prompts, "--output", tree, *quick_tuning]
    shown = output("tune-tree", native, *options)
    result = json.loads(tree.read_text())
    assert result["advice"] in shown
    assert result["draft"] == str(native)
    assert result["decoded"]["chain of 1"]["tau"] > 1
