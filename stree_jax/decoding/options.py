"""Checks the arguments of `generate` and makes a `Plan` of them. Nothing is compiled here."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.decoding.drafters.base import Drafter, check_request, draft_models, drawn_by
from stree_jax.decoding.filters import (
    Filter,
    Filtering,
    check_filters,
    check_min_p,
    check_top_k,
    check_top_p,
    filters_of,
)
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.on_mesh import check_mesh_of
from stree_jax.decoding.processor_rows import Ruling, check_processors, processors_of
from stree_jax.decoding.stop_tables import Stopping, listed_stops, stopping_of, stops_of
from stree_jax.decoding.types import Context, Limits, Sampling
from stree_jax.decoding.verifiers import (
    LOSSY_VERIFIERS,
    VERIFIERS,
    Verifier,
    default_verifier,
)
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.tree import TreeTopology

# Buffer sizes are rounded up to a few values, so that nearby requests share compiled programs.
_SMALLEST_BUFFER = 64
_FEWEST_EOS_TOKENS = 4
MAX_TOKENS = 2**24  # most tokens of a row, prompt and output: far beyond any model's context


class Plan(NamedTuple):
    """A checked request: the program to run, and its arguments."""

    decoder: SpeculativeDecoder
    drafter: Drafter | None
    context: Context
    keys: Array
    limits: Limits
    sampling: Sampling
    stopping: list[Stopping]


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options`, as keywords of `generate`, `stream` and `plan`."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    filters: tuple[Filter, ...]
    processors: Sequence[Any]
    eos_token: int | Sequence[int] | None
    max_length: int | None
    key: jax.Array | None
    log_probs: bool | str
    top_log_probs: int
    stop: str | Sequence[Any]
    tokenizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a text is continued: `generate(model, prompts, **options)`, `Request(prompt, **options)`.

    Values are checked when it is made, but for what depends on the model and the prompts.

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
            model's config; (): none.
        max_length: most tokens of a row, prompt and output; longer requests are refused. None: the
            context length of the model (`ModelConfig.max_length`), if its config has one.
        key: random key, required above temperature 0. A single key is folded with the index of each
            row; an array of keys `[B]` is the rows' own.
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

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters: tuple[Filter, ...] = ()
    processors: Sequence[Any] = ()
    eos_token: int | Sequence[int] | None = None
    max_length: int | None = None
    key: jax.Array | None = None
    log_probs: bool | str = False
    top_log_probs: int = 0
    stop: str | Sequence[Any] = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_top_k(self.top_k)
        check_top_p(self.top_p)
        check_min_p(self.min_p)
        check_int("min_new_tokens", self.min_new_tokens, 0)
        largest = float(np.finfo(np.float32).max)
        heat = self.temperature
        if not (isinstance(heat, numbers.Real) and 0 <= heat <= largest):
            raise ValueError(f"temperature must be a number from 0 on, got {shown(heat)}")
        if 0 < heat < np.finfo(np.float32).tiny:
            raise ValueError(f"temperature = {shown(heat)} is 0 in float32; use 0")
        check_filters(self.filters)
        check_processors(self.processors)
        if self.eos_token is not None:
            _listed_eos_tokens(self.eos_token, None)
        if self.max_length is not None:
            check_int("max_length", self.max_length, 1)
        if self.log_probs not in (False, True, "sampled"):
            raise ValueError(
                f"log_probs must be False, True or 'sampled', got {shown(self.log_probs)}"
            )
        check_int("top_log_probs", self.top_log_probs, 0)
        listed_stops(self.stop)
        if self.key is None:
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
        return [*OptionKeywords.__annotations__]

    def __getitem__(self, name: str) -> Any:
        if name not in OptionKeywords.__annotations__:
            raise KeyError(name)
        return getattr(self, name)


def checked_options(function: str, keywords: Mapping[str, Any]) -> Options:
    """The options among the keywords of a function.

    Raises:
        TypeError: a keyword that is no option.
        ValueError: a bad value.
    """
    for name in keywords:
        if name not in OptionKeywords.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    _check_not_traced(*keywords.values())
    return Options(**keywords)


def _check_not_traced(*values: Any) -> None:
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise ValueError(
            "generate and stream run in Python, not under jit, vmap or grad: call them outside,"
            " with a key for each row, or put SpeculativeDecoder inside (docs/functional.md)"
        )


def plan(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    text: Options | None = None,
    *,
    drafter: Drafter | None = None,
    topology: TreeTopology | None = None,
    verifier: str | Verifier | None = None,
    lossy: bool = False,
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Checks a request; compiles nothing.

    Arguments and errors as in `generate`; `text` are options that are checked already, instead of
    keywords.
    """
    text = checked_options("plan", options) if text is None else text
    check_model(model)
    vocab_size = model.config.vocab_size
    _check_not_traced(prompts, *(prompts if isinstance(prompts, Sequence) else ()))
    context = checked_prompts(prompts, vocab_size)
    _check_not_traced(context.length, text.key, model.embedding[...])
    eos_token, key, temperature = text.eos_token, text.key, text.temperature
    if eos_token is None:
        eos_token = () if model.config.eos_token is None else model.config.eos_token
    eos_tokens = _listed_eos_tokens(eos_token, vocab_size)
    check_int("top_log_probs", text.top_log_probs, 0, vocab_size)
    check_processors(text.processors, vocab_size)
    stopping = stopping_of(text.stop, text.tokenizer, vocab_size)
    stops = None
    if stopping:
        machine = stopping.machine(vocab_size)
        stops = stops_of((machine,) * len(prompts), (text.min_new_tokens,) * len(prompts))
    _check_length(context, text.max_new_tokens, text.max_length, model.config.max_length)
    temperature_is_zero = temperature == 0
    if key is None and not temperature_is_zero:
        raise ValueError("temperature > 0 needs a random key: pass key=jax.random.key(0)")
    keys = _row_keys(jax.random.key(0) if key is None else key, len(prompts))
    _check_drafter(drafter)
    check_mesh_of(model, drafter)
    topology = _checked_topology(topology, drafter, vocab_size)
    for draft in draft_models(drafter):
        if draft.config.vocab_size != vocab_size:
            raise ValueError(
                f"draft and target have different vocabularies: {draft.config.vocab_size} and"
                f" {vocab_size} tokens; they must share one tokenizer"
            )
    check_request(drafter, model, topology, temperature_is_zero=temperature_is_zero)
    chosen = _checked_verifier(verifier, drafter, topology, temperature_is_zero)
    if not (lossy or is_lossless(chosen)):
        raise ValueError(
            f"verifier {chosen.name!r} is lossy: its output does not have the target's"
            " distribution; pass lossy=True if you want that, or leave verifier out"
        )
    batch, ends = len(prompts), _padded_eos_tokens(eos_tokens)
    longest = int(np.asarray(context.length).max()) + text.max_new_tokens
    decoder = SpeculativeDecoder(
        topology=topology,
        verifier=chosen,
        max_length=buffer_size(longest),
        # On a GPU a termination check on the host takes long compared with a step.
        steps_per_sync=1 if dispatch.device_obstacle(dispatch.device_of(model)) else 2,
        num_best=text.num_best,
        has_stops=stops is not None,
    )

    def per_row(value: object, dtype: type) -> Array:
        return jnp.asarray(np.full(batch, value, dtype))

    return Plan(
        decoder,
        drafter if topology.num_nodes > 1 else None,  # a root alone is autoregressive decoding
        context,
        keys,
        Limits(
            per_row(text.max_new_tokens, np.int32), jnp.asarray(np.tile(ends, (batch, 1))), stops
        ),
        Sampling(
            per_row(temperature, np.float32),
            () if temperature_is_zero else filters_of([filtering(text)] * batch),
            processors_of([ruling(text, ends)] * batch),
            temperature_is_zero=temperature_is_zero,
            record_sampled=per_row(True, bool) if text.log_probs == "sampled" else None,
        ),
        [stopping] * batch,
    )


