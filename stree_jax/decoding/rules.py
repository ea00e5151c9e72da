"""Rules about the next token, and those of a batch: one object has the numbers of all rows.

Filters are rules without a state, after temperature; logits processors come before it.
"""

import abc
import dataclasses
import inspect
import itertools
import numbers
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.decoding.prompts import Context
from stree_jax.mesh.partition import ROWS
from stree_jax.messages import shown

_Rule = typing.TypeVar("_Rule")


@typing.dataclass_transform(frozen_default=True)
def rule(cls: type[_Rule]) -> type[_Rule]:
    """Makes a frozen dataclass and pytree of a class; a `__repr__` of its own stays."""
    # Types are not checked: jax makes objects with leaves that are specs, placeholders or None.
    frozen = dataclasses.dataclass(frozen=True, repr=cls.__repr__ is object.__repr__)(cls)
    return typing.no_type_check(jax.tree_util.register_dataclass(frozen))


class Rule(abc.ABC):
    """Changes the logits of the next token: the base of filters and logits processors.

    A rule is a frozen dataclass, registered with `jax.tree_util.register_dataclass`. Its fields are
    numbers, arrays, or static (`dataclasses.field(metadata={"static": True})`). In the decode loop
    every number has an entry for each row, `[B]`, and every array an axis of rows in front:
    `per_row` aligns them with logits. An array in a field with `metadata={"shared": True}`, such as
    a table, is one for all rows, and stays as it is.

    `generate(processors=...)` applies rules before temperature. They may depend on the text so far,
    by a state: a pytree of arrays with the batch axis first. `generate(filters=...)` applies rules
    without a state after temperature, to the target and to drafts. Methods other than `check` are
    traced.

    Attributes:
        end_tokens: tokens that end a row, beside those of the model; static.
    """

    end_tokens: tuple[int, ...] = ()

    def check(self, vocab_size: int) -> None:
        """Refuses a vocabulary that it does not fit.

        Raises:
            ValueError: ids or tables of another size.
        """
        return None

    def init(self, context: Context, vocab_size: int) -> Any:
        """The state of each row after its text so far; without a state None.

        Args:
            context: the prompts. All of a prompt is read, its last token included.
            vocab_size: number of tokens, V.
        """
        return None

    def advance(self, state: Any, tokens: Int[Array, "B Q"]) -> Any:
        """The states after one more token each; without a state None.

        Args:
            state: states of Q nodes of each row: arrays `[B, Q, ...]`.
            tokens: a token for each. The token of a node that does not exist may be any number.
        """
        return None

    @abc.abstractmethod
    def apply(self, logits: Float[Array, "B *rows V"], state: Any, /) -> Float[Array, "B *rows V"]:
        """The logits after the rule, with `-inf` for tokens that it rules out.

        Args:
            logits: of a processor, logits `[B, Q, V]` of the target or a draft model; of a filter,
                logits after temperature and the filters before it, whose best one is 0 and must
                be kept. A row that has no token left fails.
            state: the states at these nodes, as for `advance`; None without a state.
        """

    def __call__(self, logits: Float[Array, "B *rows V"], state: Any = None, /) -> Any:
        """As `apply`."""
        return self.apply(logits, state)

    @property
    def has_state(self) -> bool:
        """True if it depends on the text."""
        return type(self).init is not Rule.init


@rule
class Stateless(Rule):
    """A rule of a function, see `stateless`."""

    function: Any

    def __repr__(self) -> str:
        return repr(self.function)

    def apply(self, logits, state, /):
        return self.function(logits)


def stateless(function: Callable[[Array], Array]) -> Rule:
    """Returns a rule that changes logits by a function of logits alone.

    Args:
        function: logits `[B, ..., V]` to logits. A callable object with fields is a frozen
            dataclass, as a `Rule` is. A plain function is static: each compiles its own program.
    """
    is_plain = inspect.isroutine(function)
    return Stateless(jax.tree_util.Partial(function) if is_plain else function)


@rule
class ForRows(Rule):
    """A rule of some rows."""

    rule: Rule
    used: Bool[Array, " B"]  # the rows that it is for

    def init(self, context: Context, vocab_size: int) -> Any:
        return self.rule.init(context, vocab_size)

    def advance(self, state: Any, tokens: Array) -> Any:
        return self.rule.advance(state, tokens)

    def apply(self, logits: Array, state: Any, /) -> Array:
        return jnp.where(per_row(self.used, logits), self.rule(logits, state), logits)


def per_row(values: Any, logits: Array) -> Array:
    """An array `[B]`, or `[B, Q]`, with axes of size 1, so that it broadcasts against another."""
    values = jnp.asarray(values)
    return values.reshape(values.shape + (1,) * (logits.ndim - values.ndim))


def is_given(value: object) -> bool:
    """True if a user gave a field this value, so that it can be checked.

    jax makes rules again with arrays, specs, placeholders and None in their fields.
    (`checked_rules` refuses None.)
    """
    kind = type(value)
    return issubclass(kind, numbers.Number | np.generic) or (
        kind.__module__ == "builtins" and kind not in (object, type(None))
    )


