"""Settings per row of a batch: what rows must share, and the loop's arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax.decoding import filters, processor_rows
from stree_jax.decoding.filters import Filtering, filters_of
from stree_jax.decoding.processor_rows import Ruling, processors_of
from stree_jax.decoding.stop_tables import Stopping, stops_of
from stree_jax.decoding.types import Limits, Sampling
from stree_jax.decoding.verifiers import Verifier
from stree_jax.messages import shown


class Row(NamedTuple):
    """How a row is continued, checked; the default is of a row that decodes nothing.

    Attributes:
        max_new_tokens: most new tokens.
        end_tokens: end tokens, padded with -1.
        stopping: stops.
        temperature: 0 takes the best token.
        filtering: filters; a row at temperature 0 takes the best token, which no filter leaves out.
        ruling: logits processors, and least number of tokens.
        record_sampled: see `Sampling`.
    """

    max_new_tokens: int = 0
    end_tokens: Sequence[int] | np.ndarray = ()
    stopping: Stopping = Stopping()
    temperature: float = 0.0
    filtering: Filtering = Filtering()
    ruling: Ruling = Ruling()
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
    ends = np.full((len(rows), max(len(row.end_tokens) for row in rows)), -1, np.int32)
    for places, row in zip(ends, rows, strict=True):
        places[: len(row.end_tokens)] = row.end_tokens
    stops = None
    if stop_sizes is not None:
        machines = tuple(row.stopping.machine(vocab_size) for row in rows)
        stops = stops_of(machines, tuple(row.ruling.min_new_tokens for row in rows), stop_sizes)
    most = np.array([row.max_new_tokens for row in rows], np.int32)
    return Limits(jnp.asarray(most), jnp.asarray(ends), stops)


def sampling_of(rows: Sequence[Row], *, greedy: bool, may_differ: bool) -> Sampling:
    """The sampling settings of a batch.

    Args:
        rows: the rows, which `check_together` accepts.
        greedy: whether all have temperature 0.
        may_differ: whether some may have filters or processors and others none.
    """
    filtering = [Filtering() if row.is_greedy else row.filtering for row in rows]
    sampled = np.array([row.record_sampled for row in rows])
    return Sampling(
        jnp.asarray(np.array([row.temperature for row in rows], np.float32)),
        () if greedy else filters_of(filtering, may_differ=may_differ),
        processors_of([row.ruling for row in rows], may_differ=may_differ),
        temperature_is_zero=greedy,
        record_sampled=jnp.asarray(sampled) if sampled.any() else None,
    )


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
    own, rules = row.filtering.filters, row.ruling.processors
    for other in others:
        theirs = other.ruling.processors
        if rules and theirs and processor_rows.kind(rules) != processor_rows.kind(theirs):
            raise ValueError(
                f"processors = {shown(rules)}: {where} have {shown(theirs)}, and one program"
                " decodes all; give processors of the same classes, sizes, static fields and shared"
                f" arrays (the same objects) in one order, or none, or {apart}"
            )
        filters_there = other.filtering.filters
        if own and filters_there and filters.kind(own) != filters.kind(filters_there):
            raise ValueError(
                f"filters = {shown(own)}: {where} have {shown(filters_there)}, and one program"
                " decodes all; give filters of the same classes and static fields in one order, or"
                f" none, or {apart}"
            )
    if all(other.is_greedy == row.is_greedy for other in others):
        return
    if not getattr(rule, "follows_target", False):
        raise ValueError(
            f"temperature = {row.temperature}: verifier {rule.name!r} cannot decode temperature 0"
            f" and others together; use 'target_only', or {apart}"
        )
