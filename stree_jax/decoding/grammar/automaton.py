"""A grammar as a logits processor: a deterministic automaton whose alphabet is the tokens."""

import dataclasses
import hashlib
import itertools
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.checks import check_int
from stree_jax.decoding.filters import is_given
from stree_jax.decoding.prompts import buffer_size
from stree_jax.decoding.types import Context
from stree_jax.messages import shown

_BITS = 32  # of a word
_MOST = 2**24  # states, or tokens

# A state, the tokens that it allows, in ascending order, and the states after them.
Row = tuple[int, np.ndarray, np.ndarray]


@typing.no_type_check  # jax unflattens it with leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Transitions, compressed: what states have in common is stored once.

    Most tokens that a state allows lead to one other state. It is stored as its distance from the
    state, which is the same for many states, and so are the tokens that lead elsewhere. Kind 0 is
    the state that allows nothing. `states`, `kinds` and `exceptions` are sizes.

    Attributes:
        kind: the kind of each state.
        allowed: a bit for each token that a kind allows, token 0 first.
        step: distance to the state after most tokens.
        first: the first exception of each kind, and the end of those of the last one.
        token: the tokens of exceptions, of each kind in ascending order.
        step_of: distance to the state after an exception.
        vocab_size: number of tokens.
    """

    kind: Int[Array, " states"]
    allowed: Any  # uint32 [kinds, words]
    step: Int[Array, " kinds"]
    first: Int[Array, " kinds_and_end"]
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
        """Which tokens each state allows."""
        words = self.allowed[self.kinds_of(states)]
        bits = words[..., None] >> jnp.arange(_BITS, dtype=words.dtype) & 1
        bits = bits.reshape(*states.shape, -1)[..., :vocab_size] != 0
        return jnp.pad(bits, ((0, 0), (0, 0), (0, vocab_size - bits.shape[-1])))

    def after(self, states: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """The state after one more token; -1 if it is not allowed."""
        kinds = self.kinds_of(states)
        words = self.allowed.at[kinds, tokens // _BITS].get(mode="fill", fill_value=0)
        is_allowed = (words >> (tokens % _BITS).astype(words.dtype) & 1) != 0
        # Binary search: `place` is the number of exceptions below the token.
        begin, end = self.first[kinds], self.first[kinds + 1]
        place = begin
        for size in 1 << np.arange(int(self.vocab_size).bit_length())[::-1]:
            later = place + size
            passed = (later <= end) & (self.token.at[later - 1].get(mode="clip") < tokens)
            place = jnp.where(passed, later, place)
        is_exception = (place < end) & (self.token.at[place].get(mode="clip") == tokens)
        other = self.step_of.at[place].get(mode="clip")
        step = jnp.where(is_exception, other, self.step[kinds])
        return jnp.where(is_allowed, states + step, -1)


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
    """

    next_state: Any = dataclasses.field(metadata={"shared": True})
    start: int = 0

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
        bounds = np.searchsorted(states, np.arange(num_states + 1))

        def rows() -> Iterator[Row]:
            for state, (low, high) in enumerate(itertools.pairwise(bounds)):
                if high > low:
                    yield state, tokens[low:high], next_states[low:high]

        return cls(tables_of(rows(), num_states, vocab_size), start)

    @staticmethod
    def joined(automata: "Sequence[Automaton]") -> "list[Automaton]":
        """The same automata in one table, for requests with different grammars in one scheduler."""
        return _joined(automata)

    def check(self, vocab_size: int) -> None:
        """Refuses a model with fewer tokens. More, as a padded vocabulary has, are not allowed."""
        if self.next_state.vocab_size > vocab_size:
            raise ValueError(
                f"the automaton has {self.next_state.vocab_size} tokens, and the model"
                f" {vocab_size}; make it for the model's tokenizer"
            )

    def init(self, context: Context, vocab_size: int = 0) -> Int[Array, " B"]:
        """The start."""
        return jnp.broadcast_to(jnp.int32(self.start), context.length.shape)

    def advance(self, state: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        """See `LogitsProcessor`."""
        return self.next_state.after(state, tokens)

    def __call__(
        self, logits: Float[Array, "B Q V"], state: Int[Array, "B Q"], /
    ) -> Float[Array, "B Q V"]:
        """See `LogitsProcessor`."""
        return jnp.where(self.next_state.mask(state, logits.shape[-1]), logits, -jnp.inf)


def tables_of(rows: Iterable[Row], num_states: int, vocab_size: int) -> Tables:
    """Compresses an automaton, whose states without a row allow nothing."""
    num_words = -(-vocab_size // _BITS)
    kind = np.zeros(num_states, np.int32)
    kinds: dict[bytes, int] = {b"": 0}
    nothing = np.zeros(0, np.int32)
    words, steps = [np.zeros(num_words, np.uint32)], [0]
    exceptions, exception_steps = [nothing], [nothing]
    for state, tokens, next_states in rows:
        least = next_states.min()
        step = int(least + np.bincount(next_states - least).argmax()) - state
        distance = (next_states - state).astype(np.int32)
        differs = distance != step
        marked = np.zeros(num_words * _BITS, bool)
        marked[tokens] = True
        bits = np.packbits(marked, bitorder="little")
        others, other_steps = tokens[differs].astype(np.int32), distance[differs]
        content = bits, np.int64(step), others, other_steps
        digest = hashlib.blake2b(b"".join(each.tobytes() for each in content)).digest()
        if digest not in kinds:
            kinds[digest] = len(kinds)
            words.append(bits.view("<u4").astype(np.uint32))
            steps.append(step)
            exceptions.append(others)
            exception_steps.append(other_steps)
        kind[state] = kinds[digest]
    ends = np.cumsum([len(each) for each in exceptions])
    return _padded(
        kind,
        np.stack(words),
        np.array(steps),
        np.append(0, ends),
        np.concatenate(exceptions),
        np.concatenate(exception_steps),
        vocab_size,
    )


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

    def rows() -> Iterator[Row]:
        for state, row in enumerate(next_state):
            tokens = np.flatnonzero(row >= 0)
            if tokens.size:
                yield state, tokens, row[tokens]

    return tables_of(rows(), num_states, vocab_size)


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


def _padded(
    kind: np.ndarray,
    allowed: np.ndarray,
    step: np.ndarray,
    first: np.ndarray,
    token: np.ndarray,
    step_of: np.ndarray,
    vocab_size: int,
) -> Tables:
    """Tables on the device, with sizes that similar automata share, and so their programs."""

    def pad(values: np.ndarray, fill: int = 0) -> Array:
        width = ((0, buffer_size(len(values)) - len(values)), *[(0, 0)] * (values.ndim - 1))
        values = values if values.dtype == np.uint32 else values.astype(np.int32)
        return jnp.asarray(np.pad(values, width, constant_values=fill))

    none_after = int(first[-1])
    return Tables(
        pad(kind),
        pad(allowed),
        pad(step),
        pad(first, none_after),
        pad(token),
        pad(step_of),
        vocab_size,
    )


def _joined(automata: Sequence[Automaton]) -> list[Automaton]:
    """See `Automaton.joined`."""
    for one in automata if isinstance(automata, list | tuple) else [automata]:
        if not isinstance(one, Automaton):
            raise ValueError(f"automata must be a list of Automaton, got {shown(one)} in it")
    if len({one.next_state.vocab_size for one in automata}) > 1:
        sizes = [one.next_state.vocab_size for one in automata]
        raise ValueError(f"the automata have different vocabularies: {sizes} tokens")
    each = [jax.tree.map(np.asarray, one.next_state) for one in automata]
    states, kinds, exceptions = (
        np.cumsum([0, *(len(getattr(tables, name)) for tables in each)])
        for name in ("kind", "step", "token")
    )
    whole = _padded(
        np.concatenate([one.kind + at for one, at in zip(each, kinds, strict=False)]),
        np.concatenate([one.allowed for one in each]),
        np.concatenate([one.step for one in each]),
        np.concatenate(
            [
                *(
                    one.first[: len(one.step)] + at
                    for one, at in zip(each, exceptions, strict=False)
                ),
                exceptions[-1:],
            ]
        ),
        np.concatenate([one.token for one in each]),
        np.concatenate([one.step_of for one in each]),
        each[0].vocab_size,
    )
    return [
        Automaton(whole, one.start + int(at)) for one, at in zip(automata, states, strict=False)
    ]
