"""Logits processors of a batch: one processor with the numbers of all rows."""

import dataclasses
import itertools
import numbers
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stree_jax.array_types import Array, Bool
from stree_jax.decoding.context import Context
from stree_jax.decoding.filters import classes_of, join_numbers, per_row
from stree_jax.decoding.processors import LogitsProcessor
from stree_jax.decoding.token_rules import MinNewTokens
from stree_jax.mesh.partition import ROWS
from stree_jax.messages import shown


@typing.no_type_check  # on a mesh jax unflattens it with specs
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForRows:
    """A processor of some rows.

    Attributes:
        processor: the processor.
        used: the rows that it is for.
    """

    processor: Any
    used: Bool[Array, " B"]

    def init(self, context: Context, vocab_size: int) -> Any:
        """See `LogitsProcessor`."""
        return self.processor.init(context, vocab_size)

    def advance(self, state: Any, tokens: Array) -> Any:
        """See `LogitsProcessor`."""
        return self.processor.advance(state, tokens)

    def __call__(self, logits: Array, state: Any, /) -> Array:
        """See `LogitsProcessor`."""
        return jnp.where(per_row(self.used, logits), self.processor(logits, state), logits)


class Ruling(NamedTuple):
    """The logits processors and end tokens of a row.

    Attributes:
        processors: its processors.
        min_new_tokens: how many tokens come before an end token.
        end_tokens: the end tokens, padded with -1.
    """

    processors: tuple[LogitsProcessor, ...] = ()
    min_new_tokens: int = 0
    end_tokens: Sequence[int] | np.ndarray = ()


def processors_of(rows: Sequence[Ruling], *, may_differ: bool = False) -> tuple[Any, ...]:
    """The processors of a batch: those for `min_new_tokens`, then the rows' own.

    Args:
        rows: rows have no processors, or processors of one `kind`.
        may_differ: whether some rows may have processors of their own and others none. Then that
            for `min_new_tokens` is there if a row has anything, so that its state is always first.
    """
    own = next((row.processors for row in rows if row.processors), ())
    found: list[Any] = []
    if any(row.min_new_tokens for row in rows) or (may_differ and own):
        width = max(len(row.end_tokens) for row in rows)
        ends = [[*row.end_tokens, *[-1] * (width - len(row.end_tokens))] for row in rows]
        least = [row.min_new_tokens for row in rows]
        found.append(MinNewTokens(join_numbers(*least), jnp.asarray(ends, jnp.int32)))
    of_all = [joined(each) for each in zip(*(row.processors or own for row in rows), strict=True)]
    used = jnp.asarray([bool(row.processors) for row in rows])
    return (*found, *(ForRows(one, used) if may_differ else one for one in of_all))


def check_processors(processors: object, vocab_size: int | None = None) -> None:
    """Refuses invalid processors of a text.

    Raises:
        ValueError: not a list of processors, one that is no pytree of numbers and arrays, or one
            for another vocabulary.
    """
    if not isinstance(processors, list | tuple):
        raise ValueError(
            "processors must be a list such as [st.RepetitionPenalty(1.2)], got"
            f" {shown(processors)}"
        )
    for one in processors:
        if isinstance(one, type) or not isinstance(one, LogitsProcessor):
            raise ValueError(
                "processors must be st.RepetitionPenalty(...) or other objects with the methods of"
                f" st.LogitsProcessor, got {shown(one)}"
            )
        leaves = jax.tree.leaves(one, is_leaf=lambda leaf: leaf is None)
        numeric = all(isinstance(leaf, numbers.Real | np.ndarray | jax.Array) for leaf in leaves)
        if not numeric or len(_is_shared(one)) != len(leaves):
            raise ValueError(
                f"processor {shown(one)} must be a pytree of numbers and arrays; make its class a"
                " frozen dataclass, and register it with jax.tree_util.register_dataclass"
            )
        check = getattr(one, "check", None)
        if vocab_size is not None and callable(check):
            check(vocab_size)


def ends_of(processors: Sequence[LogitsProcessor], vocab_size: int) -> list[int]:
    """The tokens of a vocabulary by which processors let a text end."""
    found = [token for one in processors for token in getattr(one, "end_tokens", ())]
    return [token for token in found if token < vocab_size]


def kind(processors: Sequence[LogitsProcessor]) -> Any:
    """The key that the processors of a batch share."""
    leaves, structure = jax.tree.flatten(tuple(processors))
    parts = zip(leaves, _is_shared(tuple(processors)), strict=True)
    shapes = [id(leaf) if shared else np.shape(leaf) for leaf, shared in parts]
    return structure, classes_of(tuple(processors)), shapes


def joined(rows: Sequence[Any]) -> Any:
    """One processor of all rows, which are of one `kind`: numbers get an axis of rows in front."""
    structure = jax.tree.structure(rows[0])
    parts = zip(*map(jax.tree.leaves, rows), strict=True)
    leaves = [
        jnp.asarray(part[0]) if shared else join_numbers(*part)
        for part, shared in zip(parts, _is_shared(rows[0]), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def map_rows(
    processors: Any,
    of_rows: Callable[[Any], Any],
    of_shared: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Maps the arrays of joined processors: those with an axis of rows, and those of all rows."""
    leaves, structure = jax.tree.flatten(processors)
    parts = zip(leaves, _is_shared(processors), strict=True)
    new = [of_shared(leaf) if shared else of_rows(leaf) for leaf, shared in parts]
    return jax.tree.unflatten(structure, new)


def processor_specs(processors: Any) -> Any:
    """The mesh specs of joined processors: shared arrays are on every device."""
    return map_rows(processors, lambda leaf: ROWS, lambda leaf: PartitionSpec())


def _is_shared(node: Any, shared: bool = False) -> list[bool]:
    """Whether all rows share an array, for each leaf of a processor."""
    if not dataclasses.is_dataclass(node):
        parts = jax.tree.leaves(node, is_leaf=dataclasses.is_dataclass)
        nested = [_is_shared(p, shared) if dataclasses.is_dataclass(p) else [shared] for p in parts]
        return [*itertools.chain(*nested)]
    flags = []
    for field in dataclasses.fields(node):
        if not field.metadata.get("static", False):
            own = shared or field.metadata.get("shared", False)
            flags += _is_shared(getattr(node, field.name), own)
    return flags