def filtering(options: Options | None) -> Filtering:
    """A row of `filters_of`; of no options: nothing is filtered."""
    if options is None:
        return Filtering()
    return Filtering(options.top_k, options.top_p, options.min_p, options.filters)


def ruling(options: Options, end_tokens: Any) -> Ruling:
    """A row of `processors_of`."""
    return Ruling(tuple(options.processors), options.min_new_tokens, end_tokens)


def is_lossless(verifier: str | Verifier | None) -> bool:
    """Whether a verifier (or its name) keeps the target's tokens or their distribution."""
    rule = LOSSY_VERIFIERS.get(verifier) if isinstance(verifier, str) else verifier
    return getattr(rule, "lossless", True)


def buffer_size(needed: int, smallest: int = _SMALLEST_BUFFER) -> int:
    """Rounds up a buffer size: powers of two from `smallest` on, and 1.5 times these.

    Worked example, `smallest = 64`: 64, 96, 128, 192, 256, 384, 512, 768, ...
    """
    size = smallest
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def _listed_eos_tokens(eos_token: int | Sequence[int], vocab_size: int | None) -> list[int]:
    try:
        tokens = np.ravel(eos_token).tolist()
    except ValueError:  # lists of different lengths inside
        tokens = [eos_token]
    for token in tokens:
        check_int("eos_token", token, 0, None if vocab_size is None else vocab_size - 1)
    return tokens


def _padded_eos_tokens(tokens: list[int]) -> np.ndarray:
    """End-of-sequence tokens `[Y]`, padded with -1."""
    row = np.full(buffer_size(len(tokens), _FEWEST_EOS_TOKENS), -1, np.int32)
    row[: len(tokens)] = tokens
    return row


def _check_drafter(drafter: Drafter | None) -> None:
    if drafter is None:
        return
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise ValueError(
            "drafter must be a ModelDrafter(...), an NgramDrafter(...) or another object with the"
            f" methods of stree_jax.Drafter, got {shown(drafter)}"
        )
    for leaf in jax.tree.leaves(drafter):
        if not isinstance(leaf, jax.Array | np.ndarray | numbers.Number):
            raise ValueError(
                f"drafter must be a pytree of arrays, and has a leaf {shown(leaf)}; derive its"
                " class from flax.nnx.Module, or register it with jax.tree_util"
            )


