"""The library's logits processors: bias, banned and allowed tokens, minimum length, penalties.

Penalties are for the tokens of the text. Their states are which tokens of the vocabulary it has, or
how often.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import check_ids, check_int, is_above_zero, is_number, require
from stree_jax.decoding.prompts import list_size
from stree_jax.decoding.rules import Rule, is_given, per_row, rule
from stree_jax.messages import shown

_NO_TOKEN = np.iinfo(np.int32).max  # pads lists of ids; beyond any vocabulary


class _Stateless(Rule):
    """A processor that does not depend on the text."""

    def __repr__(self) -> str:
        """As it was made: without the padding of its ids."""
        parts = jax.tree.leaves(self)
        if not all(isinstance(part, np.ndarray) for part in parts):
            return f"{type(self).__name__}({', '.join(map(str, parts))})"
        kept = [part[parts[0] != _NO_TOKEN].tolist() for part in parts]
        return f"{type(self).__name__}({dict(zip(*kept, strict=True)) if kept[1:] else kept[0]})"


@rule
class LogitBias(_Stateless):
    """Adds to the logits of some tokens.

    Attributes:
        biases: what is added, by token id, `{7: -2.0, 9: 1.0}`; `-inf` rules a token out. Kept as
            two arrays, ids and biases.
    """

    biases: Any

    def __post_init__(self):
        if isinstance(self.biases, Mapping):
            for token, bias in self.biases.items():
                rules_out = isinstance(bias, float | np.floating) and bias == -math.inf
                if not (is_number(bias) or rules_out):
                    raise ValueError(
                        f"LogitBias has the bias {shown(bias)} for token {shown(token)}; give a"
                        " finite number of float32, or -inf to rule it out"
                    )
            ids = _padded("LogitBias", list(self.biases))
            values = np.zeros(len(ids), np.float32)
            values[: len(self.biases)] = [*self.biases.values()]
            object.__setattr__(self, "biases", (ids, values))
            return
        biases = self.biases
        if isinstance(biases, tuple) and len(biases) == 2 and not any(map(is_given, biases)):
            return  # made again, by jax
        if is_given(biases) or isinstance(biases, np.ndarray | jax.Array | None):
            raise ValueError(f"LogitBias takes a dict such as {{7: -2.0}}, got {shown(biases)}")

    def check(self, vocab_size):
        check_ids("LogitBias", _without_padding(self.biases[0]), vocab_size)

    def apply(self, logits, state, /):
        ids, values = self.biases
        added = jnp.zeros((len(ids), logits.shape[-1]), logits.dtype)
        added = added.at[jnp.arange(len(ids), dtype=jnp.int32)[:, None], ids].add(
            values.astype(logits.dtype), mode="drop"
        )
        return logits + added[:, None]


@typing.no_type_check
@dataclasses.dataclass(frozen=True, repr=False)
class _Listed(_Stateless):
    """A processor about the tokens of a list."""

    ids: Any

    def __post_init__(self):
        name, ids = type(self).__name__, self.ids
        if isinstance(ids, np.ndarray) and ids.ndim == 1:
            ids = ids[ids != _NO_TOKEN].tolist()
        if isinstance(ids, list | tuple | set | frozenset | range):
            object.__setattr__(self, "ids", _padded(name, [*ids]))
        elif is_given(ids):
            raise ValueError(f"{name} takes a list of token ids, got {shown(ids)}")

    def check(self, vocab_size):
        check_ids(type(self).__name__, _without_padding(self.ids), vocab_size)


@rule
class BannedTokens(_Listed):
    """Rules some tokens out.

    Attributes:
        ids: the token ids, padded.
    """

    def apply(self, logits, state, /):
        return jnp.where(_members(self.ids, logits), -jnp.inf, logits)


@rule
class AllowedTokens(_Listed):
    """Rules all but some tokens out; a text ends with an end token only if that is among them.

    Attributes:
        ids: the token ids, padded.
    """

    def apply(self, logits, state, /):
        return jnp.where(_members(self.ids, logits), logits, -jnp.inf)


@rule
class MinNewTokens(Rule):
    """Rules end tokens out until a row has some new tokens: the option `min_new_tokens`."""

    least: Any  # how many come first, `[B]`
    ends: Any  # the end tokens of each row, `[B, Y]`, padded with -1

    def init(self, context, vocab_size):
        return jnp.zeros(len(context.length), jnp.int32)

    def advance(self, state, tokens):
        return state + 1

    def apply(self, logits, state, /):
        ends = jnp.where(self.ends < 0, _NO_TOKEN, self.ends)
        too_early = (state < per_row(self.least, state))[..., None]
        return jnp.where(too_early & _members(ends, logits), -jnp.inf, logits)


def _members(ids: Int[Array, "B _"], logits: Float[Array, "B Q V"]) -> Array:
    """True if a token is one of a row's ids, `[B, 1, V]`."""
    rows = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    none = jnp.zeros((len(ids), logits.shape[-1]), bool)
    return none.at[rows, ids].set(True, mode="drop")[:, None]


