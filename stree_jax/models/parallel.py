"""Mamba-2 and attention in parallel, as in Falcon-H1: same input, outputs summed."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import DeferredRMSNorm, Mamba2Pending
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.mesh.partition import Cut, Shard
from stree_jax.models.attention import (
    AttentionCache,
    AttentionConfig,
    AttentionMixer,
    AttentionPending,
)
from stree_jax.models.layer import (
    ConvGatherIndex,
    LayerConfig,
    Path,
    Replay,
    Sizes,
    register,
    within,
)
from stree_jax.models.mamba2 import Mamba2Cache, Mamba2Config, Mamba2Mixer
from stree_jax.tree import Tree


class ParallelCache(NamedTuple):
    """Cache of a layer with Mamba-2 and attention in parallel."""

    mamba2: Mamba2Cache
    attention: AttentionCache


class ParallelPending(NamedTuple):
    """Pending record of a layer with Mamba-2 and attention in parallel."""

    mamba2: Mamba2Pending
    attention: AttentionPending


@register("parallel")
@dataclasses.dataclass(frozen=True)
class ParallelConfig(LayerConfig):
    """A layer with Mamba-2 and attention in parallel: same input, outputs added (Falcon-H1)."""

    mamba2: Mamba2Config
    attention: AttentionConfig

    has_memory: ClassVar[bool] = True

    @property
    def conv_widths(self) -> tuple[int, ...]:
        return self.mamba2.conv_widths + self.attention.conv_widths

    def check_next(self, below: LayerConfig | None) -> None:
        self.attention.check_next(below)

    def build(self, d_model: int, **options: Any) -> "ParallelMixer":
        mamba2 = self.mamba2.build(d_model, **options)
        return ParallelMixer(mamba2, self.attention.build(d_model, **options))

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> ParallelCache:
        sizes = batch, max_length, dtype
        return ParallelCache(self.mamba2.init_cache(*sizes), self.attention.init_cache(*sizes))

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> ParallelPending:
        sizes = batch, num_nodes, dtype
        mamba2 = self.mamba2.init_pending(*sizes)
        return ParallelPending(mamba2, self.attention.init_pending(*sizes))

    def cache_specs(self, axis: str | None) -> Any:
        return ParallelCache(self.mamba2.cache_specs(axis), self.attention.cache_specs(axis))

    def sizes(self, shards: int) -> Sizes:
        one, other = self.mamba2.sizes(shards), self.attention.sizes(shards)
        return Sizes(one.equal | other.equal, one.shared | other.shared)

    def local(self, shards: int) -> "ParallelConfig":
        return ParallelConfig(self.mamba2.local(shards), self.attention.local(shards))

    def cuts(self, shards: int) -> dict[str, Cut]:
        attention = within("attention", self.attention.cuts(shards))
        return within("mamba2", self.mamba2.cuts(shards)) | attention


class ParallelMixer(nnx.Module):
    """The sum of both mixers' outputs; see `Mamba2Mixer` for the methods."""

    def __init__(self, mamba2: Mamba2Mixer, attention: AttentionMixer):
        self.mamba2 = mamba2
        self.attention = attention

    def set_shard(self, shard: Shard, whole: ParallelConfig) -> None:
        self.mamba2.set_shard(shard, whole.mamba2)
        self.attention.set_shard(shard, whole.attention)

    def __call__(
        self,
        u: Float[Array, "B T M"],
        cache: ParallelCache,
        valid: Bool[Array, "B T"],
        lengths: Lengths,
    ) -> tuple[Float[Array, "B T M"], ParallelCache]:
        """Runs a right-padded sequence from `cache`."""
        y, mamba2 = self.mamba2(u, cache.mamba2, valid, lengths)
        z, attention = self.attention(u, cache.attention, valid, lengths)
        return y + z, ParallelCache(mamba2, attention)

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: Tree,
        conv_gather_index: ConvGatherIndex,
        cache: ParallelCache,
        prefix_pending: ParallelPending | None = None,
        replay: Replay | None = None,
    ) -> tuple[Float[Array, "B Q M"], ParallelPending, ParallelCache]:
        """Runs the last Q nodes of a tree."""
        first = second = None
        if replay is not None:
            first = replay._replace(pending=replay.pending.mamba2)
            second = replay._replace(pending=replay.pending.attention)
        y, mamba2, mamba2_cache = self.mamba2.tree(
            u,
            tree,
            conv_gather_index,
            cache.mamba2,
            None if prefix_pending is None else prefix_pending.mamba2,
            first,
        )
        z, attention, attention_cache = self.attention.tree(
            u,
            tree,
            conv_gather_index,
            cache.attention,
            None if prefix_pending is None else prefix_pending.attention,
            second,
        )
        if isinstance(y, DeferredRMSNorm):
            y = y.scaled().astype(z.dtype)
        cache = ParallelCache(mamba2_cache, attention_cache)
        return y + z, ParallelPending(mamba2, attention), cache

    def replay(
        self,
        cache: ParallelCache,
        pending: ParallelPending,
        path: Path,
        conv_gather_index: ConvGatherIndex,
    ) -> ParallelCache:
        """The cache after the path."""
        return ParallelCache(
            self.mamba2.replay(cache.mamba2, pending.mamba2, path, conv_gather_index),
            self.attention.replay(cache.attention, pending.attention, path, conv_gather_index),
        )
