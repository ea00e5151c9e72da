"""MLPs with the interface of a mixer: a separate layer of the stack."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.numerics import activate, scaled
from stree_jax.array_types import Array, Float
from stree_jax.layer_config import MlpConfig
from stree_jax.models.cache import NoCache
from stree_jax.models.layers import linear, row_parallel
from stree_jax.partition import Shard


class Pointwise(nnx.Module):
    """A mixer that computes each position alone: no mask, an empty cache, replay is a no-op."""

    def apply(self, u: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """The function of one position."""
        raise NotImplementedError

    def __call__(
        self, u: Float[Array, "B T M"], cache: NoCache, valid: object, lengths: object
    ) -> tuple[Float[Array, "B T M"], NoCache]:
        """See `Mamba2Mixer`."""
        return self.apply(u), cache

    def tree(
        self,
        u: Float[Array, "B Q M"],
        tree: object,
        conv_gather_index: object,
        cache: NoCache,
        prefix_pending: NoCache | None = None,
        replay: object = None,
    ) -> tuple[Float[Array, "B Q M"], NoCache, NoCache]:
        """See `Mamba2Mixer`."""
        return self.apply(u), NoCache(), cache

    def replay(
        self, cache: NoCache, pending: NoCache, path: object, conv_gather_index: object
    ) -> NoCache:
        """See `Mamba2Mixer`."""
        return cache


class Mlp(Pointwise):
    """`out_proj(activation(gate) * up)` with `gate, up = in_proj(u)`, or without a gate.

    Args:
        config: shape and options of the MLP.
        d_model: width of input and output.
        dtype: dtype of the weights.
        rngs: random streams for initialisation.
        out_scale: scales the initial output projection, for deep stacks.
    """

    shard: Shard | None = None  # set on a shard, see `models.shard`

    def __init__(
        self,
        config: MlpConfig,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
    ):
        c = self.config = config
        width = 2 * c.hidden_size if c.gated else c.hidden_size
        self.in_proj = linear(d_model, width, bias=c.bias, dtype=dtype, rngs=rngs)
        self.out_proj = linear(
            c.hidden_size, d_model, bias=c.bias, dtype=dtype, rngs=rngs, scale=out_scale
        )

    def apply(
        self, u: Float[Array, "B T M"], adapter: Array | None = None
    ) -> Float[Array, "B T M"]:
        """The function of one position; `adapter` is added to gate and up (Zamba2)."""
        c = self.config
        hidden = self.in_proj(u)
        if adapter is not None:
            hidden = hidden + adapter
        if c.gated:
            gate, up = jnp.split(hidden, 2, axis=-1)
            hidden = activate(c.activation, scaled(gate, c.gate_multiplier)) * up
        else:
            hidden = activate(c.activation, hidden)
        return scaled(row_parallel(self.out_proj, hidden, self.shard), c.output_multiplier)
