"""Logits processors that make the tokens of the text less probable.

Their states are a bit per token, whether the text has it, or a count per token of the output.
"""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Int, UInt32
from stree_jax.checks import is_above_zero, is_number
from stree_jax.decoding.prompts import Context
from stree_jax.decoding.rule_rows import is_given, per_row
from stree_jax.messages import shown

_BITS = 32  # of a word
_PLACES = np.arange(_BITS, dtype=np.uint32)


@typing.no_type_check  # jax unflattens it with leaves that are not numbers
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive logits, and multiplies negative ones, of all tokens of prompt and output.

    CTRL (Keskar et al., 2019, arXiv:1909.05858), as transformers and vLLM apply it.

    Attributes:
        penalty: 1 changes nothing; above 1 repetitions are less probable.
    """

    penalty: float

    def __post_init__(self):
        _check_number("RepetitionPenalty", self.penalty, "a number above 0")

    def init(self, context, vocab_size):
        return _bits_of(context, vocab_size)

    def advance(self, state, tokens):
        return _with_bit(state, tokens)

    def __call__(self, logits, state, /):
        penalty = per_row(self.penalty, logits)
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(_seen(state, logits.shape[-1]), penalised, logits)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PresencePenalty:
    """Subtracts from the logits of all tokens that the output has, as OpenAI's API and vLLM do.

    Attributes:
        penalty: 0 changes nothing; above 0 repetitions are less probable.
    """

    penalty: float

    def __post_init__(self):
        _check_number("PresencePenalty", self.penalty)

    def init(self, context, vocab_size):
        return jnp.zeros((len(context.length), -(-vocab_size // _BITS)), jnp.uint32)

    def advance(self, state, tokens):
        return _with_bit(state, tokens)

    def __call__(self, logits, state, /):
        seen = _seen(state, logits.shape[-1])
        return jnp.where(seen, logits - per_row(self.penalty, logits), logits)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrequencyPenalty:
    """Subtracts from a token's logit for each time that the output has it, as OpenAI's API does.

    Attributes:
        penalty: 0 changes nothing; above 0 repetitions are less probable.
    """

    penalty: float

    def __post_init__(self):
        _check_number("FrequencyPenalty", self.penalty)

    def init(self, context, vocab_size):
        return jnp.zeros((len(context.length), vocab_size), jnp.int32)

    def advance(self, state, tokens):
        return state + (jnp.arange(state.shape[-1]) == tokens[..., None])

    def __call__(self, logits, state, /):
        return logits - per_row(self.penalty, logits) * state


def _check_number(name: str, value: Any, wanted: str = "a number") -> None:
    is_right = is_number if wanted == "a number" else is_above_zero
    if is_given(value) and not is_right(value):
        raise ValueError(f"{name} takes {wanted}, got {shown(value)}")


def _bits_of(context: Context, vocab_size: int) -> UInt32[Array, "B words"]:
    """A bit for each token of the vocabulary: whether the text has it."""
    batch, places = context.tokens.shape
    words = -(-vocab_size // _BITS)
    token = jnp.where(jnp.arange(places) < context.length[:, None], context.tokens, words * _BITS)
    none = jnp.zeros((batch, words * _BITS), bool)
    has = none.at[jnp.arange(batch)[:, None], token].set(True, mode="drop")
    bits = has.reshape(batch, words, _BITS).astype(jnp.uint32) << _PLACES
    return bits.sum(axis=-1, dtype=jnp.uint32)


def _with_bit(
    bits: UInt32[Array, "B Q words"], tokens: Int[Array, "B Q"]
) -> UInt32[Array, "B Q words"]:
    word, bit = tokens[..., None] // _BITS, (tokens[..., None] % _BITS).astype(jnp.uint32)
    return jnp.where(jnp.arange(bits.shape[-1]) == word, bits | (jnp.uint32(1) << bit), bits)


def _seen(bits: UInt32[Array, "B Q words"], vocab_size: int) -> Bool[Array, "B Q V"]:
    has = (bits[..., None] >> _PLACES) & 1
    return has.reshape(*bits.shape[:-1], -1)[..., :vocab_size].astype(bool)
