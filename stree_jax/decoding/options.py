"""`Options`: how texts are continued, with one value or one for each row."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import jax
import numpy as np

from stree_jax.checks import check_int, is_above_zero, is_number
from stree_jax.decoding.filters import (
    Filter,
    check_min_p,
    check_top_k,
    check_top_p,
)
from stree_jax.decoding.processors import LogitsProcessor
from stree_jax.decoding.prompts import typed_key
from stree_jax.decoding.rule_rows import check_rules
from stree_jax.decoding.stops import listed_stops
from stree_jax.messages import shown

PerRow: TypeAlias = Any  # a sequence with a value for each row


def _has_lists(values: Sequence[Any]) -> bool:
    return any(each is None or isinstance(each, list | tuple) for each in values)


def _has_lists_of_stops(values: Sequence[Any]) -> bool:
    """Lists of stops: not texts, and not stops that are lists of tokens."""
    return all(
        each is None or (isinstance(each, list | tuple) and not _starts_with_token(each))
        for each in values
    ) and bool(values)


def _starts_with_token(stop: Sequence[Any]) -> bool:
    return bool(stop) and isinstance(stop[0], int | np.integer)


# Options that may have a value for each row, and which lists are that.
_PER_ROW: dict[str, Callable[[Sequence[Any]], bool]] = {
    **dict.fromkeys(
        ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"),
        lambda values: True,
    ),
    **dict.fromkeys(("filters", "processors", "eos_token"), _has_lists),
    "stop": _has_lists_of_stops,
}


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options`, as keywords of `generate`, `stream` and `plan`."""

    max_new_tokens: int | PerRow
    min_new_tokens: int | PerRow
    temperature: float | PerRow
    top_k: int | PerRow
    top_p: float | PerRow
    min_p: float | PerRow
    filters: Sequence[Filter] | PerRow
    processors: Sequence[Any] | PerRow
    eos_token: int | Sequence[int] | PerRow | None
    max_length: int | None
    key: jax.Array | int | PerRow | None
    log_probs: bool | str | Any
    top_log_probs: int
    stop: str | Sequence[Any]
    tokenizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a text is continued: `generate(model, prompts, **options)`, `Request(prompt, **options)`.

    Values are checked when it is made, but for what depends on the model and the prompts.

    All but `max_length`, `log_probs`, `top_log_probs` and `tokenizer` may be one value, or a list
    with one for each row: `temperature=[0.0, 0.7]`, `filters=[[st.MinP(0.1)], []]`,
    `eos_token=[[1, 2], None]`, `stop=[["."], []]`, `key=[3, 4]`. Rows at temperature 0 and above it
    share a program if the verifier follows the target, as the default does. A `Request` is one row.

    Attributes:
        max_new_tokens: most tokens to add to each row.
        min_new_tokens: end tokens are ruled out until a row has as many new tokens.
        temperature: 0 takes the best token.
        top_k, top_p: sample from the `top_k` best tokens (0: all), and among them from the smallest
            set with probability `top_p`: the filters `TopK(top_k)` and `TopP(top_p)`, before
            `filters`. Applied to target and draft.
        min_p: then sample from the tokens that are at least `min_p` times as probable as the best:
            the filter `MinP(min_p)`.
        filters: more filters, `Filter`, in their order. Applied to target and draft.
        processors: logits processors, `LogitsProcessor`, in their order, before temperature and
            filters. Applied to the target, and by drafters with a model to their drafts.
        eos_token: a row ends after this token, or after any of these. None: the tokens in the
            model's config, and the `end_tokens` of the processors; (): none.
        max_length: most tokens of a row, prompt and output; longer requests are refused. None: the
            context length of the model (`ModelConfig.max_length`), if its config has one.
        key: random key or seed, required above temperature 0. A single one is folded with the index
            of each row; an array of keys `[B]`, or a list of seeds, is the rows' own.
        log_probs: True: the result has the log-probability of each new token under the target's own
            distribution, at temperature 1 and without filters. "sampled": after temperature and
            filters, where temperature 0 counts as 1.
        top_log_probs: this many best tokens at each place, with their log-probabilities; those of
            the new tokens come with them.
        stop: a row ends where one of these appears among its new tokens, and is cut right before
            it: lists of token ids, and texts, which need the tokenizer and may begin and end inside
            of tokens.
        tokenizer: the tokenizer of the texts in `stop`. With one the result has the texts.

    Raises:
        ValueError: a bad value.
    """

    max_new_tokens: int | PerRow = 64
    min_new_tokens: int | PerRow = 0
    temperature: float | PerRow = 0.0
    top_k: int | PerRow = 0
    top_p: float | PerRow = 1.0
    min_p: float | PerRow = 0.0
    filters: Sequence[Filter] | PerRow = ()
    processors: Sequence[Any] | PerRow = ()
    eos_token: int | Sequence[int] | PerRow | None = None
    max_length: int | None = None
    key: jax.Array | int | PerRow | None = None
    log_probs: bool | str | Any = False
    top_log_probs: int = 0
    stop: str | Sequence[Any] = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        temperatures = [self.temperature]
        if entries := self.entries():
            name, values = next(iter(entries.items()))
            if not values:
                raise ValueError(f"{name} is empty; give one value, or one for each row")
            temperatures = [row.temperature for row in self.rows(len(values))]  # checks each
        else:
            self._check_row()
        if self.key is None:
            return
        how = jax.random.key_impl(typed_key(self.key))
        if any(heat > 0 for heat in temperatures) and "rbg" in str(how):
            raise ValueError(
                "keys of implementation 'rbg' draw other numbers in another batch; use"
                " jax.random.key(0, impl='threefry2x32')"
            )

    def _check_row(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_top_k(self.top_k)
        check_top_p(self.top_p)
        check_min_p(self.min_p)
        check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        heat: Any = self.temperature
        if not (is_number(heat) and heat >= 0):
            raise ValueError(f"temperature must be a number from 0 on, got {shown(heat)}")
        if heat > 0 and not is_above_zero(heat):
            raise ValueError(f"temperature = {shown(heat)} is 0 in float32; use 0")
        check_rules(self.filters, Filter, "filters", "st.TopK(8)")
        check_rules(self.processors, LogitsProcessor, "processors", "st.RepetitionPenalty(1.2)")
        if self.eos_token is not None:
            listed_eos_tokens(self.eos_token, None)
        if self.max_length is not None:
            check_int("max_length", self.max_length, 1)
        is_flag = isinstance(self.log_probs, bool | np.bool_)
        if not (is_flag or (isinstance(self.log_probs, str) and self.log_probs == "sampled")):
            raise ValueError(
                f"log_probs must be False, True or 'sampled', got {shown(self.log_probs)}"
            )
        check_int("top_log_probs", self.top_log_probs, 0)
        listed_stops(self.stop)

    def entries(self) -> dict[str, list[Any]]:
        """The options that have a value for each row; a key is not among them."""
        found = {}
        for name, is_list in _PER_ROW.items():
            value = getattr(self, name)
            if isinstance(value, np.ndarray | jax.Array) and value.ndim:
                value = np.asarray(value).tolist()
            if isinstance(value, list | tuple) and is_list(value):
                found[name] = [*value]
        return found

    def rows(self, batch: int) -> list["Options"]:
        """The options of each row, without key.

        Raises:
            ValueError: a bad value of a row, or a list of values for another number of rows.
        """
        entries = self.entries()
        for name, values in entries.items():
            if len(values) != batch:
                raise ValueError(
                    f"{name} has {len(values)} entries for {batch} rows; give one value, or one for"
                    " each row"
                )
        rows = [
            dataclasses.replace(
                self, key=None, **{name: values[i] for name, values in entries.items()}
            )
            for i in range(batch)
        ]
        for row in rows:
            if entries and row.entries():  # lists in lists
                row._check_row()
        return rows

    @property
    def num_best(self) -> int | None:
        """How many best tokens are recorded at each place; None: no log-probabilities are."""
        return self.top_log_probs if self.log_probs or self.top_log_probs else None

    def keys(self) -> list[str]:
        """The names of the options, so that `**options` passes them as keywords."""
        return [*OptionKeywords.__annotations__]

    def __getitem__(self, name: str) -> Any:
        if name not in OptionKeywords.__annotations__:
            raise KeyError(name)
        return getattr(self, name)


def checked_options(keywords: Mapping[str, Any]) -> Options:
    """The options among the keywords of a function.

    Raises:
        TypeError: a keyword that is no option.
        ValueError: a bad value.
    """
    check_not_traced(*keywords.values())
    return Options(**keywords)


def check_not_traced(*values: Any) -> None:
    """Refuses traced arguments."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise ValueError(
            "generate and stream run in Python, not under jit, vmap or grad: call them outside,"
            " with a key for each row, or put SpeculativeDecoder inside (docs/functional.md)"
        )


def listed_eos_tokens(eos_token: int | Sequence[int], vocab_size: int | None) -> list[int]:
    """The end tokens of a row, checked."""
    try:
        tokens = np.ravel(eos_token).tolist()
    except ValueError:  # lists of different lengths inside
        tokens = [eos_token]
    for token in tokens:
        check_int("eos_token", token, 0, None if vocab_size is None else vocab_size - 1)
    return tokens
