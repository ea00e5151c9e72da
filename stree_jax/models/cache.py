"""What a model carries from step to step, and the one function that owns its shapes.

A cache has seen every token but the last emitted one: that token is the root of the next tree. A
forward over a tree leaves the cache as it is and returns a *pending* record; replaying one path of
that record is what advances the cache (activation replay, STree section 3).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.config import Mamba2Config, ModelConfig
from stree_jax.tree import Tree


class Mamba2Cache(NamedTuple):
    """What a Mamba-2 layer keeps of the tokens before the root."""

    ssm: Float32[Array, "B H P S"]
    conv: Float[Array, "B J C"]  # the last J = K - 1 conv inputs, oldest first


class Mamba2Pending(NamedTuple):
    """What a Mamba-2 layer needs to advance along any path of a tree of N nodes."""

    x: Float[Array, "B N H P"]
    dt: Float32[Array, "B N H"]
    B: Float[Array, "B N G S"]
    conv_input: Float[Array, "B N C"]


class Nothing(NamedTuple):
    """What a layer without memory, an MLP, keeps and needs."""


# One entry a layer.
LayerCache = Mamba2Cache | Nothing
LayerPending = Mamba2Pending | Nothing
Cache = tuple[LayerCache, ...]
Pending = tuple[LayerPending, ...]


class Path(NamedTuple):
    """A root-to-node path of a tree; the empty path replays nothing."""

    mask: Bool[Array, "B N"]
    parents: Int[Array, "B N"]
    last: Int[Array, " B"]  # the path's last node, -1 for the empty path


def path_to(tree: Tree, last: Int[Array, " B"]) -> Path:
    """The path from the root to node `last`, -1 for the empty path."""
    row = jnp.take_along_axis(tree.ancestor_mask, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    return Path(row & (last >= 0)[:, None], tree.parents, last)


def init_cache(config: ModelConfig, batch: int, dtype: DTypeLike) -> Cache:
    """The cache before the first token: zeros. `dtype` is that of the weights."""

    def new(kind: str) -> LayerCache:
        if kind == "mlp":
            return Nothing()
        m = _mamba2(config)
        return Mamba2Cache(
            ssm=jnp.zeros((batch, m.num_heads, m.head_dim, m.state_size), jnp.float32),
            conv=jnp.zeros((batch, m.conv_width - 1, m.conv_channels), dtype),
        )

    return tuple(new(kind) for kind in config.layers)


def init_pending(config: ModelConfig, batch: int, num_nodes: int, dtype: DTypeLike) -> Pending:
    """The pending record of a tree that was never run, for replay along the empty path."""

    def new(kind: str) -> LayerPending:
        if kind == "mlp":
            return Nothing()
        m = _mamba2(config)
        return Mamba2Pending(
            x=jnp.zeros((batch, num_nodes, m.num_heads, m.head_dim), dtype),
            dt=jnp.zeros((batch, num_nodes, m.num_heads), jnp.float32),
            B=jnp.zeros((batch, num_nodes, m.num_groups, m.state_size), dtype),
            conv_input=jnp.zeros((batch, num_nodes, m.conv_channels), dtype),
        )

    return tuple(new(kind) for kind in config.layers)


def _mamba2(config: ModelConfig) -> Mamba2Config:
    assert config.mamba2 is not None  # HybridLM refuses models without it
    return config.mamba2
