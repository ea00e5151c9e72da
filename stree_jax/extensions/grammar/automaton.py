"""A grammar as a logits processor: an automaton whose letters are tokens."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import Context, Rule
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import check_int, require
from stree_jax.decoding import is_given
from stree_jax.extensions.grammar.tables import BITS, compressed, concatenated, firsts
from stree_jax.messages import shown

_MOST = 2**24  # states, or tokens


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automaton(Rule):
    """A `Rule` that allows the texts of a deterministic automaton over tokens.

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
        transitions = self.next_state
        if is_given(transitions) or isinstance(transitions, np.ndarray | jax.Array | None):
            after = _as_array(transitions)
            is_table = after.ndim == 2
            require(is_table, f"next_state must be integers [S, V], got {shown(transitions)}")
            after = _checked("next_state", after, -1, len(after) - 1)
            states, tokens = np.nonzero(after >= 0)
            tables = compressed(*after.shape, states, tokens, after[states, tokens])
            object.__setattr__(self, "next_state", tables)
        if is_given(self.start):
            kinds = np.asarray(self.next_state.kind)
            check_int("start", self.start, 0)
            if self.start >= len(kinds) or kinds[self.start] == 0:
                raise ValueError(f"start = {self.start} is no state that allows a token")

    @classmethod
    def from_edges(cls, states, tokens, next_states, *, num_states, vocab_size, start=0):
        """Makes an automaton of its transitions, in any order; all others are not allowed.

        With a token, a state of `states` leads to that of `next_states`: arrays of one length.

        Raises:
            ValueError: a number outside its range, or two transitions of one state and token.
        """
        num_states = check_int("num_states", num_states, 1, _MOST)
        vocab_size = check_int("vocab_size", vocab_size, 1, _MOST)
        edges = [
            _checked("states", states, 0, num_states - 1),
            _checked("tokens", tokens, 0, vocab_size - 1),
            _checked("next_states", next_states, 0, num_states - 1),
        ]
        if len({array.shape for array in edges}) > 1 or edges[0].ndim != 1:
            raise ValueError(
                "states, tokens and next_states must be arrays of one length, got shapes"
                f" {[array.shape for array in edges]}"
            )
        order = np.lexsort(edges[1::-1])
        states, tokens, next_states = (array[order] for array in edges)
        twice = np.flatnonzero((np.diff(states) == 0) & (np.diff(tokens) == 0))
        if twice.size:
            at = twice[0]
            raise ValueError(f"state {states[at]} has two transitions with token {tokens[at]}")
        return cls(compressed(num_states, vocab_size, states, tokens, next_states), start)

    @staticmethod
    def joined(automata: "Sequence[Automaton]") -> "list[Automaton]":
        """Returns them in one table, for requests that share a scheduler."""
        for automaton in automata if isinstance(automata, list | tuple) else [automata]:
            if not isinstance(automaton, Automaton):
                raise ValueError(
                    f"automata must be a list of Automaton, got {shown(automaton)} in it"
                )
        tables = [automaton.next_state for automaton in automata]
        sizes = [table.vocab_size for table in tables]
        require(len({*sizes}) <= 1, f"the automata have different vocabularies: {sizes} tokens")
        table = concatenated(tables)
        end_tokens = tuple(sorted({end for automaton in automata for end in automaton.end_tokens}))
        offsets = firsts(tables, "kind")
        return [
            Automaton(table, offset + automaton.start, end_tokens)
            for automaton, offset in zip(automata, offsets, strict=True)
        ]

    def check(self, vocab_size: int) -> None:
        """Refuses a model that has no token which a state allows.

        Tokenizers may have more tokens than their models, and models more than their tokenizers:
        the others never come.
        """
        tables = self.next_state
        if tables.vocab_size <= vocab_size:
            return
        kinds, allowed = np.asarray(tables.kind), np.asarray(tables.allowed)
        known = np.packbits(np.arange(allowed.shape[1] * BITS) < vocab_size, bitorder="little")
        has_some = (allowed & known.view("<u4")).any(axis=1)
        if not (has_some[kinds] | (kinds == 0)).all():
            raise ValueError(
                f"the automaton has {tables.vocab_size} tokens, and the model {vocab_size}: in some"
                " states, as after the end of a text, all tokens that it allows are others; make it"
                " with eos_token=..., an end token of the model"
            )

    def init(self, context: Context, vocab_size: int = 0) -> Int[Array, " B"]:
        """Returns the start."""
        return jnp.broadcast_to(jnp.int32(self.start), context.length.shape)

    def advance(self, state: Int[Array, "B Q"], tokens: Int[Array, "B Q"]) -> Int[Array, "B Q"]:
        return self.next_state.after(state, tokens)

    def apply(
        self, logits: Float[Array, "B Q V"], state: Int[Array, "B Q"], /
    ) -> Float[Array, "B Q V"]:
        return jnp.where(self.next_state.mask(state, logits.shape[-1]), logits, -jnp.inf)


def _as_array(values: Any) -> np.ndarray:
    """Returns values as an array, an empty one for ragged lists."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.zeros(0)


def _checked(name: str, values: Any, least: int, most: int) -> np.ndarray:
    """Returns the values as an array of integers in a range."""
    array = _as_array(values)
    if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be an array of integers, got {shown(values)}")
    low, high = array.min(), array.max()
    if low < least or high > most:
        outside = low if low < least else high
        raise ValueError(f"{name} has {outside}, outside {least} to {most}")
    return array