def checked_rules(rules: object, name: str, example: str) -> tuple[Rule, ...]:
    """The `filters`, or `processors`, that a user gave for a text; refuses invalid ones."""
    if not isinstance(rules, list | tuple):
        raise ValueError(f"{name} must be a list such as [{example}], got {shown(rules)}")
    is_filter, checked = name == "filters", []
    for one in rules:
        may_be_rule = not isinstance(one, type) and callable(one)
        if not may_be_rule or not (is_filter or isinstance(one, Rule)):
            raise ValueError(
                f"{name} must be {example.split('(')[0]}(...) or other objects that are a st.Rule"
                f"{', or functions of logits' if is_filter else ''}, got {shown(one)}"
            )
        checked.append(one if isinstance(one, Rule) else stateless(one))
        if is_filter and checked[-1].has_state:
            raise ValueError(
                f"the filter {shown(one)} has a state: give it to processors, which are applied"
                " before temperature"
            )
        leaves = jax.tree.leaves(checked[-1], is_leaf=lambda leaf: leaf is None)
        numeric = all(isinstance(leaf, numbers.Real | np.ndarray | jax.Array) for leaf in leaves)
        if not numeric or len(_is_shared(checked[-1])) != len(leaves):
            raise ValueError(
                f"{name.removesuffix('s')} {shown(one)} must be a pytree of numbers and arrays;"
                " make its class a frozen dataclass, and register it with"
                " jax.tree_util.register_dataclass"
            )
    return tuple(checked)


def of_rows(rows: Sequence[Sequence[Any]], *, may_differ: bool) -> tuple[Any, ...]:
    """The rules of rows of one `kind`; `may_differ`: some may have none where others have rules."""
    example = next((rules for rules in rows if rules), ())
    places = zip(*(rules or example for rules in rows), strict=True)
    of_all = [of_batch(rules) for rules in places]
    if not may_differ:
        return tuple(of_all)
    used = jnp.asarray([bool(rules) for rules in rows])
    return tuple(ForRows(rule, used) for rule in of_all)


def kind(rules: Sequence[Any]) -> Any:
    """The key that the rules of a batch share: classes, static fields, shapes, shared arrays."""
    leaves, structure = jax.tree.flatten(tuple(rules))
    parts = zip(leaves, _is_shared(tuple(rules)), strict=True)
    shapes = [id(leaf) if shared else np.shape(leaf) for leaf, shared in parts]
    return structure, classes_of(tuple(rules)), shapes


def classes_of(tree: Any) -> tuple[type, ...]:
    """The classes of a tree's nodes, for a key by which filters and processors are told apart.

    To jax 0.10.2 two dataclasses of `register_dataclass` with equal fields have equal structures of
    different hashes, so `jax.jit` takes one for the other if their hashes share a bucket: for 1.7 %
    of such pairs it ran the other's program. Every program that gets such classes gets this too.
    """

    def classes(structure: Any) -> Iterator[type]:
        if (node := structure.node_data()) is not None:
            yield node[0]
        for child in structure.children():
            yield from classes(child)

    return tuple(classes(jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)))


def of_batch(rows: Sequence[Any]) -> Any:
    """One rule of all rows, which are of one `kind`: numbers get an axis of rows in front."""
    structure = jax.tree.structure(rows[0])
    parts = zip(*map(jax.tree.leaves, rows), strict=True)
    leaves = [
        jnp.asarray(part[0]) if shared else join_numbers(*part)
        for part, shared in zip(parts, _is_shared(rows[0]), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


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


def map_rows(
    rules: Any, of_rows: Callable[[Any], Any], of_shared: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Maps the arrays of joined rules: those with an axis of rows, and those of all rows."""
    leaves, structure = jax.tree.flatten(rules)
    parts = zip(leaves, _is_shared(rules), strict=True)
    new = [of_shared(leaf) if shared else of_rows(leaf) for leaf, shared in parts]
    return jax.tree.unflatten(structure, new)


def rule_specs(rules: Any) -> Any:
    """The mesh specs of joined rules: shared arrays are on every device."""
    return map_rows(rules, lambda leaf: ROWS, lambda leaf: PartitionSpec())


def _is_shared(node: Any, shared: bool = False) -> list[bool]:
    """True if all rows share an array, for each leaf of a rule."""
    if not dataclasses.is_dataclass(node):
        parts = jax.tree.leaves(node, is_leaf=dataclasses.is_dataclass)
        nested = [_is_shared(p, shared) if dataclasses.is_dataclass(p) else [shared] for p in parts]
        return [*itertools.chain(*nested)]
    flags = []
    for field in dataclasses.fields(node):
        if not field.metadata.get("static", False):
            is_shared = shared or field.metadata.get("shared", False)
            flags += _is_shared(getattr(node, field.name), is_shared)
    return flags
