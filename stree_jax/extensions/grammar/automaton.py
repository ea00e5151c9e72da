"""A grammar as a logits processor: a deterministic automaton whose alphabet is the tokens."""

import dataclasses
import hashlib
import itertools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import Context
from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.checks import check_int
from stree_jax.decoding import buffer_size, is_given, list_size
from stree_jax.messages import shown

_BITS = 32  # of a word
# A code is the distance to the state after a token, or, from here on, that state itself.
ABSOLUTE = 1 << 30
_MOST = 2**24  # states, or tokens
_FEW = 64  # states, moves or exceptions that all automata have room for


@typing.no_type_check  # jax unflattens it with leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Transitions, compressed: what states have in common is stored once.

    States of one kind allow the same tokens, and tokens do the same in them: they lead to a state
    at some distance, or to some state itself. What most tokens do is one code; the others are
    exceptions. What a kind has beside that, as the end of a text has, is in `extra`, and comes
    first. Kind 0 is the state that allows nothing, move 0 the one without exceptions.
    `states`, `kinds`, `moves` and `exceptions` are sizes.

    Attributes:
        kind: the kind of each state.
        allowed: a bit for each token that a kind allows, token 0 first.
        move, extra: what tokens do in a kind.
        step: the code of most tokens: a distance, or `ABSOLUTE` and the state.
        first: the first exception of each move, and the end of those of the last one.
        token: the tokens of exceptions, of each move in ascending order.
        step_of: the code of an exception.
        vocab_size: number of tokens.
    """

    kind: Int[Array, " states"]
    allowed: Any  # uint32 [kinds, words]
    move: Int[Array, " kinds"]
    extra: Int[Array, " kinds"]
    step: Int[Array, " moves"]
    first: Int[Array, " moves_and_end"]
    token: Int[Array, " exceptions"]
    step_of: Int[Array, " exceptions"]
    vocab_size: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def kinds_of(self, states: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """The kind of each state; -1 is the state after a token that is not allowed."""
        return jnp.where(states < 0, 0, self.kind.at[states].get(mode="clip"))

    def mask(self, states: Int[Array, "B Q"], vocab_size: int) -> Bool[Array, "B Q V"]:
        """Which of a model's tokens each state allows."""
        words = self.allowed[self.kinds_of(states)]
        bits = words[..., None] >> np.arange(_BITS, dtype=words.dtype)[None, None, None] & 1
        bits = bits.reshape(*states.shape, -1)[..., :vocab_size] != 0
        return jnp.pad(bits, ((0, 0), (0, 0), (0, vocab_size - bits.shape[-1])))

    def after(self, states: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """The state after one more token; -1 if it is not allowed."""
        kinds = self.kinds_of(states)
        words = self.allowed.at[kinds, tokens // _BITS].get(mode="fill", fill_value=0)
        is_allowed = (words >> (tokens % _BITS).astype(words.dtype) & 1) != 0
        move = self.move[kinds]
        is_usual, usual = self._exception(move, tokens)
        is_extra, extra = self._exception(self.extra[kinds], tokens)
        code = jnp.where(is_extra, extra, jnp.where(is_usual, usual, self.step[move]))
        after = jnp.where(code >= ABSOLUTE, code - ABSOLUTE, states + code)
        return jnp.where(is_allowed, after, -1)

    def _exception(
        self, move: Int[Array, "B Q"], tokens: Int[Array, "B Q"]
    ) -> tuple[Bool[Array, "B Q"], Int[Array, "B Q"]]:
        """Whether a token is an exception of a move, and its code then."""
        # Binary search: `place` is the number of exceptions below the token.
        begin, end = self.first[move], self.first[move + 1]
        place = begin
        for bit in reversed(range(int(self.vocab_size).bit_length())):
            later = place + (1 << bit)
            passed = (later <= end) & (self.token.at[later - 1].get(mode="clip") < tokens)
            place = jnp.where(passed, later, place)
        is_one = (place < end) & (self.token.at[place].get(mode="clip") == tokens)
        return is_one, self.step_of.at[place].get(mode="clip")


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automaton:
    """A `LogitsProcessor` that allows the texts of a deterministic automaton over tokens.

    It reads new tokens only; the prompt may be anything. An end token is a token as others are: let
    the states where a text may end allow it. A state that allows nothing ends its row with an
    error.

    Make one automaton and pass it to all calls: its tables are on the device.

    Attributes:
        next_state: `[S, V]` integers, the state after each token, -1 if a token is not allowed.
            Kept compressed, as `Tables`. Large automata: `from_edges`.
        start: the state of an empty text.
        end_tokens: tokens that end a row, beside the model's, unless `eos_token` says otherwise.
    """

    next_state: Any = dataclasses.field(metadata={"shared": True})
    start: int = 0
    end_tokens: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __post_init__(self):
        given = self.next_state
        if is_given(given) or isinstance(given, np.ndarray | jax.Array | None):
            object.__setattr__(self, "next_state", _tables_of_array(given))
        if is_given(self.start):
            kinds = np.asarray(self.next_state.kind)
            check_int("start", self.start, 0)
            if self.start >= len(kinds) or kinds[self.start] == 0:
                raise ValueError(f"start = {self.start} is no state that allows a token")

    @classmethod
    def from_edges(cls, states, tokens, next_states, *, num_states, vocab_size, start=0):
        """An automaton from its transitions, in any order.

        Args:
            states, tokens, next_states: arrays of one length: with this token, that state leads to
                the next one. All others are not allowed.
            num_states: number of states, S.
            vocab_size: number of tokens, V.
            start: the state of an empty text.

        Raises:
            ValueError: a number outside its range, or two transitions of one state and token.
        """
        num_states = check_int("num_states", num_states, 1, _MOST)
        vocab_size = check_int("vocab_size", vocab_size, 1, _MOST)
        edges = [
            _checked(name, values, 0, most - 1)
            for name, values, most in (
                ("states", states, num_states),
                ("tokens", tokens, vocab_size),
                ("next_states", next_states, num_states),
            )
        ]
        if len({each.shape for each in edges}) > 1 or edges[0].ndim != 1:
            raise ValueError(
                "states, tokens and next_states must be arrays of one length, got shapes"
                f" {[each.shape for each in edges]}"
            )
        order = np.lexsort(edges[1::-1])
        states, tokens, next_states = (each[order] for each in edges)
        twice = np.flatnonzero((np.diff(states) == 0) & (np.diff(tokens) == 0))
        if twice.size:
            at = twice[0]
            raise ValueError(f"state {states[at]} has two transitions with token {tokens[at]}")
        return cls(_compressed(num_states, vocab_size, states, tokens, next_states), start)

    @staticmethod
    def joined(automata: "Sequence[Automaton]") -> "list[Automaton]":
        """The same automata in one table, for requests with different grammars in one scheduler."""
        for one in automata if isinstance(automata, list | tuple) else [automata]:
            if not isinstance(one, Automaton):
                raise ValueError(f"automata must be a list of Automaton, got {shown(one)} in it")
        tables = [one.next_state for one in automata]
        sizes = [each.vocab_size for each in tables]
        if len({*sizes}) > 1:
            raise ValueError(f"the automata have different vocabularies: {sizes} tokens")
        starts = [one.start + at for one, at in zip(automata, _firsts(tables, "kind"), strict=True)]
        whole, ends = _joined(tables), sorted({end for one in automata for end in one.end_tokens})
        return [Automaton(whole, start, tuple(ends)) for start in starts]

    def check(self, vocab_size: int) -> None:
        """Refuses a model that has none of the tokens which a state allows.

        Tokenizers may have more tokens than their models, and models more than their tokenizers:
        the others never come.
        """
        tables = self.next_state
        if tables.vocab_size <= vocab_size:
            return
        kinds, allowed = np.asarray(tables.kind), np.asarray(tables.allowed)
        known = np.packbits(np.arange(allowed.shape[1] * _BITS) < vocab_size, bitorder="little")
        has_some = (allowed & known.view("<u4")).any(axis=1)
        if not (has_some[kinds] | (kinds == 0)).all():
            raise ValueError(
                f"the automaton has {tables.vocab_size} tokens, and the model {vocab_size}: in some"
                " states, as after the end of a text, all tokens that it allows are others; make it"
                " with eos_token=..., an end token of the model"
            )

    def init(self, context: Context, vocab_size: int = 0) -> Int[Array, " B"]:
        """The start."""
        return jnp.broadcast_to(jnp.int32(self.start), context.length.shape)

    def advance(self, state: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        return self.next_state.after(state, tokens)

    def __call__(
        self, logits: Float[Array, "B Q V"], state: Int[Array, "B Q"], /
    ) -> Float[Array, "B Q V"]:
        return jnp.where(self.next_state.mask(state, logits.shape[-1]), logits, -jnp.inf)


class Compressor:
    """Collects the transitions of states, and makes `Tables` of them.

    Args:
        num_states: number of states; those that are not added allow nothing.
        vocab_size: number of tokens.
    """

    def __init__(self, num_states: int, vocab_size: int):
        self._vocab_size = vocab_size
        self._kind = np.zeros(num_states, np.int32)
        self._kinds: dict[tuple[bytes, int, int], int] = {(b"", 0, 0): 0}
        self._words = [np.zeros(-(-vocab_size // _BITS), np.uint32)]
        nothing = np.zeros(0, np.int32)
        self._known = {(_digest(nothing, nothing), False): 0}
        self._steps, self._exceptions = [0], [(nothing, nothing)]

    def move(self, tokens: np.ndarray, codes: np.ndarray, *, is_extra: bool = False) -> int:
        """What tokens do: a number for `add`.

        Args:
            tokens: token ids.
            codes: the distance to the state after each, or `ABSOLUTE` and the state.
            is_extra: whether it comes on top of a move, so that it says nothing of other tokens.
        """
        order = np.argsort(tokens)
        tokens, codes = tokens[order].astype(np.int32), codes[order].astype(np.int32)
        key = _digest(tokens, codes), is_extra and len(tokens) > 0
        if key not in self._known:
            self._known[key] = len(self._steps)
            values, counts = np.unique(codes, return_counts=True)
            self._steps.append(int(values[counts.argmax()]))
            differs = (codes != self._steps[-1]) | is_extra
            self._exceptions.append((tokens[differs], codes[differs]))
        return self._known[key]

    def add(self, states: Any, tokens: np.ndarray, move: int, extra: int = 0) -> None:
        """Adds states, from which tokens do the same.

        Args:
            states: the states.
            tokens: the tokens that they allow.
            move, extra: what these do, which may also say what others would do.
        """
        if not len(tokens):
            return
        marked = np.zeros(len(self._words[0]) * _BITS, bool)
        marked[tokens] = True
        bits = np.packbits(marked, bitorder="little")
        key = _digest(bits), move, extra
        if key not in self._kinds:
            self._kinds[key] = len(self._words)
            self._words.append(bits.view("<u4").astype(np.uint32))
        self._kind[states] = self._kinds[key]

    def tables(self) -> "Tables":
        """The tables, on the device."""
        lengths = [len(tokens) for tokens, _ in self._exceptions]
        # The largest table, padded here so that it is not copied again.
        padding = _size_of("allowed", len(self._words)) - len(self._words)
        return _on_device(
            self._vocab_size,
            kind=self._kind,
            allowed=np.stack([*self._words, *self._words[:1] * padding]),
            move=np.array([move for _, move, _ in self._kinds]),
            extra=np.array([extra for _, _, extra in self._kinds]),
            step=np.array(self._steps),
            first=np.append(0, np.cumsum(lengths)),
            token=np.concatenate([tokens for tokens, _ in self._exceptions]),
            step_of=np.concatenate([codes for _, codes in self._exceptions]),
        )


def _digest(*arrays: np.ndarray) -> bytes:
    return hashlib.blake2b(b"".join(each.tobytes() for each in arrays)).digest()


def _tables_of_array(given: Any) -> Tables:
    """The tables of `[S, V]`."""
    try:
        next_state = np.asarray(given)
    except ValueError:  # lists of different lengths inside
        next_state = np.zeros(())
    if next_state.ndim != 2:
        raise ValueError(f"next_state must be integers [S, V], got {shown(given)}")
    num_states, vocab_size = next_state.shape
    next_state = _checked("next_state", next_state, -1, num_states - 1)
    states, tokens = np.nonzero(next_state >= 0)
    return _compressed(num_states, vocab_size, states, tokens, next_state[states, tokens])


def _compressed(
    num_states: int,
    vocab_size: int,
    states: np.ndarray,
    tokens: np.ndarray,
    next_states: np.ndarray,
) -> Tables:
    """The tables of transitions in the order of their states."""
    tables = Compressor(num_states, vocab_size)
    bounds = np.searchsorted(states, np.arange(num_states + 1))
    for state, (low, high) in enumerate(itertools.pairwise(bounds)):
        own = tokens[low:high]
        tables.add([state], own, tables.move(own, next_states[low:high] - state))
    return tables.tables()


def _checked(name: str, values: Any, least: int, most: int) -> np.ndarray:
    """The values as an array of integers in a range."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths inside
        array = np.zeros(0)
    if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be an array of integers, got {shown(values)}")
    low, high = array.min(), array.max()
    if low < least or high > most:
        outside = low if low < least else high
        raise ValueError(f"{name} has {outside}, outside {least} to {most}")
    return array


def _on_device(vocab_size: int, **arrays: np.ndarray) -> Tables:
    """Tables on the device, with sizes that similar automata share, and so their programs."""
    padded = {}
    for name, values in arrays.items():
        values = values if name == "allowed" else values.astype(np.int32)
        if padding := _size_of(name, len(values)) - len(values):
            width = ((0, padding), *[(0, 0)] * (values.ndim - 1))
            fill = values[-1] if name == "first" else 0  # there is nothing after the last
            values = np.pad(values, width, constant_values=fill)
        padded[name] = jnp.asarray(values)
    return Tables(**padded, vocab_size=vocab_size)


def _size_of(name: str, needed: int) -> int:
    """The size of a table: one of few, since each set of sizes is another program."""
    if name in ("allowed", "move", "extra"):  # by kind, where the sets of tokens take the memory
        return buffer_size(needed)
    return list_size(max(needed, _FEW))


def _firsts(tables: Sequence[Tables], name: str) -> list[int]:
    """Where the entries of each of some tables begin in all of them."""
    lengths = [len(getattr(each, name)) for each in tables]
    return [0, *itertools.accumulate(lengths[:-1])]


def _joined(tables: Sequence[Tables]) -> Tables:
    """The tables of all states of some tables."""
    each = [jax.tree.map(np.asarray, one) for one in tables]
    each = [dataclasses.replace(one, first=one.first[: len(one.step)]) for one in each]

    def all_of(name: str, counted: str = "", *, are_codes: bool = False) -> np.ndarray:
        """The entries of all, which are numbers of others that are counted from the first on."""
        parts = [getattr(one, name) for one in each]
        firsts = _firsts(each, counted) if counted else [0] * len(each)
        both = zip(parts, firsts, strict=True)
        if are_codes:  # those of states themselves move with the states
            return np.concatenate([part + np.where(part >= ABSOLUTE, at, 0) for part, at in both])
        return np.concatenate([part + np.array(at, part.dtype) for part, at in both])

    token = all_of("token")
    return _on_device(
        each[0].vocab_size,
        kind=all_of("kind", "allowed"),
        allowed=all_of("allowed"),
        move=all_of("move", "step"),
        extra=all_of("extra", "step"),
        step=all_of("step", "kind", are_codes=True),
        first=np.append(all_of("first", "token"), len(token)),
        token=token,
        step_of=all_of("step_of", "kind", are_codes=True),
    )
