"""A mixture of experts as a layer (Granite, Nemotron-H)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import expert_mlps
from pallas_kernels.numerics import contract
from stree_jax.array_types import Array, Float, Int
from stree_jax.layer_config import MlpConfig, MoeConfig
from stree_jax.models.layers import linear
from stree_jax.models.mlp import Mlp, Pointwise
from stree_jax.partition import Shard


class MixtureOfExperts(Pointwise):
    """The weighted sum of a token's chosen experts, plus an expert that all tokens use.

    Args:
        config: shape and options of the mixture.
        d_model: width of input and output.
        dtype: dtype of the weights; the router computes in float32.
        rngs: random streams for initialisation.
        out_scale: scales the initial output projections, for deep stacks.
        implementation: implementation of `expert_mlps`, see `pallas_kernels.dispatch`.
    """

    shard: Shard | None = None  # set on a shard, see `models.shard`

    def __init__(
        self,
        config: MoeConfig,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
        implementation: str | None = None,
    ):
        c = self.config = config
        self.implementation = implementation
        width = d_model if c.latent_size is None else c.latent_size

        def experts(rows: int, columns: int, scale: float = 1.0) -> nnx.Param:
            shape = (c.experts_held, rows, columns)
            return nnx.Param(scale * rows**-0.5 * jax.random.normal(rngs.params(), shape, dtype))

        self.router = nnx.Param(
            d_model**-0.5 * jax.random.normal(rngs.params(), (d_model, c.num_experts), dtype)
        )
        self.correction = nnx.Param(jnp.zeros(c.num_experts)) if c.router == "sigmoid" else None
        self.experts_in = experts(width, 2 * c.hidden_size if c.gated else c.hidden_size)
        self.experts_out = experts(c.hidden_size, width, out_scale)

        def projection(rows: int, columns: int) -> nnx.Linear | None:
            if c.latent_size is None:
                return None
            return linear(rows, columns, bias=False, dtype=dtype, rngs=rngs)

        self.latent_in, self.latent_out = projection(d_model, width), projection(width, d_model)
        shared = MlpConfig(c.shared_size or 1, activation=c.activation, gated=c.gated)
        self.shared = (
            Mlp(shared, d_model, dtype=dtype, rngs=rngs, out_scale=out_scale)
            if c.shared_size
            else None
        )

    def apply(self, u: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """The function of one position."""
        weights, chosen = self._route(u.reshape(-1, u.shape[-1]))
        if self.config.experts_held < self.config.num_experts:
            assert self.shard is not None
            weights, chosen = self.shard.own_choices(weights, chosen, self.config.experts_held)
        x = u if self.latent_in is None else self.latent_in(u)
        y = expert_mlps(
            *(x.reshape(-1, x.shape[-1]), weights, chosen),
            *(self.experts_in[...], self.experts_out[...]),
            activation=self.config.activation,
            gated=self.config.gated,
            implementation=self.implementation,
        ).reshape(x.shape)
        y = y if self.latent_out is None else self.latent_out(y)
        y = y if self.shared is None else y + self.shared.apply(u)
        return y if self.shard is None else self.shard.total(y)

    def _route(
        self, tokens: Float[Array, "tokens M"]
    ) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
        """The router weights of each token's `A` experts, in float32, and the experts' indices."""
        c = self.config
        scores = contract("nm,me->ne", tokens.astype(jnp.float32), self.router[...])
        if self.correction is None:
            best, chosen = lax.top_k(scores, c.num_active)
            return jax.nn.softmax(best, axis=-1), chosen
        scores = jax.nn.sigmoid(scores)
        preference = scores + self.correction[...].astype(jnp.float32)
        if c.num_router_groups > 1:
            grouped = preference.reshape(len(tokens), c.num_router_groups, -1)
            group_scores = lax.top_k(grouped, 2)[0].sum(axis=-1)
            _, groups = lax.top_k(group_scores, c.num_active_groups)
            allowed = (groups[..., None] == jnp.arange(c.num_router_groups)).any(axis=1)
            preference = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
        _, chosen = lax.top_k(preference, c.num_active)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if c.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * c.scale, chosen
