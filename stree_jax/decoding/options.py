"""`Options`: how texts are continued, with one value or one for each row."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from stree_jax.checks import check_int, is_above_zero, is_number
from stree_jax.decoding.filters import Filter, check_min_p, check_top_p
from stree_jax.decoding.prompts import typed_key
from stree_jax.decoding.rules import checked_rules
from stree_jax.decoding.stops import listed_stops
from stree_jax.messages import shown

_Function = TypeVar("_Function", bound=Callable)
# What the command and other libraries call by another name.
_WAYS = {
    "json_schema": "processors=[st.json_schema(...)]",
    "regex": "processors=[st.regex(...)]",
    "seed": "key=0",
}
# What is one for all rows of a batch.
_OF_ALL = ("max_length", "log_probs", "top_log_probs", "tokenizer")


def check_keywords(function: str, keywords: Iterable[str], names: Collection[str]) -> None:
    """Refuses a keyword that a function has not, as Python does; names the nearest that it has."""
    for strange in keywords:
        if strange not in names:
            near = *difflib.get_close_matches(strange, names, 1), f"one of help({function})"
            way = _WAYS.get(strange, near[0])
            raise TypeError(
                f"{function}() got an unexpected keyword argument {strange!r}; use {way}"
            )


def explained(function: _Function) -> _Function:
    """Decorates a function, or a class that is made of keywords: it refuses others by name."""
    decorated: Any = function
    called = decorated.__init__ if inspect.isclass(decorated) else decorated
    names = inspect.signature(decorated).parameters

    @functools.wraps(called)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        check_keywords(decorated.__name__, keywords, names)
        return called(*arguments, **keywords)

    if called is decorated:
        return checked  # type: ignore[return-value]
    decorated.__init__ = checked
    return decorated


def spelled_out(function: _Function) -> _Function:
    """Decorates a function whose last keywords are options: its signature names each of them."""
    decorated: Any = function
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    options = [
        last.replace(name=f.name, kind=last.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in dataclasses.fields(Options)
        if f.name not in signature.parameters
    ]
    decorated.__signature__ = signature.replace(parameters=[*parameters, *options])
    return explained(decorated)


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a text is continued: `generate(model, prompts, **options)`, `Request(prompt, **options)`.

    Values are checked when it is made, but for what depends on the model and the prompts. All rows
    of a batch share one, or each has its own: `generate(model, prompts, options=[Options(...),
    Options(...)])`, of which `max_length`, `log_probs`, `top_log_probs` and `tokenizer` are the
    same. Rows at temperature 0 and above it share a program if the verifier follows the target, as
    the default does.

    Attributes:
        max_new_tokens: most tokens to add to each row.
        min_new_tokens: end tokens are ruled out until a row has as many new tokens.
        temperature: 0 takes the best token.
        top_k, top_p: sample from the `top_k` best tokens (0: all), and among them from the smallest
            set with probability `top_p`: the filters `TopK(top_k)` and `TopP(top_p)`, before
            `filters`. Applied to target and draft.
        min_p: then sample from the tokens that are at least `min_p` times as probable as the best:
            the filter `MinP(min_p)`.
        filters: more filters, in their order: a `Rule` without a state, or a function of logits.
            Applied to target and draft.
        processors: logits processors, each a `Rule`, in their order, before temperature and
            filters. Applied to the target, and by drafters with a model to their drafts.
        eos_token: a row ends after this token, or after any of these. None: the tokens in the
            model's config, and the `end_tokens` of the processors; (): none.
        max_length: most tokens of a row, prompt and output; longer requests are refused. None: the
            context length of the model (`ModelConfig.max_length`), if its config has one.
        key: random key or seed, required above temperature 0. The one key of a batch is folded with
            the index of each row; an array of keys `[B]`, a list of seeds, and the keys of
            `options` for each row are the rows' own.
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

    max_new_tokens: int | Any = 64
    min_new_tokens: int | Any = 0
    temperature: float | Any = 0.0
    top_k: int | Any = 0
    top_p: float | Any = 1.0
    min_p: float | Any = 0.0
    filters: Sequence[Filter] | Any = ()
    processors: Sequence[Any] | Any = ()
    eos_token: int | Sequence[int] | Any | None = None
    max_length: int | Any | None = None
    key: jax.Array | int | Any | None = None
    log_probs: bool | str | Any = False
    top_log_probs: int | Any = 0
    stop: str | Sequence[str | Sequence[int]] | Any = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if np.ndim(value) or isinstance(value, list | tuple):
                raise ValueError(
                    f"{name} = {shown(value)}: one value is for all rows; give each row its own by"
                    f" options=[st.Options({name}=...), ...]"
                )
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_int("top_k", self.top_k, 0)
        check_top_p(self.top_p)
        check_min_p(self.min_p)
        check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        heat: Any = self.temperature
        if not (is_number(heat) and heat >= 0):
            raise ValueError(f"temperature must be a number from 0 on, got {shown(heat)}")
        if heat > 0 and not is_above_zero(heat):
            raise ValueError(f"temperature = {shown(heat)} is 0 in float32; use 0")
        for name, example in (("filters", "st.TopK(8)"), ("processors", "st.BannedTokens([7])")):
            rules = checked_rules(getattr(self, name), name, example)
            object.__setattr__(self, name, rules)
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
        is_seed = type(self.key) is int and 0 <= self.key < 2**32
        if self.key is None or is_seed:  # then no device starts, which several processes may join
            return
        how = jax.random.key_impl(typed_key(self.key))
        if heat > 0 and "rbg" in str(how):
            raise ValueError(
                "keys of implementation 'rbg' draw other numbers in another batch; use"
                " jax.random.key(0, impl='threefry2x32')"
            )

    @property
    def num_best(self) -> int | None:
        """How many best tokens are recorded at each place; None: no log-probabilities are."""
        return self.top_log_probs if self.log_probs or self.top_log_probs else None

    def keys(self) -> list[str]:
        """The names of the options, so that `**options` passes them as keywords."""
        return [field.name for field in dataclasses.fields(Options)]

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


def options_of_rows(options: Options | Sequence[Options] | Any, batch: int) -> list[Options]:
    """The options of each row, checked together."""
    rows = [options] * batch if isinstance(options, Options) else options
    if not isinstance(rows, Sequence) or not all(isinstance(row, Options) for row in rows):
        raise ValueError(f"options must be st.Options, or a list of them, got {shown(options)}")
    if len(rows) != batch:
        raise ValueError(
            f"options has {len(rows)} entries for {batch} rows; give one, or one for each row"
        )
    for name in _OF_ALL:
        first, *others = (getattr(row, name) for row in rows)
        for value in others:
            if value is not first and value != first:
                raise ValueError(
                    f"{name} is one for all rows, and options have {shown(first)} and"
                    f" {shown(value)}"
                )
    return [*rows]


def check_not_traced(*values: Any) -> None:
    """Refuses traced arguments."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise ValueError(
            "generate and stream run in Python, not under jit, vmap or grad: call them outside,"
            " with a key for each row, or put a SpeculativeDecoder inside"
        )


def listed_eos_tokens(eos_token: int | Sequence[int] | Any, vocab_size: int | None) -> list[int]:
    """The end tokens of a row, checked."""
    tokens: list[Any]
    try:
        tokens = [eos_token] if np.ndim(eos_token) > 1 else np.ravel(eos_token).tolist()
    except ValueError:  # lists of different lengths inside
        tokens = [eos_token]
    for token in tokens:
        check_int("eos_token", token, 0, None if vocab_size is None else vocab_size - 1)
    return tokens
