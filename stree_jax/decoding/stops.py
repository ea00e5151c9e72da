"""Stops: automata that are built on the host and run in the decode loop, and where they cut a text.

Stops of token ids are found by an automaton of Aho and Corasick (1975) over tokens; strings by one
over the bytes of the tokens, so that a stop may begin and end inside of tokens. Tokens that move no
state apart from each other are one class.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Bool, Int
from stree_jax.checks import check_int, require
from stree_jax.decoding.prompts import list_size
from stree_jax.decoding.token_bytes import as_tokenizer, token_bytes
from stree_jax.decoding.types import Stops
from stree_jax.messages import shown

STOPPED = -1  # the state of a row that a stop has ended
_MOST_CELLS = 2**25  # states times tokens while strings are compiled: 128 MiB
_OTHERS = 0  # the symbol of all tokens that are in no stop


@dataclasses.dataclass(frozen=True)
class Stopping:
    """The stops of a row: sequences of token ids, and strings, with their tokenizer."""

    tokens: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    tokenizer: Any = None

    def __bool__(self) -> bool:
        return bool(self.tokens or self.texts)

    def machine(self, vocab_size: int) -> "Machine":
        """The automaton of all of them."""
        return _machine(self, vocab_size)

    def cut(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Length of the text before the stop that its last token completed.

        Of several stops that end with this token it is the one that begins first.
        """
        kept = len(tokens)
        for stop in self.tokens:
            if tuple(tokens[-len(stop) :]) == stop:
                kept = min(kept, len(tokens) - len(stop))
        if self.tokenizer is None:
            return kept, None
        num_decoded, beyond = kept, ""
        if self.texts:
            pieces = [*map(self._piece, tokens)]
            ends = np.cumsum([len(piece) for piece in pieces])
            data, before = b"".join(pieces), int(ends[-1]) - len(pieces[-1])
            stops = map(str.encode, self.texts)
            starts = [data.find(stop, max(0, before + 1 - len(stop))) for stop in stops]
            start = min((start for start in starts if start >= 0), default=len(data))
            num_decoded = kept = min(kept, int(np.searchsorted(ends, start, side="right")))
            inside = start - (int(ends[kept - 1]) if kept else 0)
            if kept < len(tokens) and 0 < inside < len(pieces[kept]):
                num_decoded, beyond = kept + 1, pieces[kept][inside:].decode(errors="replace")
        text = self.tokenizer.decode([*tokens[:num_decoded]])
        return kept, text[: len(text) - len(beyond)]

    def size(self, token: int) -> int:
        """Bytes of a token, where stops of text count them."""
        return len(self._piece(token)) if self.texts else 0

    def _piece(self, token: int) -> bytes:
        known = _bytes_of(self.tokenizer)
        return known[token] if token < len(known) else b""


