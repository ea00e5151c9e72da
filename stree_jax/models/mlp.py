"""A gated MLP with the interface of a mixer, for stacks in which it is a layer of its own."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Float
from stree_jax.config import MlpConfig
from stree_jax.models.cache import Nothing
from stree_jax.models.layers import linear, silu


class GatedMlp(nnx.Module):
    """`out_proj(silu(gate) * up)` with `gate, up = in_proj(u)`, position by position.

    Args:
        config: its shape.
        d_model: width of input and output.
        dtype: of the weights.
        rngs: for initialisation.
        out_scale: scales the initial output projection, for deep stacks.
    """

    def __init__(
        self,
        config: MlpConfig,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
    ):
        self.in_proj = linear(d_model, 2 * config.hidden_size, bias=False, dtype=dtype, rngs=rngs)
        self.out_proj = linear(
            config.hidden_size, d_model, bias=False, dtype=dtype, rngs=rngs, scale=out_scale
        )

    def __call__(
        self, u: Float[Array, "B T M"], cache: Nothing, mask: object, lengths: object
    ) -> tuple[Float[Array, "B T M"], Nothing]:
        """See `Mamba2Mixer`; positions do not see each other, so there is nothing to mask."""
        return self._apply(u), cache

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: object,
        window: object,
        cache: Nothing,
        grown: Nothing | None = None,
    ) -> tuple[Float[Array, "B Q M"], Nothing]:
        """See `Mamba2Mixer`."""
        return self._apply(u), Nothing()

    def replay(self, cache: Nothing, pending: Nothing, path: object, window: object) -> Nothing:
        """See `Mamba2Mixer`."""
        return cache

    def _apply(self, u: Array) -> Array:
        gate, up = jnp.split(self.in_proj(u), 2, axis=-1)
        return self.out_proj(silu(gate) * up)
