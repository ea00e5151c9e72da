"""Filters: which tokens may be sampled. Draft and target go through the same ones."""

import dataclasses
import numbers
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import largest_threshold
from stree_jax.array_types import Array, Bool, Float32
from stree_jax.checks import check_int, is_number
from stree_jax.messages import shown


@runtime_checkable
class Filter(Protocol):
    """Rules tokens out before sampling; `generate(filters=...)` takes a tuple of them.

    A filter is a frozen dataclass, registered with `jax.tree_util.register_dataclass`. Its fields
    are numbers, or static (`dataclasses.field(metadata={"static": True})`). In the decode loop
    every number is an array with an entry per row, `[B]`: `per_row` aligns it with logits.
    """

    def __call__(self, logits: Float32[Array, "B *rows V"], /) -> Float32[Array, "B *rows V"]:
        """The logits, with `-inf` for tokens that are left out.

        Args:
            logits: logits after temperature and the filters before this one; the best one is 0,
                and must be kept.
        """
        ...


def per_row(values: Any, logits: Array) -> Array:
    """An array `[B]` with axes of size 1, so that it broadcasts against logits `[B, *rows, V]`."""
    values = jnp.asarray(values)
    return values.reshape(values.shape + (1,) * (logits.ndim - values.ndim))


def is_given(value: object) -> bool:
    """Whether a user gave a field this value, so that it can be checked.

    jax makes filters and processors again with arrays, specs, placeholders and None in their
    fields. (`check_filters` and `check_processors` refuse None.)
    """
    kind = type(value)
    return issubclass(kind, numbers.Number | np.generic) or (
        kind.__module__ == "builtins" and kind not in (object, type(None))
    )