def _padded(name: str, ids: list[Any]) -> np.ndarray:
    require(bool(ids), f"{name} has no token ids; leave the processor out")
    ids = [check_int(f"a token id of {name}", token, 0, _NO_TOKEN - 1) for token in ids]
    return np.array([*ids, *[_NO_TOKEN] * (list_size(len(ids)) - len(ids))], np.int32)


def _without_padding(ids: Any) -> np.ndarray:
    ids = np.asarray(ids)
    return ids[ids != _NO_TOKEN]


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class _Penalty(Rule):
    """A penalty for the tokens of the text: which it has, or how often."""

    penalty: float

    _is_right, _wanted = staticmethod(is_number), "a number"
    _state_dtype = bool

    def __post_init__(self):
        if is_given(self.penalty) and not self._is_right(self.penalty):
            raise ValueError(
                f"{type(self).__name__} takes {self._wanted}, got {shown(self.penalty)}"
            )

    def init(self, context, vocab_size):
        return jnp.zeros((len(context.length), vocab_size), self._state_dtype)

    def advance(self, state, tokens):
        return state + jax.nn.one_hot(tokens, state.shape[-1], dtype=state.dtype)


@rule
class RepetitionPenalty(_Penalty):
    """Divides positive logits, and multiplies negative ones, of all tokens of prompt and output.

    CTRL (Keskar et al., 2019, arXiv:1909.05858), as transformers and vLLM apply it.

    Attributes:
        penalty: 1 changes nothing; above 1 repetitions are less probable.
    """

    _is_right, _wanted = staticmethod(is_above_zero), "a number above 0"

    def init(self, context, vocab_size):
        batch, places = context.tokens.shape
        is_there = jnp.arange(places, dtype=jnp.int32)[None] < context.length[:, None]
        token = jnp.where(is_there, context.tokens, vocab_size)
        none = jnp.zeros((batch, vocab_size), bool)
        return none.at[jnp.arange(batch, dtype=jnp.int32)[:, None], token].set(True, mode="drop")

    def apply(self, logits, state, /):
        penalty = per_row(self.penalty, logits)
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(state, penalised, logits)


@rule
class PresencePenalty(_Penalty):
    """Subtracts from the logits of all tokens that the output has, as OpenAI's API and vLLM do.

    Attributes:
        penalty: 0 changes nothing; above 0 repetitions are less probable.
    """

    def apply(self, logits, state, /):
        return jnp.where(state, logits - per_row(self.penalty, logits), logits)


@rule
class FrequencyPenalty(_Penalty):
    """Subtracts from a token's logit for each time that the output has it, as OpenAI's API does.

    Attributes:
        penalty: 0 changes nothing; above 0 repetitions are less probable.
    """

    _state_dtype = jnp.int32

    def apply(self, logits, state, /):
        return logits - per_row(self.penalty, logits) * state.astype(logits.dtype)
