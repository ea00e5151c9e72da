"""The bytes that each token of a tokenizer adds to a text."""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from stree_jax.messages import shown


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """The tokenizer, or that inside a fast tokenizer of transformers."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(inner, Tokenizer):
        raise ValueError(
            "tokenizer must be that of st.load_tokenizer(path), or a fast one of transformers, got"
            f" {shown(tokenizer)}"
        )
    return inner


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """The bytes of each token, which may be parts of UTF-8 characters.

    Byte-level BPE, and sentencepiece's pieces with or without byte fallback. A space that a
    decoder strips from the start of a text is there. None is for special tokens, which are no text,
    and for ids without a token. Tokens whose text depends on others are refused.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    of_piece = _decoding(tokenizer)
    bytes_of: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        if not (token in added and added[token].special):
            bytes_of[token] = of_piece(piece)
    return bytes_of


# What steps of decoders replace in a piece. `Strip` is of the ends of a text.
_REPLACED: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "Replace": lambda step: [(step["pattern"]["String"], step["content"])],
    "Metaspace": lambda step: [(step["replacement"], " ")],
    "ByteFallback": lambda step: [],
    "Fuse": lambda step: [],
    "Strip": lambda step: [],
}


def _decoding(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """The bytes of a piece, as the tokenizer's decoder makes them."""
    steps = decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level
    try:
        replaced = [pair for step in steps for pair in _REPLACED[step["type"]](step)]
    except KeyError:  # another step, or one that replaces what a regular expression matches
        replaced = []
    if not replaced:
        raise ValueError(
            f"the bytes of this tokenizer's tokens are not known: its decoder is"
            f" {', '.join(kinds) or 'none'}, and byte-level BPE and sentencepiece's are supported;"
            " pass token ids instead of text"
        )
    has_bytes = "ByteFallback" in kinds

    def of_piece(piece: str) -> bytes:
        if has_bytes and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            piece = piece.replace(old, new)
        return piece.encode()

    return of_piece


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, in their order; none without one."""
    return _steps(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else []


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): 256, 257, ... for others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = zip([*printable, *range(256, 256 + len(others))], [*printable, *others], strict=True)
    return {chr(character): byte for character, byte in pairs}


_BYTE_OF = _byte_of_character()


def byte_level(piece: str) -> bytes:
    """The bytes of a piece in byte-level BPE."""
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()  # an added token
