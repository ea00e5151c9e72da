"""Transitions of automata over tokens, compressed, on the device."""

import dataclasses
import hashlib
import itertools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Int
from stree_jax.decoding import buffer_size, list_size

BITS = 32  # of a word
# A code is the distance to the state after a token, or, from here on, that state itself.
ABSOLUTE = 1 << 30
_FEW = 64  # states, moves or exceptions that all automata have room for
_MOST_OPEN = 8
_UNKNOWN, _DIFFERS = -(2**31), 1 - 2**31


@typing.no_type_check  # jax unflattens it with leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Transitions, compressed: what states have in common is stored once.

    States of a kind allow the same tokens (`allowed`, a bit for each), which make the same `move`:
    `step` is the code of most of them, and those from its `first` exception on (`token`, ascending)
    have their own, `step_of`. Kind 0 allows nothing.
    """

    kind: Int[Array, " states"]
    allowed: Any  # uint32 [kinds, words]
    move: Int[Array, " kinds"]
    step: Int[Array, " moves"]
    first: Int[Array, " moves_and_end"]
    token: Int[Array, " exceptions"]
    step_of: Int[Array, " exceptions"]
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def kinds_of(self, states: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """Returns the kind of each state, 0 of state -1."""
        return jnp.where(states < 0, 0, self.kind.at[states].get(mode="clip"))

    def mask(self, states: Int[Array, "B Q"], vocab_size: int) -> Bool[Array, "B Q V"]:
        """Returns which of a model's tokens each state allows."""
        words = self.allowed[self.kinds_of(states)]
        bits = words[..., None] >> np.arange(BITS, dtype=words.dtype)[None, None, None] & 1
        bits = bits.reshape(*states.shape, -1)[..., :vocab_size] != 0
        return jnp.pad(bits, ((0, 0), (0, 0), (0, vocab_size - bits.shape[-1])))

    def after(self, states: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """Returns the state after a token; -1 if it is not allowed."""
        kinds = self.kinds_of(states)
        words = self.allowed.at[kinds, tokens // BITS].get(mode="fill", fill_value=0)
        is_allowed = (words >> (tokens % BITS).astype(words.dtype) & 1) != 0
        move = self.move[kinds]
        # Binary search: `place` is the number of exceptions below the token.
        place, end = self.first[move], self.first[move + 1]
        for bit in reversed(range(int(self.vocab_size).bit_length())):
            later = place + (1 << bit)
            passed = (later <= end) & (self.token.at[later - 1].get(mode="clip") < tokens)
            place = jnp.where(passed, later, place)
        is_exception = (place < end) & (self.token.at[place].get(mode="clip") == tokens)
        exception = self.step_of.at[place].get(mode="clip")
        code = jnp.where(is_exception, exception, self.step[move])
        after = jnp.where(code >= ABSOLUTE, code - ABSOLUTE, states + code)
        return jnp.where(is_allowed, after, -1)


class _Move:
    """By token the distance to the next state, and that state, as far as they are known."""

    def __init__(self, vocab_size: int):
        self.pairs = np.full((vocab_size, 2), _UNKNOWN, np.int32).view(np.int64).ravel()

    def adds(self, tokens: np.ndarray, pairs: np.ndarray) -> bool:
        """Adds tokens if they fit, by their distances or their states; returns whether."""
        # Most differ in the first tokens, which are short.
        for size in sorted({min(256, len(tokens)), min(4096, len(tokens)), len(tokens)}):
            known = self.pairs[tokens[:size]].view(np.int32).reshape(-1, 2)
            fits = (known == pairs[:size]) | (known == _UNKNOWN)
            if not fits.view(np.uint16).all():  # both of a pair differ
                return False
        self.pairs[tokens] = np.where(fits, pairs, np.int32(_DIFFERS)).view(np.int64).ravel()
        return True

    def coded(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the code of most tokens by a sample, the others, and theirs."""
        distance, target = self.pairs.view(np.int32).reshape(-1, 2).T
        codes = np.where(distance == _DIFFERS, ABSOLUTE + target, distance)
        known = codes[codes != _UNKNOWN]
        values, counts = np.unique(known[:: len(known) // 1000 + 1], return_counts=True)
        step = int(values[counts.argmax()])
        tokens = np.flatnonzero((codes != step) & (codes != _UNKNOWN))
        return step, tokens, codes[tokens]


class Compressor:
    """Collects the transitions of states; those that are not added allow nothing."""

    def __init__(self, num_states: int, vocab_size: int):
        self._vocab_size = vocab_size
        self._kind = np.zeros(num_states, np.int32)
        self._kinds: dict[tuple[bytes, int], int] = {(b"", 0): 0}
        self._words = [np.zeros(-(-vocab_size // BITS), np.uint32)]
        nothing = np.zeros(0, np.int32)
        self._moves: list[Any] = [(0, nothing, nothing)]  # `_Move`, or its codes
        self._open: list[int] = []  # moves that states may be added to, the last ones first

    def add(self, state: int, tokens: np.ndarray, after: np.ndarray) -> None:
        """Adds a state, its tokens in an order that all states have, and the next states."""
        if not len(tokens):
            return
        pairs = np.empty((len(tokens), 2), np.int32)
        pairs[:, 0], pairs[:, 1] = after - state, after
        fitting = (move for move in self._open if self._moves[move].adds(tokens, pairs))
        number = next(fitting, len(self._moves))
        if number == len(self._moves):
            self._moves.append(_Move(self._vocab_size))
            self._moves[number].adds(tokens, pairs)
        self._open = [number, *(move for move in self._open if move != number)]
        for move in self._open[_MOST_OPEN:]:
            self._moves[move] = self._moves[move].coded()
        self._open = self._open[:_MOST_OPEN]
        key = hashlib.blake2b(tokens.astype(np.int32).tobytes()).digest(), number
        if key not in self._kinds:
            self._kinds[key] = len(self._words)
            marked = np.zeros(len(self._words[0]) * BITS, bool)
            marked[tokens] = True
            self._words.append(np.packbits(marked, bitorder="little").view("<u4").astype(np.uint32))
        self._kind[state] = self._kinds[key]

    def tables(self) -> "Tables":
        """Returns the tables, on the device."""
        coded = (move.coded() if isinstance(move, _Move) else move for move in self._moves)
        steps, tokens, steps_of = zip(*coded, strict=True)
        return _on_device(
            self._vocab_size,
            kind=self._kind,
            allowed=np.stack(self._words),
            move=np.array([move for _, move in self._kinds]),
            step=np.array(steps),
            first=np.append(0, np.cumsum([*map(len, tokens)])),
            token=np.concatenate(tokens),
            step_of=np.concatenate(steps_of),
        )


def compressed(num_states: int, vocab_size: int, *edges: np.ndarray) -> Tables:
    """Returns the tables of states in order, tokens and next states."""
    tables = Compressor(num_states, vocab_size)
    bounds = np.searchsorted(edges[0], np.arange(num_states + 1))
    for state, (low, high) in enumerate(itertools.pairwise(bounds)):
        tables.add(state, *(array[low:high] for array in edges[1:]))
    return tables.tables()


def _on_device(vocab_size: int, **arrays: np.ndarray) -> Tables:
    """Returns tables on the device, in sizes that similar automata share."""
    padded = {}
    for name, values in arrays.items():
        values = values if name == "allowed" else values.astype(np.int32)
        # One of few sizes: each is a program. By kind the sets of tokens take the memory.
        size = buffer_size if name in ("allowed", "move") else lambda n: list_size(max(n, _FEW))
        if padding := size(len(values)) - len(values):
            width = ((0, padding), *[(0, 0)] * (values.ndim - 1))
            fill = values[-1] if name == "first" else 0  # there is nothing after the last
            values = np.pad(values, width, constant_values=fill)
        padded[name] = jnp.asarray(values)
    return Tables(**padded, vocab_size=vocab_size)


def firsts(tables: Sequence[Tables], name: str) -> list[int]:
    """Returns where the entries of each table begin in all of them."""
    lengths = [len(getattr(table, name)) for table in tables]
    return [0, *itertools.accumulate(lengths[:-1])]


def concatenated(tables: Sequence[Tables]) -> Tables:
    """Returns the tables of all states of some tables."""
    on_host = [jax.tree.map(np.asarray, table) for table in tables]
    on_host = [dataclasses.replace(one, first=one.first[: len(one.step)]) for one in on_host]

    def all_of(name: str, counted: str = "", *, are_codes: bool = False) -> np.ndarray:
        """Returns the entries of all, moved where they count others."""
        offsets = firsts(on_host, counted) if counted else [0] * len(on_host)
        moved = []
        for table, offset in zip(on_host, offsets, strict=True):
            entries = getattr(table, name)
            # Of codes only those of states themselves move with the states.
            by = np.where(entries >= ABSOLUTE, offset, 0) if are_codes else offset
            moved.append(entries + np.asarray(by, entries.dtype))
        return np.concatenate(moved)

    token = all_of("token")
    return _on_device(
        on_host[0].vocab_size,
        kind=all_of("kind", "allowed"),
        allowed=all_of("allowed"),
        move=all_of("move", "step"),
        step=all_of("step", "kind", are_codes=True),
        first=np.append(all_of("first", "token"), len(token)),
        token=token,
        step_of=all_of("step_of", "kind", are_codes=True),
    )
