"""Pieces of a text, put together, and the bytes of tokens are what the tokenizer makes of them."""

import pickle

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

import stree_jax as st
from stree_jax.decoding.token_bytes import token_bytes
from tests.helpers import refusal

WORDS = ["▁Hello", "▁wor", "lo", "▁", "##b", "b</w>", "a", " ", "  ", "|", "<pad>", "do not", "'s"]
# In byte-level BPE: a space, parts of é and of a smiley, and the replacement character.
WORDS += ["Ġx", "Ã", "©", "ð", "Ł", "İ", "ī", "ï¿½", "\N{REPLACEMENT CHARACTER}", "日"]
SPECIAL = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NAMES = [*SPECIAL, *BYTES, *WORDS]

steps = decoders.Sequence
KINDS = {
    "byte level": decoders.ByteLevel(),
    "sentencepiece": steps(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Metaspace(),
    "metaspace, none before": decoders.Metaspace(prepend_scheme="never"),
    "bytes and metaspace": steps([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    "spaces at both ends": steps(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 1)]
    ),
    "wordpiece": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "none": None,
    "patterns": steps(
        [decoders.Replace(Regex("▁+|a"), "-"), decoders.Fuse(), decoders.Replace("-", "+")]
    ),
}


def tokenizer_of(decoder):
    vocabulary = {word: i for i, word in enumerate(NAMES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>", byte_fallback=True))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日 本", special=False)])
    return tokenizer


def random_texts(tokenizer, count):
    """Tokens, among them runs of bytes, whole characters in bytes and parts of them."""
    rng = np.random.default_rng(0)
    size = tokenizer.get_vocab_size()
    for _ in range(count):
        parts = []
        for kind in rng.choice(5, rng.integers(1, 9)):
            text = "你日é🎉"[rng.integers(4)].encode()
            parts += [
                [int(rng.integers(size))],
                [int(rng.integers(len(SPECIAL) + len(BYTES), size))],
                [len(SPECIAL) + byte for byte in text],
                [len(SPECIAL) + byte for byte in text[: rng.integers(1, 3)]],
                [int(rng.integers(len(SPECIAL)))],
            ][kind]
        yield parts


def pieces_of(tokenizer, tokens, rng):
    """The pieces of tokens that come a few at a time, each with the tokens until then."""
    stream, at = st.TextStream(tokenizer), 0
    while at < len(tokens):
        size = int(rng.integers(1, 4))
        yield stream.push(tokens[at : at + size]), tokens[: at + size]
        at += size
    yield stream.end(), tokens


@pytest.mark.parametrize("count", [400, pytest.param(7500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_pieces_are_the_text(name, count):
    tokenizer = tokenizer_of(KINDS[name])
    rng, texts, held = np.random.default_rng(1), set(), 0
    for tokens in random_texts(tokenizer, count):
        if name == "spaces at both ends":  # the package's own step fails for an empty text
            tokens = [tokenizer.token_to_id("▁Hello"), *tokens]
        text = ""
        for piece, so_far in pieces_of(tokenizer, tokens, rng):
            text += piece
            held += text != tokenizer.decode(so_far)
        assert text == tokenizer.decode(tokens), tokens
        texts.add(text)
    assert len(texts) > count // 2
    # What is shown comes as early as it can, where no step needs all of the text.
    assert held < count * (0.5 if name in ("byte level", "metaspace", "wordpiece", "none") else 5)


def test_a_tokenizer_of_transformers_and_arrays():
    class Fast:
        backend_tokenizer = st.load_tokenizer(st.demo_path("target"))

    tokens = np.array(Fast.backend_tokenizer.encode("Ann has 3 é.").ids)
    stream = st.TextStream(Fast())
    assert stream.push(tokens[:3]) + stream.push(tokens[3:]) + stream.end() == "Ann has 3 é."


@pytest.mark.parametrize("tokens", [[-1], [2**32], [True], [1.5], ["a"]])
def test_what_is_no_token(tokens):
    stream = st.TextStream(st.load_tokenizer(st.demo_path("target")))
    refusal("a token must be an integer, from 0", stream.push, tokens)


def test_a_stream_holds_a_character_at_most():
    """So a token takes constant time: decoding all of them again took 3 ms at 16,000."""
    tokenizer = tokenizer_of(KINDS["byte level"])
    tokens = [*range(len(SPECIAL) + len(BYTES), tokenizer.get_vocab_size())] * 1000
    stream, text, sizes = st.TextStream(tokenizer), "", set()
    for token in tokens:
        text += stream.push([token])
        held = {name: each for name, each in vars(stream).items() if name != "_tokenizer"}
        sizes.add(len(pickle.dumps(held)))
    assert text + stream.end() == tokenizer.decode(tokens)
    assert max(sizes) - min(sizes) < 16


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
    found, plain = (
        token_bytes(tokenizer_of(each)) for each in (decoders.Sequence(steps), decoders.Metaspace())
    )
    for piece, data in {"<s>": None, "▁Hello": b" Hello", "▁": b" ", "lo": b"lo"}.items():
        assert found[NAMES.index(piece)] == plain[NAMES.index(piece)] == data
    assert found[NAMES.index("<0xE3>")] == (b"\xe3" if has_bytes else b"<0xE3>")


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
    refusal(f"its decoder is {name}", token_bytes, tokenizer_of(decoder))
