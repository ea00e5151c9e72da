"""Rows that are streamed: their new tokens and text, without what a stop may still cut."""

from collections.abc import Iterable, Sequence

from stree_jax.decoding.stop_tables import Stopping
from stree_jax.decoding.text_stream import TextStream


class Piece(list[int]):
    """New tokens of a row, a list.

    Attributes:
        text: the text that follows that of the row's pieces before, if the row has a tokenizer.
            All of them together are the text that `generate` gives.
    """

    def __init__(self, tokens: Iterable[int] = (), text: str | None = None):
        super().__init__(tokens)
        self.text = text


class Pieces:
    """Cuts the tokens of a row into pieces; those that a stop may still cut are held back."""

    def __init__(self, stopping: Stopping):
        self._stopping = stopping
        self._tokens: list[int] = []
        self._held_bytes = 0  # of the tokens that are not given
        self._stream = None if stopping.tokenizer is None else TextStream(stopping.tokenizer)
        self._num_given = self._num_characters = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, with those that are held back."""
        return len(self._tokens)

    def take(self, new: Sequence[int]) -> Piece:
        """The piece that no later stop can cut, after these tokens of a row that continues."""
        size = self._stopping.size
        self._tokens += new
        self._held_bytes += sum(map(size, new))
        first, until = self._num_given, len(self._tokens) + 1 - self._stopping.most_tokens
        for token in self._tokens[first : max(first, until)]:
            if self._held_bytes - size(token) < self._stopping.most_bytes - 1:
                break
            self._held_bytes -= size(token)
            self._num_given += 1
        given = self._tokens[first : self._num_given]
        text = None if self._stream is None else self._stream.push(given)
        self._num_characters += len(text or "")
        return Piece(given, text)

    def end(self, new: Sequence[int], *, stopped: bool) -> Piece:
        """The last piece, with the last tokens of the row; `stopped`: a stop has ended it."""
        self._tokens += new
        count, text = len(self._tokens), None
        if stopped:
            count, text = self._stopping.cut(self._tokens)
        elif self._stream is not None:
            text = self._stopping.tokenizer.decode(self._tokens)
        piece = self.rest(self._tokens[:count], text)
        self._num_given = len(self._tokens)
        return piece

    def rest(self, tokens: Sequence[int], text: str | None) -> Piece:
        """The last piece, of all tokens of the row up to its stop, and their text."""
        rest = None if text is None else text[self._num_characters :]
        return Piece(tokens[self._num_given :], rest)