def stopping_of(stop: Any, tokenizer: Any, vocab_size: int) -> Stopping:
    """The stops of a row, checked.

    Special tokens are no text: a string that is one is a stop of that token too.
    """
    stops = listed_stops(stop, vocab_size - 1)
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    tokens = tuple(stop for stop in stops if not isinstance(stop, str))
    if tokenizer is not None:
        tokenizer = as_tokenizer(tokenizer)
    if texts:
        if tokenizer is None:
            raise ValueError(
                f"stop = {shown(texts[0])} is a text, and needs the tokenizer: pass"
                " tokenizer=st.load_tokenizer(path), or stops as lists of token ids"
            )
        _bytes_of(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        special = {entry.content: token for token, entry in added.items() if entry.special}
        for text in texts:
            inside = next((name for name in special if name in text and name != text), None)
            if inside is not None:
                raise ValueError(
                    f"stop = {shown(text)} can never appear: {shown(inside)} is a special token and"
                    " no text; give it as a stop of its own, or the stop as a list of token ids"
                )
            if special.get(text, vocab_size) < vocab_size:
                tokens += ((special[text],),)
    return Stopping(tokens, texts, tokenizer)


def listed_stops(stop: Any, last: int | None = None) -> list[str | tuple[int, ...]]:
    """The stops of a row: strings, and tuples of token ids, up to the last one if it is known."""
    if stop is None:
        return []
    if isinstance(stop, str):
        stop = [stop]
    wanted = "stop must be a list of texts and of lists of token ids, such as ['\\n\\n', [1, 2]]"
    stops = _listed(stop)
    if not isinstance(stops, Sequence):
        raise ValueError(f"{wanted}, got {shown(stop)}")
    checked: list[str | tuple[int, ...]] = []
    for entry in map(_listed, stops):
        if not isinstance(entry, Sequence) or isinstance(entry, bytes):
            raise ValueError(f"{wanted}, got {shown(stop)}")
        require(len(entry) > 0, f"stop has an empty entry: {shown(stop)}; leave it out")
        if isinstance(entry, str):
            checked.append(entry)
        else:
            checked.append(tuple(check_int("a token of stop", token, 0, last) for token in entry))
    return checked


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@functools.lru_cache(maxsize=2)  # a scheduler asks again before every run
def stops_of(
    machines: tuple["Machine", ...], min_new_tokens: tuple[int, ...], sizes: tuple[int, int]
) -> Stops:
    """The automata of a batch, padded to one size: at least these numbers of states and classes."""
    of_all = zip(sizes, *(machine.sizes for machine in machines), strict=True)
    states, classes = map(max, of_all)
    tables = np.zeros((len(machines), states, classes), np.int32)
    for table, machine in zip(tables, machines, strict=True):
        num_states, num_classes = machine.next_state.shape
        table[:num_states, :num_classes] = machine.next_state
    return Stops(
        class_of=jnp.asarray(np.stack([machine.class_of for machine in machines])),
        next_state=jnp.asarray(tables),
        min_new_tokens=jnp.asarray(np.array(min_new_tokens, np.int32)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
    """An automaton over tokens, see `Stops`."""

    class_of: np.ndarray  # [V]
    next_state: np.ndarray  # [states, classes]

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of states and classes, rounded up to few values, see `list_size`."""
        states, classes = map(list_size, self.next_state.shape)
        return states, classes


@functools.lru_cache(maxsize=64)
def _machine(stops: Stopping, vocab_size: int) -> Machine:
    machine = _of_tokens(stops.tokens, vocab_size)
    if not stops.texts:
        return machine
    return _both(machine, _of_texts(stops.texts, _bytes_of(stops.tokenizer), vocab_size))


@functools.lru_cache(maxsize=4)
def _bytes_of(tokenizer: Any) -> list[bytes]:
    """Special tokens are no text, as in `Tokenizer.decode`."""
    return [piece or b"" for piece in token_bytes(tokenizer)]


def _of_tokens(stops: tuple[tuple[int, ...], ...], vocab_size: int) -> Machine:
    symbols = {token: 1 + i for i, token in enumerate(sorted({t for stop in stops for t in stop}))}
    follow, ends = _automaton([[symbols[t] for t in stop] for stop in stops], 1 + len(symbols))
    class_of = np.full(vocab_size, _OTHERS, np.int32)
    class_of[[*symbols]] = [*symbols.values()]
    return Machine(class_of, np.where(ends[follow], -1 - follow, follow))


def _of_texts(stops: tuple[str, ...], pieces: list[bytes], vocab_size: int) -> Machine:
    follow, ends = _automaton([[*stop.encode()] for stop in stops], 256)
    num_states = len(follow)
    if num_states * vocab_size > _MOST_CELLS:
        raise ValueError(
            f"the texts of stop have {num_states - 1} bytes in all; with {vocab_size} tokens at"
            f" most {_MOST_CELLS // vocab_size - 1}"
        )
    pieces = [*pieces[:vocab_size], *[b""] * (vocab_size - len(pieces))]
    sizes = np.array([len(piece) for piece in pieces])
    order = np.argsort(-sizes, kind="stable")  # longest first: those with a byte at i come first
    letters = np.zeros((vocab_size, max(int(sizes.max()), 1)), np.uint8)
    for row, token in zip(letters, order, strict=True):
        row[: sizes[token]] = np.frombuffer(pieces[token], np.uint8)
    state = np.tile(np.arange(num_states, dtype=np.int32)[:, None], vocab_size)
    has_ended = np.zeros(state.shape, bool)
    for i in range(int(sizes.max())):
        count = int((sizes > i).sum())
        state[:, :count] = follow[state[:, :count], letters[:count, i]]
        has_ended[:, :count] |= ends[state[:, :count]]
    code = np.empty_like(state)
    code[:, order] = np.where(has_ended, -1 - state, state)
    classes: dict[bytes, int] = {}  # equal columns of the table are one class
    columns = np.ascontiguousarray(code.T)
    class_of = np.array([classes.setdefault(column.tobytes(), len(classes)) for column in columns])
    _, examples = np.unique(class_of, return_index=True)
    return Machine(class_of.astype(np.int32), code[:, examples])


def _both(a: Machine, b: Machine) -> Machine:
    """Runs two automata in parallel; a stop of either ends a text."""
    pairs, class_of = np.unique(np.stack([a.class_of, b.class_of]), axis=1, return_inverse=True)
    numbers, waiting, rows = {(0, 0): 0}, [(0, 0)], []
    for first, second in waiting:
        codes = a.next_state[first, pairs[0]], b.next_state[second, pairs[1]]
        ends = (codes[0] < 0) | (codes[1] < 0)
        row = []
        for pair in zip(*(np.where(c < 0, -1 - c, c).tolist() for c in codes), strict=True):
            if pair not in numbers:
                numbers[pair] = len(numbers)
                waiting.append(pair)
            row.append(numbers[pair])
        rows.append(np.where(ends, -1 - np.array(row), row))
    return Machine(class_of.ravel().astype(np.int32), np.stack(rows).astype(np.int32))


def _automaton(stops: list[list[int]], num_symbols: int) -> tuple[np.ndarray, np.ndarray]:
    """Aho and Corasick: the state after each symbol `[states, symbols]`, and where stops end."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for stop in stops:
        state = 0
        for symbol in stop:
            if symbol not in children[state]:
                children[state][symbol] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][symbol]
        ends[state] = True
    follow = np.zeros((len(children), num_symbols), np.int32)
    waiting = [(0, 0)]  # states, and those of their longest proper suffix: shorter ones first
    for state, suffix in waiting:
        ends[state] |= ends[suffix]
        if state:
            follow[state] = follow[suffix]
        for symbol, child in children[state].items():
            waiting.append((child, int(follow[suffix, symbol]) if state else 0))
            follow[state, symbol] = child
    return follow, np.array(ends)


def advanced(
    stops: Stops, state: Int[Array, " B"], new_tokens: Int[Array, "B T"], emitted: Int[Array, " B"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Reads the new tokens of a step."""
    classes = jnp.take_along_axis(stops.class_of, new_tokens, axis=1)

    def read(state: Array, column: Array) -> tuple[Array, tuple[Array, Array]]:
        follow = jax.vmap(lambda table, at, kind: table[at, kind])
        code = follow(stops.next_state, jnp.maximum(state, 0), column)
        state = jnp.where(code < 0, -1 - code, code)
        return state, (state, code < 0)

    _, (states, ends) = lax.scan(read, state, classes.T, unroll=min(8, classes.shape[1]))
    numbers = emitted[:, None] + jnp.arange(1, classes.shape[1] + 1, dtype=jnp.int32)[None]
    return states.T, ends.T & (numbers > stops.min_new_tokens[:, None])


def after(
    state: Int[Array, " B"],
    states: Int[Array, "B T"],
    ends: Bool[Array, "B T"],
    count: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The state after `count` of the tokens that `advanced` has read."""
    last = jnp.maximum(count - 1, 0)[:, None]
    read, ended = (jnp.take_along_axis(values, last, axis=1)[:, 0] for values in (states, ends))
    return jnp.where(count > 0, jnp.where(ended, STOPPED, read), state)
