"""Tokens to text, piece by piece."""

import codecs
import copy
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

from stree_jax.checks import check_int
from stree_jax.decoding.token_bytes import as_tokenizer, byte_level, decoder_steps

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_MOST = 2**32 - 1  # largest id of the tokenizers package


class TextStream:
    """The text of tokens that come one after the other: in all, that of `Tokenizer.decode`.

        text = st.TextStream(tokenizer)
        for (new,) in st.stream(model, [prompt]):
            print(text.push(new), end="", flush=True)
        print(text.end())

    Special tokens are left out. A piece ends before what a later token may change: a character of
    which bytes are missing, or a run of sentencepiece's byte tokens, which are characters only if
    the whole run is UTF-8. A token takes constant time. Decoders that look further ahead (BPE with
    suffixes, CTC, patterns over a text that was put together before) give all text at the end.

    Args:
        tokenizer: from `load_tokenizer`, or a fast tokenizer of transformers.

    Raises:
        ValueError: not a tokenizer, or not token ids.
    """

    # Not `tokenizers.decoders.DecodeStream`: 0.23 loses bytes at the end and fails on byte tokens.

    def __init__(self, tokenizer: Any):
        self._tokenizer = as_tokenizer(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._stages = _stages(self._tokenizer)

    def __copy__(self) -> "TextStream":
        stream = object.__new__(TextStream)
        vars(stream).update(vars(self), _stages=copy.deepcopy(self._stages))
        return stream

    def push(self, tokens: Sequence[int] | Any) -> str:
        """The text that these tokens settle.

        Raises:
            ValueError: not token ids; `PAD` is none.
        """
        decoded = [self._piece(check_int("a token", token, 0, _MOST)) for token in tokens]
        pieces = [piece for piece in decoded if piece is not None]
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return "".join(pieces)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [*(out for piece in pieces for out in stage.push(piece)), *stage.end()]
        return "".join(pieces)

    def _piece(self, token: int) -> str | None:
        """A token as decoders get it; None: a special one, or an id without a token."""
        return None if token in self._special else self._tokenizer.id_to_token(token)


class _PerPiece:
    """A step that changes each piece alone, the first one otherwise than the others."""

    def __init__(self, decode: Any, before: list[str]):
        self._decode, self._before = decode, before  # what stands before a piece that is not first
        self._is_first = True

    def push(self, piece: str) -> list[str]:
        before = [] if self._is_first else self._before
        self._is_first = False
        return [self._decode([*before, piece])]

    def end(self) -> list[str]:
        return []


class _Whole:
    """A step that needs all pieces."""

    def __init__(self, decode: Any, is_one_text: bool = False):
        self._decode, self._is_one_text = decode, is_one_text  # whose parts the pieces are
        self._held: list[str] = []

    def push(self, piece: str) -> list[str]:
        self._held.append(piece)
        return []

    def end(self) -> list[str]:
        held, self._held = self._held, []
        pieces = ["".join(held)] if self._is_one_text else held
        return [self._decode(pieces)] if held else []


class _ByteRuns(_Whole):
    """`ByteFallback`: a run of bytes is UTF-8 as a whole, or each of its bytes is replaced."""

    def push(self, piece: str) -> list[str]:
        if _BYTE.fullmatch(piece):
            return super().push(piece)
        return [*self.end(), piece]


class _Bytes:
    """`ByteLevel`: pieces are bytes of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        return [self._decoder.decode(byte_level(piece))]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _Strip:
    """`Strip` of a text whose parts come one by one."""

    def __init__(self, step: dict[str, Any]):
        self._character, self._from_start = step["content"], step["start"]
        self._from_end, self._held = step["stop"], ""

    def push(self, piece: str) -> list[str]:
        while piece and self._from_start:
            if piece[0] != self._character:
                self._from_start = 0
                break
            piece, self._from_start = piece[1:], self._from_start - 1
        text = self._held + piece
        kept = len(text.rstrip(self._character)) if self._from_end else len(text)
        kept = max(kept, len(text) - self._from_end)
        self._held = text[kept:]
        return [text[:kept]]

    def end(self) -> list[str]:
        return []


def _stages(tokenizer: Tokenizer) -> list[Any]:
    """The steps of a tokenizer's decoder; each gives pieces to the next one."""
    if tokenizer.decoder is None:
        return [_PerPiece(" ".join, [""])]  # a space between pieces
    stages: list[Any] = []
    is_one_text = False  # pieces are parts of one, as the steps of the package see it
    for step in decoder_steps(tokenizer):
        match step["type"]:
            case "ByteLevel" if not is_one_text:
                stages.append(_Bytes())
                is_one_text = True
            case "Fuse":
                is_one_text = True
            case "Strip" if is_one_text:
                stages.append(_Strip(step))
            case "ByteFallback" if not is_one_text:
                stages.append(_ByteRuns(decoder_of(step).decode))
            case "Replace" | "Metaspace" | "WordPiece" | "Strip" if not is_one_text:
                before = [""] if step["type"] in ("Metaspace", "WordPiece") else []
                stages.append(_PerPiece(decoder_of(step).decode, before))
            case _:
                stages.append(_Whole(decoder_of(step).decode, is_one_text))
                is_one_text = True
    return stages


def decoder_of(step: dict[str, Any]) -> Any:
    """The decoder of the tokenizers package that does one step."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(step).encode())
    return decoder
