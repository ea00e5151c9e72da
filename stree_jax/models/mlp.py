"""MLPs with the interface of a mixer: a separate layer of the stack."""

import dataclasses
from typing import Any

from pallas_kernels.numerics import ACTIVATIONS, Product, activate, gated
from stree_jax.array_types import Array, Float
from stree_jax.checks import require, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import LayerConfig, NoCache, mixer_cuts, register
from stree_jax.models.layers import LayerInput, MixerModule, New


@register("mlp")
@dataclasses.dataclass(frozen=True)
class MlpConfig(LayerConfig):
    """An MLP as a separate layer.

    Gated: `out(activation(gate(x)) * up(x))`; otherwise `out(activation(up(x)))`.

    Attributes:
        hidden_size: channels between the projections.
        activation: "silu", "gelu" (the exact one) or "relu2" (the square of relu).
        gated: whether there is a gate, see above.
        bias: whether the projections have a bias.
        norm_after: whether its norm is that of its output (Olmo), not of its input.
        gate_multiplier, output_multiplier: scale the gate before its activation, and the output
            (Falcon-H1).
        limit: the largest value of `activation(gate(x))`, and size of `up(x)` (Ling); None: none.
    """

    hidden_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0
    norm_after: bool = False
    limit: float | None = None
    equal_to_the_bit = norms_input = True
    equal_sizes = ("hidden_size",)

    def __post_init__(self) -> None:
        require_integers(self)
        require(
            self.activation in ACTIVATIONS,
            f"activation must be one of {ACTIVATIONS}, got {self.activation!r:.80}",
        )
        require(
            self.limit is None or (self.limit > 0 and self.gated),
            f"limit must be above 0, in a gated MLP, or None; got {self.limit}",
        )

    def build(self, d_model: int, **options: Any) -> "Mlp":
        return Mlp(self, d_model, **options)

    def cuts(self, shards: int) -> dict[str, Cut]:
        hidden = (self.hidden_size, 1)
        return mixer_cuts((hidden,) * (1 + self.gated), (hidden,))


class Pointwise(MixerModule):
    """A mixer that computes each position alone: no mask, an empty cache, replay is a no-op."""

    def apply(self, u: Any) -> Product:
        """The function of one position, of `[B, T, M]`."""
        raise NotImplementedError

    def __call__(
        self, u: Float[Array, "B T M"], cache: NoCache, valid: object, lengths: object
    ) -> tuple[Product, NoCache]:
        return self.apply(u), cache

    def tree(
        self, u: Float[Array, "B Q M"] | LayerInput, at: Any = None
    ) -> tuple[Product, NoCache, NoCache]:
        return self.apply(u), NoCache(), NoCache()

    def replay(self, cache: NoCache, along: object) -> NoCache:
        return cache


class Mlp(Pointwise):
    """`out_proj(activation(gate) * up)` with `gate, up = in_proj(u)`, or without a gate."""

    config: MlpConfig

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        width = 2 * c.hidden_size if c.gated else c.hidden_size
        self.in_proj = new.linear(d_model, width, c.bias)
        self.out_proj = new.linear(c.hidden_size, d_model, c.bias, new.out_scale)

    def apply(self, u: Float[Array, "B T M"] | LayerInput, adapter: Array | None = None) -> Product:
        """The function of one position; `adapter` is added to gate and up (Zamba2)."""
        c = self.config
        is_plain = c.gate_multiplier == 1.0 and c.limit is None
        if c.gated and adapter is None and is_plain:
            hidden = self.in_proj.gated(u, c.activation)
        else:
            hidden = self.in_proj(u) if adapter is None else self.in_proj(u) + adapter
            if c.gated:
                hidden = gated(c.activation, hidden, c.gate_multiplier, c.limit)
            else:
                hidden = activate(c.activation, hidden)
        return self.row_parallel(hidden, c.output_multiplier)
