"""The bytes of tokens are those of the tokenizer's own decoder."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

import stree_jax as st
from stree_jax.decoding.token_bytes import token_bytes

PIECES = ["<s>", "▁the", "▁", "re", "<0xE3>", "<0x81>", "<0x82>"]


def sentencepiece(decoder):
    tokenizer = Tokenizer(models.BPE(dict(zip(PIECES, range(len(PIECES)), strict=True)), []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoder
    return tokenizer


def test_byte_level():
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    found = token_bytes(tokenizer)
    assert found[0] is None  # the end of text is no text
    assert len(found) == tokenizer.get_vocab_size()
    for token in range(1, len(found)):
        assert tokenizer.decode([token]) == found[token].decode(errors="replace")
    text = "Once upon a time, 3.5 % of é,\n\t日本語 and 🎉"
    tokens = tokenizer.encode(text).ids
    assert b"".join(found[token] for token in tokens).decode() == text


@pytest.mark.parametrize("has_bytes", [True, False])
def test_sentencepiece(has_bytes):
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if has_bytes:
        steps.insert(1, decoders.ByteFallback())
    found = token_bytes(sentencepiece(decoders.Sequence(steps)))
    assert found[:4] == [None, b" the", b" ", b"re"]
    assert found[4:] == (
        [b"\xe3", b"\x81", b"\x82"] if has_bytes else [b"<0xE3>", b"<0x81>", b"<0x82>"]
    )
    assert token_bytes(sentencepiece(decoders.Metaspace()))[:4] == found[:4]


def test_an_added_token_is_text_unless_it_is_special():
    tokenizer = Tokenizer.from_str(st.load_tokenizer(st.demo_path("target")).to_str())
    tokenizer.add_tokens(["Once upon"])
    tokenizer.add_special_tokens(["<|user|>"])
    assert token_bytes(tokenizer)[-2:] == [b"Once upon", None]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "none"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace(Regex("_+"), " "), decoders.Fuse()]), "Replace"),
    ],
)
def test_unknown_decoders_are_refused(decoder, name):
    with pytest.raises(ValueError, match=f"its decoder is {name}"):
        token_bytes(sentencepiece(decoder) if decoder else Tokenizer(models.BPE()))
