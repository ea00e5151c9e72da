"""Mamba-2 and attention side by side, as in Falcon-H1: same input, outputs summed."""

from flax import nnx

from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.cache import ParallelCache, ParallelPending, Path, Windows
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
        mask: Bool[Array, "B T"],
        lengths: Lengths,
    ) -> tuple[Float[Array, "B T M"], ParallelCache]:
        """Runs a right-padded sequence from `cache`."""
        y, mamba2 = self.mamba2(u, cache.mamba2, mask, lengths)
        z, attention = self.attention(u, cache.attention, mask, lengths)
        return y + z, ParallelCache(mamba2, attention)

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: Tree,
        windows: Windows,
        cache: ParallelCache,
        grown: ParallelPending | None = None,
    ) -> tuple[Float[Array, "B Q M"], ParallelPending]:
        """Runs the last Q nodes of a tree."""
        above = ParallelPending(None, None) if grown is None else grown  # type: ignore[arg-type]
        y, mamba2 = self.mamba2.tree(u, tree, windows, cache.mamba2, above.mamba2)
        z, attention = self.attention.tree(u, tree, windows, cache.attention, above.attention)
        return y + z, ParallelPending(mamba2, attention)

    def replay(
        self, cache: ParallelCache, pending: ParallelPending, path: Path, windows: Windows
    ) -> ParallelCache:
        """The cache after the path."""
        return ParallelCache(
            self.mamba2.replay(cache.mamba2, pending.mamba2, path, windows),
            self.attention.replay(cache.attention, pending.attention, path, windows),
        )
