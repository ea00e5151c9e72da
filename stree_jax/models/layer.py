"""A layer of a model: its config, which owns all that depends on the kind; the protocol of mixers.

A kind of layer is one file with a `LayerConfig`, decorated by `register`, and its mixer. The config
builds the mixer, makes its cache and pending record, and says how all of them are sharded. To all
other code they are opaque.

A cache has read every token but the last emitted one, which is the root of the next tree. A forward
pass over a tree does not write the tree to it: it returns a *pending* record, and replaying one
path of it advances the cache (activation replay, STree: Wu et al., 2025, arXiv:2505.14969,
section 3).
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels import DeferredRMSNorm
from stree_jax.array_types import Array, Bool, Int, Lengths
from stree_jax.checks import require
from stree_jax.mesh.partition import DATA, ROWS, Cut, Segments
from stree_jax.messages import shown
from stree_jax.tree import Tree

Config = TypeVar("Config", bound="type[LayerConfig]")


class NoCache(NamedTuple):
    """Cache and pending record of a layer without memory, such as an MLP."""


# By conv width: the rows of (conv state, node inputs) that a convolution reads, for all layers.
ConvGatherIndex = dict[int, Int[Array, "..."]]


class Path(NamedTuple):
    """A root-to-node path of a tree; the empty path replays nothing."""

    mask: Bool[Array, "B N"]
    parents: Int[Array, "B N"]
    last: Int[Array, " B"]  # the path's last node, -1 for the empty path


class Replay(NamedTuple):
    """A previous tree and its accepted path, along which a layer advances its cache."""

    pending: Any  # the layer's pending record of the previous tree
    path: Path  # the accepted path of that tree
    conv_gather_index: ConvGatherIndex  # `replay_gather_index(path.parents, path.last, K)`


class Nodes(NamedTuple):
    """The last Q nodes of a tree of N, and what a layer knows before them."""

    tree: Tree
    conv_gather_index: ConvGatherIndex
    cache: Any  # before the root; with `replay`, before that of the previous tree
    prefix_pending: Any = None  # the record of the first N - Q nodes
    replay: Replay | None = None  # comes first


@runtime_checkable
class Mixer(Protocol):
    """A layer of any kind. Its cache and its pending record are opaque to all other code.

    An attribute `shard` is set to a `Shard` on a mesh, over which it sums its outputs.
    """

    def __call__(
        self, u: Array, cache: Any, valid: Bool[Array, "B T"], lengths: Lengths
    ) -> tuple[Array, Any]:
        """Runs a right-padded sequence from `cache`; returns outputs and the cache after it."""

    def tree(self, u: Array, at: Nodes) -> tuple[Array | DeferredRMSNorm, Any, Any]:
        """Runs the last nodes of a tree, after replaying a path of the previous tree, if any.

        Returns outputs (a norm may be deferred to `add_rms_norm`), the pending record of all nodes,
        and the cache before the root.
        """

    def replay(self, cache: Any, along: Replay) -> Any:
        """The cache after a path."""


class Sizes(NamedTuple):
    """The sizes of a layer that must fit the number of shards, by name."""

    equal: dict[str, int]  # which the shards split equally
    shared: dict[str, int]  # numbers of units, of which neighbours may hold the same one


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The config of a layer, frozen and hashable; answers all that depends on its kind.

    A subclass is registered by `register`. A layer without memory of other tokens needs `build`
    alone. Arrays of caches and pending records have the batch axis first. A layer may join others,
    whose configs are fields of its own and whose mixers have the names of these fields.
    """

    kind: ClassVar[str]
    is_shared: ClassVar[bool] = False  # its output goes to the next layer's input, see `shared.py`
    # Whether outputs of packed models are equal to the bit in trees, batches and chunks, where XLA
    # chooses the order of no sum.
    equal_to_the_bit: ClassVar[bool] = False
    # On a mesh: fields that its shards split equally, and numbers of units of which neighbours may
    # hold the same one.
    equal_sizes: ClassVar[tuple[str, ...]] = ()
    shared_sizes: ClassVar[tuple[str, ...]] = ()
    norm_after = False  # its norm is that of its output (Olmo), not of its input
    norms_input: ClassVar[bool] = False  # its mixer's `tree` gets a `LayerInput` for an array

    @property
    def has_memory(self) -> bool:
        """True if a token depends on others: it has a cache."""
        return type(self).init_cache is not LayerConfig.init_cache

    def build(self, d_model: int, **options: Any) -> Any:
        """The mixer, with new weights; options are those of `layers.Made`."""
        raise NotImplementedError

    def check_next(self, below: "LayerConfig | None") -> None:
        """Refuses layers that it cannot stand before with ValueError; None: it is the last one."""

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> Any:
        """The cache before the first token, with room for `max_length` tokens: zeros."""
        return NoCache()

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Any:
        """The pending record of a tree that was never run, for replay along the empty path."""
        return NoCache()

    def cache_specs(self, axis: str | None) -> Any:
        """How the arrays of `init_cache` lie on a mesh: heads after the rows, or channels last."""
        arrays = jax.eval_shape(lambda: self.init_cache(1, 1, jnp.float32))
        cut = {4: PartitionSpec(DATA, axis), 3: PartitionSpec(DATA, None, axis)}
        return jax.tree.map(lambda array: cut.get(array.ndim, ROWS), arrays)

    def pending_specs(self, axis: str | None) -> Any:
        """How the arrays of `init_pending` lie on a mesh: heads or channels after the nodes."""
        arrays = jax.eval_shape(lambda: self.init_pending(1, 1, jnp.float32))
        return jax.tree.map(lambda _: PartitionSpec(DATA, None, axis), arrays)

    @classmethod
    def joined_kinds(cls) -> list[str]:
        """The kinds of the layers that it joins: its fields with the name and config of a kind."""
        return [
            field.name
            for field in dataclasses.fields(cls)
            if KINDS.get(field.name) in (field.type, *typing.get_args(field.type))
        ]

    @property
    def parts(self) -> "dict[str, LayerConfig]":
        """The configs of the layers that it joins, by field."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, LayerConfig)}

    @property
    def conv_widths(self) -> tuple[int, ...]:
        """Widths of its convolutions over tokens, whose windows the model computes once."""
        width = getattr(self, "conv_width", 0)
        of_parts = tuple(width for layer in self.parts.values() for width in layer.conv_widths)
        return ((width,) if width else ()) + of_parts

    def sizes(self, shards: int) -> Sizes:
        """The sizes that must fit this number of shards."""

        def by_name(fields: tuple[str, ...]) -> dict[str, int]:
            return {f"{self.kind}.{name}": getattr(self, name) for name in fields}

        sizes = Sizes(by_name(self.equal_sizes), by_name(self.shared_sizes))
        for layer in self.parts.values():
            sizes = Sizes(*map(operator.or_, sizes, layer.sizes(shards)))
        return sizes

    def local(self, shards: int) -> "LayerConfig":
        """The config of one of `shards` equal shards, which `sizes` fits."""
        shares: dict[str, Any] = {name: part.local(shards) for name, part in self.parts.items()}
        for name in (*self.equal_sizes, *self.shared_sizes):
            shares[name] = share(getattr(self, name), shards)
        return dataclasses.replace(self, **shares)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """The cut of each weight of the mixer, by name; the others are replicated."""
        table: dict[str, Cut] = {}
        for name, layer in self.parts.items():
            table |= within(name, layer.cuts(shards))
        return table


KINDS: dict[str, type[LayerConfig]] = {}  # that are registered


def register(kind: str | Any) -> Callable[[Config], Config]:
    """Makes a `LayerConfig` known by a name, which checkpoints store.

    Raises:
        ValueError: a name that is empty or no text, or that another class has; or no `LayerConfig`.
    """
    require(
        isinstance(kind, str) and bool(kind.strip()),
        f"the name of a layer kind is a text such as 'mamba2', got {shown(kind)}",
    )

    def decorated(cls: Any) -> Any:
        is_config = isinstance(cls, type) and issubclass(cls, LayerConfig)
        require(is_config, f"the layer kind {kind!r} must be a LayerConfig, got {shown(cls)}")
        known = KINDS.get(kind)
        if known is not None and (known.__module__, known.__name__) != (
            cls.__module__,
            cls.__name__,
        ):
            raise ValueError(f"the layer kind {kind!r} is {known.__name__}'s; choose another name")
        cls.kind = kind
        KINDS[kind] = cls
        return cls

    return decorated


def within(prefix: str, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts of a module's weights, named from outside."""
    return {f"{prefix}.{name}": cut for name, cut in cuts.items()}


def mixer_cuts(
    columns: Segments, rows: Segments, channels: Segments | None = None
) -> dict[str, Cut]:
    """The cuts of projections into a mixer and out of it, and of a convolution over channels."""
    table = {"in_proj.kernel": Cut(1, columns), "in_proj.bias": Cut(0, columns)}
    if channels is not None:
        table |= {"conv_weight": Cut(1, channels), "conv_bias": Cut(0, channels)}
    return table | {"out_proj.kernel": Cut(0, rows)}


def share(units: int, shards: int) -> int:
    """Units of one shard; at least one if there are any, which neighbours then share."""
    return 0 if units == 0 else max(1, units // shards)
