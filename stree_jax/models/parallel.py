"""Mamba-2 and attention in parallel, as in Falcon-H1: same input, outputs summed."""

from flax import nnx

from pallas_kernels import DeferredRMSNorm
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.cache import ConvGatherIndex, ParallelCache, ParallelPending, Path, Replay
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.tree import Tree


class ParallelMixer(nnx.Module):
    """The sum of both mixers' outputs; see `Mamba2Mixer` for the methods."""

    def __init__(self, mamba2: Mamba2Mixer, attention: AttentionMixer):
        self.mamba2 = mamba2
        self.attention = attention

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
