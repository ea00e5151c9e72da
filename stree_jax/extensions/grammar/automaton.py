"""A grammar as a logits processor: an automaton whose letters are tokens."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import Context, LogitsProcessor
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import check_int
from stree_jax.decoding import is_given
from stree_jax.extensions.grammar.tables import BITS, Tables, compressed, firsts, joined
from stree_jax.messages import shown


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automaton(LogitsProcessor):
    """A `LogitsProcessor` that allows the texts of a deterministic automaton over tokens.

    It reads new tokens only; the prompt may be anything. An end token is a token as others are: let
    the states where a text may end allow it. A state that allows nothing ends its row with an
    error.

    Make one automaton and pass it to all calls: its tables are on the device.

    Attributes:
        next_state: `[S, V]` integers, the state after each token, -1 if a token is not allowed.
            Kept compressed, as `Tables`.
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

    @staticmethod
    def joined(automata: "Sequence[Automaton]") -> "list[Automaton]":
        """Returns them in one table, for requests that share a scheduler."""
        for one in automata if isinstance(automata, list | tuple) else [automata]:
            if not isinstance(one, Automaton):
                raise ValueError(f"automata must be a list of Automaton, got {shown(one)} in it")
        tables = [one.next_state for one in automata]
        sizes = [each.vocab_size for each in tables]
        if len({*sizes}) > 1:
            raise ValueError(f"the automata have different vocabularies: {sizes} tokens")
        starts = [one.start + at for one, at in zip(automata, firsts(tables, "kind"), strict=True)]
        whole, ends = joined(tables), sorted({end for one in automata for end in one.end_tokens})
        return [Automaton(whole, start, tuple(ends)) for start in starts]

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

    def __call__(
        self, logits: Float[Array, "B Q V"], state: Int[Array, "B Q"], /
    ) -> Float[Array, "B Q V"]:
        return jnp.where(self.next_state.mask(state, logits.shape[-1]), logits, -jnp.inf)


def _tables_of_array(given: Any) -> Tables:
    """Returns the tables of `[S, V]`."""
    try:
        next_state = np.asarray(given)
    except ValueError:  # ragged lists
        next_state = np.zeros(0)
    if next_state.ndim != 2:
        raise ValueError(f"next_state must be integers [S, V], got {shown(given)}")
    if next_state.size == 0 or not np.issubdtype(next_state.dtype, np.integer):
        raise ValueError(f"next_state must be an array of integers, got {shown(given)}")
    num_states, vocab_size = next_state.shape
    outside = next_state[(next_state < -1) | (next_state >= num_states)]
    if outside.size:
        raise ValueError(f"next_state has {outside[0]}, outside -1 to {num_states - 1}")
    states, tokens = np.nonzero(next_state >= 0)
    return compressed(num_states, vocab_size, states, tokens, next_state[states, tokens])