def checked_prompts(
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    name: str = "prompts",
    *,
    may_be_empty: bool = False,
) -> Context:
    """Right-padded prompts in a buffer of rounded size; `name` is what messages call them."""
    if not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise ValueError(
            f"{name} must be a list with a list of token ids for each row, got {shown(prompts)}"
        )
    if len(prompts) == 0:
        raise ValueError(f"{name} is empty; pass a list with at least one list of token ids")
    rows = []
    for i, prompt in enumerate(prompts):
        try:
            row = np.asarray(prompt)
        except ValueError:  # lists of different lengths inside
            row = np.empty((0, 0))
        if isinstance(prompt, str) or row.ndim != 1:
            raise ValueError(
                f"{name}[{i}] is not a list of token ids: {name} is a list of lists, one a row"
            )
        if row.size == 0 and may_be_empty:
            row = row.astype(np.int32)
        elif row.size == 0:
            raise ValueError(f"{name}[{i}] is empty; it needs at least one token")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"{name}[{i}] has {row.dtype} values; token ids are integers")
        outside = row[(row < 0) | (row >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"{name}[{i}] has token id {outside[0]}, outside the vocabulary of {vocab_size}"
            )
        rows.append(row)
    longest = max(map(len, rows))
    tokens = np.zeros((len(rows), buffer_size(longest)), np.int32)
    for buffer, row in zip(tokens, rows, strict=True):
        buffer[: len(row)] = row
    return Context(jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32))


def _checked_topology(
    topology: TreeTopology | None, drafter: Drafter | None, vocab_size: int
) -> TreeTopology:
    if topology is None:
        topology = TreeTopology.chain(0) if drafter is None else drafter.default_topology()
    if not isinstance(topology, TreeTopology):
        raise ValueError(f"topology must be a TreeTopology, got {shown(topology)}")
    if drafter is None and topology.num_nodes > 1:
        raise ValueError(
            f"a tree of {topology.num_nodes} nodes needs a drafter: pass drafter=ModelDrafter(...)"
        )
    branching = max(map(len, topology.children))
    if branching > vocab_size:
        raise ValueError(f"nodes with {branching} children, but only {vocab_size} tokens exist")
    return topology.level_order()


def _checked_verifier(
    verifier: str | Verifier | None,
    drafter: Drafter | None,
    topology: TreeTopology,
    temperature_is_zero: bool,
) -> Verifier:
    drawn = drawn_by(drafter, topology, temperature_is_zero=temperature_is_zero)
    if verifier is None:
        verifier = default_verifier(drawn, topology, temperature_is_zero=temperature_is_zero)
    if isinstance(verifier, str):
        known = VERIFIERS if verifier in VERIFIERS else LOSSY_VERIFIERS
        if verifier not in known:
            raise ValueError(
                f"unknown verifier {shown(verifier)}; known: {sorted(VERIFIERS)}, and lossy:"
                f" {sorted(LOSSY_VERIFIERS)}"
            )
        verifier = known[verifier]
    if isinstance(verifier, type) or not isinstance(verifier, Verifier):
        raise ValueError(
            f"verifier must be one of {sorted(VERIFIERS)}, or an object with the name and the"
            f" methods of stree_jax.Verifier, got {shown(verifier)}"
        )
    try:
        hash(verifier)
    except TypeError:
        raise ValueError(
            f"verifier {verifier.name!r} is not hashable, and a compiled program depends on it;"
            " make its class a frozen dataclass"
        ) from None
    verifier.check(drawn, topology, temperature_is_zero=temperature_is_zero)
    return verifier


def _check_length(
    context: Context, max_new_tokens: int, max_length: int | None, made_for: int | None
) -> None:
    """Refuses requests that are longer than the model's context, instead of cutting them."""
    limit = made_for if max_length is None else max_length
    lengths = np.asarray(context.length)
    row = int(lengths.argmax())
    total = int(lengths[row]) + max_new_tokens
    way_out = "" if max_length is not None else "; max_length = ... goes beyond it"
    if limit is None or limit > MAX_TOKENS:
        limit, way_out = MAX_TOKENS, ""
    if total > limit:
        raise ValueError(
            f"prompts[{row}] has {lengths[row]} tokens and max_new_tokens ="
            f" {shown(max_new_tokens)}: in all {shown(total)}, and the limit is {limit}{way_out}"
        )


def typed_key(key: Array) -> Array:
    """A typed key or array of keys, from typed keys or raw key data.

    Raises:
        ValueError: not a key.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    try:
        return jax.random.wrap_key_data(jnp.asarray(key))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"key must be a random key such as jax.random.key(0), got {shown(key)}"
        ) from None


def _row_keys(key: Array, batch: int) -> Array:
    """A key per row: `key` with the row's index folded in, or the keys that were given.

    Raises:
        ValueError: not a key, or a wrong number of keys.
    """
    key = typed_key(key)
    if key.shape == (batch,):
        return key
    if key.ndim:
        raise ValueError(
            f"key must be a single random key or one for each of {batch} rows, got an array of"
            f" shape {key.shape}"
        )
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
