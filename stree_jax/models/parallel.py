"""Mamba-2 and attention in parallel, as in Falcon-H1: same input, outputs summed."""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import DeferredRMSNorm
from pallas_kernels.numerics import Product, total
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.models.attention import AttentionConfig, AttentionMixer
from stree_jax.models.layer import LayerConfig, Nodes, Replay, register
from stree_jax.models.mamba2 import Mamba2Config, Mamba2Mixer


class Both(NamedTuple):
    """Caches, pending records, or their specs: those of Mamba-2 and those of attention."""

    mamba2: Any
    attention: Any


@register("parallel")
@dataclasses.dataclass(frozen=True)
class ParallelConfig(LayerConfig):
    """A layer with Mamba-2 and attention in parallel: same input, outputs added (Falcon-H1)."""

    mamba2: Mamba2Config
    attention: AttentionConfig

    equal_to_the_bit = True

    def check_next(self, below: LayerConfig | None) -> None:
        self.attention.check_next(below)

    def build(self, d_model: int, **options: Any) -> "ParallelMixer":
        mamba2 = self.mamba2.build(d_model, **options)
        return ParallelMixer(mamba2, self.attention.build(d_model, **options))

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> Both:
        return Both(*(part.init_cache(batch, max_length, dtype) for part in self.parts.values()))

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Both:
        return Both(*(part.init_pending(batch, num_nodes, dtype) for part in self.parts.values()))


class ParallelMixer(nnx.Module):
    """The sum of both mixers' outputs."""

    def __init__(self, mamba2: Mamba2Mixer, attention: AttentionMixer):
        self.mamba2 = mamba2
        self.attention = attention

    def __call__(
        self, u: Float[Array, "B T M"], cache: Both, valid: Bool[Array, "B T"], lengths: Lengths
    ) -> tuple[Float[Array, "B T M"], Both]:
        y, mamba2 = self.mamba2(u, cache.mamba2, valid, lengths)
        z, attention = self.attention(u, cache.attention, valid, lengths)
        return _sum(y, z), Both(mamba2, attention)

    def tree(self, u: Float[Array, "B Q M"], at: Nodes) -> tuple[Float[Array, "B Q M"], Both, Both]:
        parts = zip(at.cache, at.prefix_pending or (None, None), _replays(at.replay), strict=True)
        for_mamba2, for_attention = (Nodes(*at[:2], *part) for part in parts)
        y, *of_mamba2 = self.mamba2.tree(u, for_mamba2)
        z, *of_attention = self.attention.tree(u, for_attention)
        pending, cache = map(Both, of_mamba2, of_attention)
        return _sum(y, z), pending, cache

    def replay(self, cache: Both, along: Replay) -> Both:
        of_mamba2, of_attention = _replays(along)
        return Both(
            self.mamba2.replay(cache.mamba2, of_mamba2),
            self.attention.replay(cache.attention, of_attention),
        )


def _replays(both: Replay | None) -> Both:
    """Of each of the two."""
    if both is None:
        return Both(None, None)
    return Both(*(both._replace(pending=record) for record in both.pending))


def _sum(y: Product | DeferredRMSNorm, z: Product) -> Array:
    """The sum of both outputs."""
    z = total(z)
    return (y.scaled().astype(z.dtype) if isinstance(y, DeferredRMSNorm) else total(y)) + z
