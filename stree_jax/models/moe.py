"""A mixture of experts as a layer (Granite, Nemotron-H, LFM2)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels import expert_mlps
from pallas_kernels.numerics import rounded, sum_in_order, total
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import require, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import LayerConfig, Sizes, register, share, within
from stree_jax.models.layers import New
from stree_jax.models.mlp import MlpConfig, Pointwise

_NARROWEST = 16  # fewest channels of an expert that a kernel multiplies


@register("moe")
@dataclasses.dataclass(frozen=True)
class MoeConfig(LayerConfig):
    """A mixture of experts, each an MLP without biases, and optionally one that all tokens use.

    Attributes:
        num_experts: number of experts.
        num_active: experts per token.
        hidden_size: channels of an expert.
        router: "softmax" weighs the chosen experts by the softmax of their scores (Granite);
            "sigmoid" scores experts with a sigmoid, chooses them by score plus a learned
            correction, and weighs them by score (Nemotron-H, DeepSeek-V3).
        num_router_groups, num_active_groups: number of equal groups of experts, and groups per
            token: those whose two best scores have the largest sums ("sigmoid" only).
        normalise: whether a token's weights sum to 1 before `scale` ("sigmoid" only).
        norm_eps: added to the sum that they are divided by.
        scale: factor of the experts' sum.
        latent_size: width of the latent space of the experts (Nemotron-H); None: none.
        shared_size: channels of the expert that all tokens use; 0: none.
        shared_gate: whether that expert's output is scaled by the sigmoid of a projection.
        activation, gated: see `MlpConfig`; the same for all experts.
        limit, shared_limit: see `MlpConfig`, of the chosen experts and of the one for all tokens.
    """

    num_experts: int
    num_active: int
    hidden_size: int
    router: str = "softmax"
    num_router_groups: int = 1
    num_active_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    latent_size: int | None = None
    shared_size: int = 0
    shared_gate: bool = False
    activation: str = "silu"
    gated: bool = True
    norm_eps: float = 1e-20
    limit: float | None = None
    shared_limit: float | None = None
    equal_to_the_bit = True

    def __post_init__(self) -> None:
        require_integers(self)
        for limit in (self.limit, self.shared_limit):
            self._mlp(1, limit)  # which checks the fields of both
        routers = ("softmax", "sigmoid")
        require(self.router in routers, f"router must be one of {routers}, got {self.router!r:.80}")
        require(self.norm_eps >= 0, f"norm_eps must be at least 0, got {self.norm_eps}")
        require(
            self.router == "sigmoid" or (self.num_router_groups == 1 and self.scale == 1.0),
            "router groups and a scale belong to router = 'sigmoid'",
        )
        require(
            self.shared_size > 0 or not self.shared_gate,
            "shared_gate is for an expert that all tokens use; give shared_size",
        )
        require(
            self.num_experts % self.num_router_groups == 0
            and self.num_active_groups <= self.num_router_groups,
            f"{self.num_active_groups} of num_router_groups = {self.num_router_groups} groups of"
            f" {self.num_experts} experts is not possible",
        )
        group = self.num_experts // self.num_router_groups
        require(
            self.num_active <= self.num_active_groups * group,
            f"num_active = {self.num_active} is more than the {self.num_active_groups * group}"
            " experts that can be chosen",
        )
        require(
            self.num_router_groups == 1 or group >= 2, "a group of experts has at least two of them"
        )

    @property
    def shared_mlp(self) -> MlpConfig:
        """The expert that all tokens use."""
        return self._mlp(self.shared_size or 1, self.shared_limit)

    def _mlp(self, size: int, limit: float | None) -> MlpConfig:
        return MlpConfig(size, self.activation, self.gated, limit=limit)

    @property
    def experts_held(self) -> int:
        """Experts whose weights the layer has."""
        return self.num_experts

    def build(self, d_model: int, **options: Any) -> "MixtureOfExperts":
        return MixtureOfExperts(self, d_model, **options)

    def by_expert(self, shards: int) -> bool:
        """True if a shard has whole experts, because slices of each would be too narrow.

        Slices are better: whatever a token chooses, all shards work.
        """
        too_narrow = self.hidden_size % (_NARROWEST * shards) != 0
        return too_narrow and self.num_experts % shards == 0

    def sizes(self, shards: int) -> Sizes:
        equal = {"moe.shared_size": self.shared_size}
        if not self.by_expert(shards):
            equal["moe.hidden_size"] = self.hidden_size
        return Sizes(equal, {})

    def local(self, shards: int) -> "MoeConfig":
        config = dataclasses.replace(self, shared_size=share(self.shared_size, shards))
        if self.by_expert(shards):
            return MoeShardConfig(**vars(config), experts_held=share(self.num_experts, shards))
        return dataclasses.replace(config, hidden_size=share(self.hidden_size, shards))

    def cuts(self, shards: int) -> dict[str, Cut]:
        hidden, experts = (self.hidden_size, 1), Cut(0, ((self.num_experts, 1),))
        table = {"experts_in": experts, "experts_out": experts}
        if not self.by_expert(shards):
            table["experts_in"] = Cut(2, (hidden,) * (1 + self.gated))
            table["experts_out"] = Cut(1, (hidden,))
        if self.shared_size:
            table |= within("shared", self.shared_mlp.cuts(shards))
        return table


@dataclasses.dataclass(frozen=True)
class MoeShardConfig(MoeConfig):
    """One shard of a mixture: it has some of the experts, whole, and routes among all of them."""

    experts_held: int = 1


class MixtureOfExperts(Pointwise):
    """The weighted sum of a token's chosen experts, plus an expert that all tokens use."""

    config: MoeConfig

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        width = d_model if c.latent_size is None else c.latent_size
        self.router = new.matrix(d_model, c.num_experts)
        self.correction = (
            nnx.Param(jnp.zeros(c.num_experts, jnp.float32)) if c.router == "sigmoid" else None
        )
        self.experts_in = new.matrix(c.experts_held, width, (1 + c.gated) * c.hidden_size)
        self.experts_out = new.matrix(c.experts_held, c.hidden_size, width, scale=new.out_scale)
        self.latent_in = None if c.latent_size is None else new.linear(d_model, width, False)
        self.latent_out = None if c.latent_size is None else new.linear(width, d_model, False)
        self.shared = new.layer(c.shared_mlp, d_model, new.out_scale) if c.shared_size else None
        self.shared_gate = new.matrix(d_model, 1) if c.shared_gate else None

    def apply(self, u: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """The function of one position."""
        c = self.config
        weights, chosen = self._route(u.reshape(-1, u.shape[-1]))
        if c.experts_held < c.num_experts:
            weights, chosen = self.shard.own_choices(weights, chosen, c.experts_held)
        x = u if self.latent_in is None else self.latent_in(u)
        rows, into = self.experts_in.storage.operand(x.reshape(-1, x.shape[-1]))
        rows, out = self.experts_out.storage.operand(rows)
        y = self.run(
            expert_mlps,
            rows,
            weights,
            chosen,
            into,
            out,
            activation=c.activation,
            gated=c.gated,
            limit=c.limit,
        ).reshape(x.shape)
        y = y if self.latent_out is None else self.latent_out(y)
        if self.shared is not None:
            shared = total(self.shared.apply(u))
            if self.shared_gate is not None:
                scores = self.run(self.shared_gate.product, u, wide=True)
                shared = rounded(shared * jax.nn.sigmoid(scores).astype(shared.dtype))
            y = y + shared
        return self.shard.total(y)

    def _route(
        self, tokens: Float[Array, "tokens M"]
    ) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
        """The router weights of each token's `A` experts, in float32, and the experts' indices."""
        c = self.config
        scores = self.run(self.router.product, tokens, wide=True)  # exact, of bfloat16 numbers
        if self.correction is None:
            best, chosen = lax.top_k(scores, c.num_active)
            weights = jnp.exp(best - lax.stop_gradient(best[:, :1]))  # the first is the largest
            return weights / sum_in_order(weights), chosen
        scores = jax.nn.sigmoid(scores)
        preference = scores + self.correction[...].astype(jnp.float32)[None]
        if c.num_router_groups > 1:
            grouped = preference.reshape(len(tokens), c.num_router_groups, -1)
            group_scores = sum_in_order(lax.top_k(grouped, 2)[0])[..., 0]
            _, groups = lax.top_k(group_scores, c.num_active_groups)
            numbers = jnp.arange(c.num_router_groups, dtype=jnp.int32)[None, None]
            allowed = (groups[..., None] == numbers).any(axis=1)
            preference = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
        _, chosen = lax.top_k(preference, c.num_active)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if c.normalise:
            weights = weights / (sum_in_order(weights) + c.norm_eps)
        return weights * c.scale, chosen
