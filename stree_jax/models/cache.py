"""Caches, pending records and paths, and the functions that own their shapes.

A cache has read every token but the last emitted one, which is the root of the next tree. A forward
pass over a tree does not write the tree to the cache. It returns a *pending* record, and replaying
one path of it advances the cache (activation replay, STree: Wu et al., 2025,
arXiv:2505.14969, section 3).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels import KVCache, Mamba2Pending, NodeKV
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.config import ModelConfig
from stree_jax.layer_config import AttentionConfig, Mamba2Config
from stree_jax.models.layouts import mamba2_layout
from stree_jax.partition import DATA, ROWS
from stree_jax.tree import Tree


class Mamba2Cache(NamedTuple):
    """Cache of a Mamba-2 layer: the tokens before the root."""

    ssm: Float32[Array, "B H P S"]
    conv: Float[Array, "B J C"]  # the last J = K - 1 conv inputs, oldest first


class AttentionCache(NamedTuple):
    """Cache of an attention layer: the tokens before the root."""

    kv: KVCache
    conv: Float[Array, "B J C"] | None  # as Mamba-2's; None if there is no convolution


class AttentionPending(NamedTuple):
    """Pending record of an attention layer: it can advance along any path of a tree of N nodes."""

    kv: NodeKV
    conv_input: Float[Array, "B N C"] | None


class ParallelCache(NamedTuple):
    """Cache of a layer with Mamba-2 and attention in parallel."""

    mamba2: Mamba2Cache
    attention: AttentionCache


class ParallelPending(NamedTuple):
    """Pending record of a layer with Mamba-2 and attention in parallel."""

    mamba2: Mamba2Pending
    attention: AttentionPending


class NoCache(NamedTuple):
    """Cache and pending record of a layer without memory, such as an MLP."""


# One entry per layer.
LayerCache = Mamba2Cache | AttentionCache | ParallelCache | NoCache
LayerPending = Mamba2Pending | AttentionPending | ParallelPending | NoCache
Cache = tuple[LayerCache, ...]
Pending = tuple[LayerPending, ...]


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


def empty_path(batch: int, num_nodes: int) -> Path:
    """The path that replays nothing, of a tree of `num_nodes` nodes."""
    none = jnp.full(batch, -1, jnp.int32)
    return Path(jnp.zeros((batch, num_nodes), bool), jnp.tile(none[:, None], num_nodes), none)


def path_to(tree: Tree, last: Int[Array, " B"]) -> Path:
    """The path from the root to node `last`, -1 for the empty path."""
    row = jnp.take_along_axis(tree.ancestor_mask, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return Path(row & (last >= 0)[:, None], tree.parents, last)


def conv_widths(config: ModelConfig) -> tuple[int, ...]:
    """The conv widths that occur in a model."""
    widths = set()
    if config.mamba2 is not None:
        widths.add(config.mamba2.conv_width)
    if config.attention is not None and config.attention.conv_width:
        widths.add(config.attention.conv_width)
    return tuple(sorted(widths))


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike) -> Cache:
    """The cache before the first token: zeros.

    Args:
        config: the model's config.
        batch: number of rows.
        max_length: capacity of attention caches; Mamba-2 caches have one size for all lengths.
        dtype: dtype of the weights.
    """

    def mamba2(m: Mamba2Config) -> Mamba2Cache:
        return Mamba2Cache(
            ssm=jnp.zeros((batch, m.num_heads, m.head_dim, m.state_size), jnp.float32),
            conv=jnp.zeros((batch, m.conv_width - 1, mamba2_layout(m).num_channels), dtype),
        )

    def attention(a: AttentionConfig) -> AttentionCache:
        shape = (batch, a.num_kv_heads, max_length, a.head_dim)
        conv = (batch, a.conv_width - 1, sum(a.projected_sizes))
        lengths = jnp.zeros(batch, jnp.int32)
        return AttentionCache(
            kv=KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), lengths),
            conv=jnp.zeros(conv, dtype) if a.conv_width else None,
        )

    return _by_kind(config, mamba2, attention, ParallelCache)


def cache_specs(config: ModelConfig, axis: str | None) -> tuple[Any, ...]:
    """How the arrays of `init_cache` lie on a mesh; heads and channels along `axis`."""
    by_row: Any = ROWS  # specs instead of arrays
    by_head: Any = PartitionSpec(DATA, axis)
    by_channel: Any = PartitionSpec(DATA, None, axis)
    return _by_kind(
        config,
        lambda m: Mamba2Cache(ssm=by_head, conv=by_channel),
        lambda a: AttentionCache(
            kv=KVCache(by_head, by_head, by_row), conv=by_channel if a.conv_width else None
        ),
        ParallelCache,
    )


def init_pending(config: ModelConfig, batch: int, num_nodes: int, dtype: DTypeLike) -> Pending:
    """The pending record of a tree that was never run, for replay along the empty path.

    Args:
        config: the model's config.
        batch: number of rows.
        num_nodes: nodes of the tree.
        dtype: dtype of the weights.
    """

    def zeros(*shape: int, dtype: DTypeLike = dtype) -> Array:
        return jnp.zeros((batch, num_nodes, *shape), dtype)

    def mamba2(m: Mamba2Config) -> Mamba2Pending:
        return Mamba2Pending(
            x=zeros(m.num_heads, m.head_dim),
            dt=zeros(m.num_heads, dtype=jnp.float32),
            B=zeros(m.num_groups, m.state_size),
            conv_input=zeros(mamba2_layout(m).num_channels),
        )

    def attention(a: AttentionConfig) -> AttentionPending:
        shape = (a.num_kv_heads, a.head_dim)
        return AttentionPending(
            kv=NodeKV(zeros(*shape), zeros(*shape)),
            conv_input=zeros(sum(a.projected_sizes)) if a.conv_width else None,
        )

    return _by_kind(config, mamba2, attention, ParallelPending)


def pending_specs(config: ModelConfig, axis: str | None) -> tuple[Any, ...]:
    """How the arrays of `init_pending` lie on a mesh; heads and channels along `axis`."""
    spec: Any = PartitionSpec(DATA, None, axis)
    return _by_kind(
        config,
        lambda m: Mamba2Pending(x=spec, dt=spec, B=spec, conv_input=spec),
        lambda a: AttentionPending(
            kv=NodeKV(spec, spec), conv_input=spec if a.conv_width else None
        ),
        ParallelPending,
    )


def _by_kind(
    config: ModelConfig,
    mamba2: Callable[[Mamba2Config], Any],
    attention: Callable[[AttentionConfig], Any],
    parallel: Callable[[Any, Any], Any],
) -> tuple[Any, ...]:
    """One entry per layer."""

    def new(kind: str) -> Any:
        match kind:
            case "mamba2":
                return mamba2(_present(config.mamba2))
            case "attention" | "shared":
                return attention(_present(config.attention))
            case "parallel":
                return parallel(
                    mamba2(_present(config.mamba2)), attention(_present(config.attention))
                )
            case _:
                return NoCache()

    return tuple(map(new, config.layers))


def _present(part: Any) -> Any:
    assert part is not None  # ModelConfig checks that layers have their configs
    return part
