"""Settings per row of a batch: what rows must share, and the loop's arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.filters import Filter, MinP, TopK, TopP
from stree_jax.decoding.processors import LogitsProcessor
from stree_jax.decoding.rule_rows import join_numbers, joined, kind, of_rows
from stree_jax.decoding.stops import Stopping, stops_of
from stree_jax.decoding.token_rules import MinNewTokens
from stree_jax.decoding.types import Limits, Sampling
from stree_jax.decoding.verifiers import Verifier
from stree_jax.messages import shown


class Row(NamedTuple):
    """How a row is continued, checked; the default is of a row that decodes nothing.

    Attributes:
        max_new_tokens: most new tokens.
        min_new_tokens: how many tokens come before an end token.
        end_tokens: end tokens, padded with -1.
        stopping: stops.
        temperature: 0 takes the best token.
        top_k, top_p, min_p, filters: filters; a row at temperature 0 takes the best token, which no
            filter leaves out.
        processors: logits processors.
        record_sampled: see `Sampling`.
    """

    max_new_tokens: int = 0
    min_new_tokens: int = 0
    end_tokens: Sequence[int] | np.ndarray = ()
    stopping: Stopping = Stopping()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters: tuple[Filter, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()
    record_sampled: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether its temperature is 0."""
        return self.temperature == 0


def limits_of(rows: Sequence[Row], vocab_size: int, stop_sizes: tuple[int, int] | None) -> Limits:
    """The limits of a batch.

    Args:
        rows: the rows.
        vocab_size: the number of tokens, V.
        stop_sizes: least sizes of the automata of stops; None: no row has stops.
    """
    stops = None
    if stop_sizes is not None:
        machines = tuple(row.stopping.machine(vocab_size) for row in rows)
        stops = stops_of(machines, tuple(row.min_new_tokens for row in rows), stop_sizes)
    most = np.array([row.max_new_tokens for row in rows], np.int32)
    return Limits(jnp.asarray(most), _end_tokens(rows), stops)


def _end_tokens(rows: Sequence[Row]) -> Any:
    """The end tokens of each row `[B, Y]`, padded with -1."""
    ends = np.full((len(rows), max(len(row.end_tokens) for row in rows)), -1, np.int32)
    for places, row in zip(ends, rows, strict=True):
        places[: len(row.end_tokens)] = row.end_tokens
    return jnp.asarray(ends)


def sampling_of(rows: Sequence[Row], *, greedy: bool, may_differ: bool) -> Sampling:
    """The sampling settings of a batch.

    Args:
        rows: the rows, which `check_together` accepts.
        greedy: whether all have temperature 0.
        may_differ: whether some may have filters or processors and others none.
    """
    sampled = np.array([row.record_sampled for row in rows])
    filtered = [Row() if row.is_greedy else row for row in rows]
    return Sampling(
        jnp.asarray(np.array([row.temperature for row in rows], np.float32)),
        filters_of(filtered, may_differ=may_differ),
        processors_of(rows, may_differ=may_differ),
        temperature_is_zero=greedy,
        record_sampled=jnp.asarray(sampled) if sampled.any() else None,
    )


def filters_of(rows: Sequence[Row], *, may_differ: bool = False) -> tuple[Filter, ...]:
    """The filters of a batch: top-k and top-p if a row has either, min-p, then the rows' own."""
    found: list[Any] = []
    if any(row.top_k > 0 or row.top_p < 1 for row in rows):
        found += [joined([TopK(row.top_k) for row in rows])]
        found += [joined([TopP(row.top_p) for row in rows])]
    if any(row.min_p > 0 for row in rows):
        found += [joined([MinP(row.min_p) for row in rows])]
    return (*found, *of_rows([row.filters for row in rows], may_differ=may_differ))


def processors_of(rows: Sequence[Row], *, may_differ: bool = False) -> tuple[Any, ...]:
    """The processors of a batch: that for `min_new_tokens`, then the rows' own.

    Where rows may differ, `MinNewTokens` is there whenever a row has processors, so that the others
    keep their places.
    """
    own = of_rows([row.processors for row in rows], may_differ=may_differ)
    if not (any(row.min_new_tokens for row in rows) or (may_differ and own)):
        return own
    least = join_numbers(*(row.min_new_tokens for row in rows))
    return (MinNewTokens(least, _end_tokens(rows)), *own)


def check_together(row: Row, others: Sequence[Row], rule: Verifier, where: str, apart: str) -> None:
    """Refuses a row that one program cannot decode beside others.

    Args:
        row: the row.
        others: the others.
        rule: the verifier above temperature 0.
        where: what the others are called in messages.
        apart: the way out.

    Raises:
        ValueError: filters or processors of other kinds, or temperature 0 and others where the
            verifier cannot decode both.
    """
    same = {
        "processors": "classes, sizes, static fields and shared arrays (the same objects)",
        "filters": "classes and static fields",
    }
    for name, shared in same.items():
        own = getattr(row, name)
        for other in others:
            theirs = getattr(other, name)
            if own and theirs and kind(own) != kind(theirs):
                raise ValueError(
                    f"{name} = {shown(own)}: {where} have {shown(theirs)}, and one program decodes"
                    f" all; give {name} of the same {shared} in one order, or none, or {apart}"
                )
    if all(other.is_greedy == row.is_greedy for other in others):
        return
    if not getattr(rule, "follows_target", False):
        raise ValueError(
            f"temperature = {row.temperature}: verifier {rule.name!r} cannot decode temperature 0"
            f" and others together; use 'target_only', or {apart}"
        )
