"""Commands with matrices in 8 bits."""

import pytest

import stree_jax as st
from stree_jax.testing import random_model

pytestmark = pytest.mark.thorough


def test_a_model_in_8_bits(tmp_path, output):
    """Converted, described, decoded: the text of the target in 8 bits, with drafts in 8 bits."""
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    plain, small = tmp_path / "plain", tmp_path / "small"
    st.save_pretrained(random_model(config), plain, tokenizer=tokenizer)
    output("convert", plain, small, "--quantize", "int8", "--keep", "*.out_proj.kernel")
    assert "float32, 2 matrices in 8 bits" in output("inspect", small)
    assert ") int8" in output("inspect", small, "--tensors")
    generate = ["generate", plain, "-p", "Once upon", "--max-new-tokens", 8]
    text, _ = output(*generate, "--quantize", "int8").splitlines()
    drafted = ["--draft", plain, "--draft-quantize", "int8", "--tree", "chain:1"]
    drafts, counts = output(*generate, "--quantize", "int8", *drafted).splitlines()
    assert drafts == text
    assert "tau 2" in counts