@typing.no_type_check  # jax unflattens it with leaves that are not numbers
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the k best tokens, and those that tie with the last of them.

    Attributes:
        k: 0 keeps all tokens.
    """

    k: int

    def __post_init__(self):
        if is_given(self.k):
            check_top_k(self.k)

    def __call__(self, logits, /):
        """See `Filter`."""
        k = per_row(self.k, logits)
        return lax.cond((k > 0).any(), lambda: _best_k(logits, k), lambda: logits)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of tokens with probability p, and those that tie with its last one.

    Probabilities are those after the filters before this one.

    Attributes:
        p: 1 keeps all tokens.
    """

    p: float

    def __post_init__(self):
        if is_given(self.p):
            check_top_p(self.p)

    def __call__(self, logits, /):
        """See `Filter`."""
        p = per_row(self.p, logits)
        # The set is the tokens above a threshold, whose weight falls as the threshold rises. The
        # best token's weight is 1.
        weights = jnp.where(jnp.isfinite(logits), jnp.exp(logits), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        # Rows that keep all tokens have nothing to search for.
        least = jnp.where(p >= 1, jnp.inf, p * total)
        threshold = largest_threshold(weights, weights, least)
        kept = (p >= 1) | (weights >= jnp.fmin(threshold, 1.0))
        return jnp.where(kept, logits, -jnp.inf)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MinP:
    """Keeps tokens at least p times as probable as the best one (Nguyen et al., 2024).

    Attributes:
        p: 0 keeps all tokens, 1 the best one.
    """

    p: float

    def __post_init__(self):
        if is_given(self.p):
            check_min_p(self.p)

    def __call__(self, logits, /):
        """See `Filter`."""
        return jnp.where(jnp.exp(logits) >= per_row(self.p, logits), logits, -jnp.inf)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForRows:
    """A filter of some rows.

    Attributes:
        filter: the filter.
        used: the rows that it is for.
    """

    filter: Filter
    used: Bool[Array, " B"]

    def __call__(self, logits, /):
        """See `Filter`."""
        return jnp.where(per_row(self.used, logits), self.filter(logits), logits)


def check_top_k(k: Any) -> None:
    """Refuses an invalid `TopK.k`."""
    check_int("top_k", k, 0)


def check_top_p(p: Any) -> None:
    """Refuses an invalid `TopP.p`."""
    if not (is_number(p) and 0 < p <= 1):
        raise ValueError(f"top_p must be in (0, 1], got {shown(p)}")


def check_min_p(p: Any) -> None:
    """Refuses an invalid `MinP.p`."""
    if not (is_number(p) and 0 <= p <= 1):
        raise ValueError(f"min_p must be from 0 to 1, got {shown(p)}")


def check_filters(filters: object) -> None:
    """Refuses invalid filters of a text.

    Raises:
        ValueError: not a list of filters, or one that is no pytree of numbers.
    """
    if not isinstance(filters, list | tuple):
        raise ValueError(f"filters must be a list such as [st.TopK(8)], got {shown(filters)}")
    for one in filters:
        if isinstance(one, type) or not callable(one):
            raise ValueError(
                "filters must be st.TopK(...), st.TopP(...) or other objects with the method of"
                f" st.Filter, got {shown(one)}"
            )
        for leaf in jax.tree.leaves(one, is_leaf=lambda leaf: leaf is None):
            if not isinstance(leaf, numbers.Real | np.ndarray | jax.Array):
                raise ValueError(
                    f"filter {shown(one)} must be a pytree of numbers; make its class a frozen"
                    " dataclass, and register it with jax.tree_util.register_dataclass"
                )


class Filtering(NamedTuple):
    """The filters of a row; the defaults filter nothing."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filters: tuple[Filter, ...] = ()


def filters_of(rows: Sequence[Filtering], *, may_differ: bool = False) -> tuple[Filter, ...]:
    """The filters of a batch: top-k and top-p if a row has either, min-p, then the rows' own.

    Args:
        rows: rows have no filters of their own, or filters of one `kind`.
        may_differ: whether some rows may have filters of their own and others none.
    """
    found: list[Any] = []
    if any(row.top_k > 0 or row.top_p < 1 for row in rows):
        found += [_joined([TopK(row.top_k) for row in rows])]
        found += [_joined([TopP(row.top_p) for row in rows])]
    if any(row.min_p > 0 for row in rows):
        found += [_joined([MinP(row.min_p) for row in rows])]
    own = next((row.filters for row in rows if row.filters), ())
    of_all = [_joined(each) for each in zip(*(row.filters or own for row in rows), strict=True)]
    used = jnp.asarray([bool(row.filters) for row in rows])
    return (*found, *(ForRows(one, used) if may_differ else one for one in of_all))


def kind(filters: tuple[Filter, ...]) -> Any:
    """The key that the filters of a batch share: types, static fields and shapes."""
    leaves, structure = jax.tree.flatten(filters)
    return structure, classes_of(filters), [np.shape(leaf) for leaf in leaves]


def classes_of(tree: Any) -> tuple[type, ...]:
    """The classes of a tree's nodes, for a key by which filters and processors are told apart.

    To jax 0.10.2 two dataclasses of `register_dataclass` with equal fields have equal structures of
    different hashes, so `jax.jit` takes one for the other if their hashes share a bucket: for 1.7 %
    of such pairs it ran the other's program. Every program that gets such classes gets this too.
    """

    def found(structure: Any) -> Iterator[type]:
        if (node := structure.node_data()) is not None:
            yield node[0]
        for child in structure.children():
            yield from found(child)

    return tuple(found(jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)))


def _joined(filters: list[Any] | tuple[Any, ...]) -> Any:
    """One filter of all rows: each number has an axis of rows in front."""
    return jax.tree.map(join_numbers, *filters)


def join_numbers(*rows: Any) -> Array:
    """A number, or array, of each row as one array with an axis of rows in front."""
    values = np.stack([np.asarray(row) for row in rows])
    if values.dtype in (np.bool_, np.uint32):  # uint32: sets of bits
        return jnp.asarray(values)
    is_integral = values.dtype == object and all(
        isinstance(value, numbers.Integral) for value in values.flat
    )
    if is_integral or np.issubdtype(values.dtype, np.integer):
        most = np.iinfo(np.int32).max
        return jnp.asarray(np.clip(values, -most, most).astype(np.int32))
    return jnp.asarray(values.astype(np.float32))


def _best_k(logits: Array, k: Array) -> Array:
    below = jnp.abs(logits)  # the best is 0
    num_tokens = logits.shape[-1]
    # At the worst token kept, and from there on, are all tokens but k - 1 or fewer.
    least = num_tokens - jnp.minimum(k, num_tokens) + 1
    threshold = largest_threshold(below, None, least.astype(jnp.float32))
    return jnp.where((k <= 0) | (below <= threshold), logits, -jnp.inf)
