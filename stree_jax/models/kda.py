"""Kimi Delta Attention (KDA): a delta rule with a decay for each channel of a key.

    f, z, v, k, q, b = in_proj(u);   v, k, q = silu(conv(v, k, q));   k, q = l2_norm(k), l2_norm(q)
    g = -exp(A_log) softplus(f + dt_bias), or lower_bound sigmoid(exp(A_log) (f + dt_bias))
    state = exp(g) state;   w = sigmoid(b) (v - state k);   state = state + w (outer) k
    out_proj(norm(state q) sigmoid(z))

The model is Kimi Linear's (Kimi Team 2025, arXiv:2510.26692). It differs from a gated delta mixer
in its gates: f and z may come from projections of low rank (Kimi) instead of `in_proj` (Ling), and
f has a number for each channel of a key.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import Mamba2Layout, Mamba2Pending
from pallas_kernels.numerics import rounded
from stree_jax.array_types import Array, Float32
from stree_jax.checks import require, require_integer
from stree_jax.mesh.partition import Cut
from stree_jax.models.gated_delta import DeltaMixer
from stree_jax.models.layer import mixer_cuts, register
from stree_jax.models.layers import CONV_WIDTH_BITS, New
from stree_jax.models.mamba2 import RecurrentConfig


@register("kda")
@dataclasses.dataclass(frozen=True)
class KdaConfig(RecurrentConfig):
    """A layer with one KDA mixer.

    Attributes:
        num_heads: heads `H`.
        head_dim: channels of a key and of a value.
        conv_width: conv width `K`, at least 2.
        gate_rank: rank of the projections to f and z (Kimi); None: full (Ling).
        lower_bound: of g, below 0 (Ling); None: g has none (Kimi).
        norm_eps: epsilon of the norm of each head's output.
        chunk_size: chunk length of the prefill scan; does not change results.
    """

    num_heads: int
    head_dim: int
    conv_width: int = 4
    gate_rank: int | None = None
    lower_bound: float | None = None
    norm_eps: float = 1e-6
    # A decay for each pair of positions and each channel: work and memory grow with it.
    chunk_size: int = 16

    dtype_of_x = jnp.float32  # corrections enter the state as they are
    equal_sizes = ("num_heads",)

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "chunk_size"):
            require_integer(self, name, 1)
        require_integer(self, "gate_rank", 1, optional=True)
        require_integer(self, "conv_width", 2, bits=CONV_WIDTH_BITS)
        require(
            self.lower_bound is None or self.lower_bound < 0,
            f"lower_bound must be below 0, or None, got {self.lower_bound}",
        )
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def layout(self) -> Mamba2Layout:
        """Columns of the input projection: f and z, then v, k, q and b in Mamba-2's places.

        Those of low rank stand before the layout's own.
        """
        return Mamba2Layout(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_heads,
            state_size=self.head_dim,
            x_heads=self.num_heads,
            b_groups=self.num_heads,
            first_column=2 * self.gate_rank if self.gate_rank else self.size,
            has_gate=self.gate_rank is None,
        )

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Mamba2Pending:
        g = jnp.zeros((batch, num_nodes, self.num_heads, self.head_dim), jnp.float32)
        return super().init_pending(batch, num_nodes, dtype)._replace(dt=g)

    def build(self, d_model: int, **options: Any) -> "KdaMixer":
        return KdaMixer(self, d_model, **options)

    def cuts(self, shards: int) -> dict[str, Cut]:
        by_head, heads = (self.num_heads, 1), (self.num_heads, self.head_dim)
        gate = heads if self.gate_rank is None else (1, self.gate_rank)
        table = {name: Cut(1, (heads,)) for name in ("f_up.kernel", "z_up.kernel")}
        table |= {"A_log": Cut(0, (by_head,)), "dt_bias": Cut(0, (heads,))}
        columns = (gate, gate, heads, heads, heads, by_head)
        return table | mixer_cuts(columns, (heads,), (heads, heads, heads))


class KdaMixer(DeltaMixer):
    """One KDA mixer."""

    config: KdaConfig
    activation = "sigmoid"

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        self.in_proj = new.linear(d_model, c.layout.num_columns, False)
        if c.gate_rank is not None:
            self.f_up = new.linear(c.gate_rank, c.size, False)
            self.z_up = new.linear(c.gate_rank, c.size, False)
        self.conv_weight, _ = new.conv(c.conv_width, c.layout.num_channels, False)
        self.A_log, _ = new.rates(c.num_heads)
        _, self.dt_bias = new.rates(c.size)
        self.norm_scale = nnx.Param(jnp.ones(c.head_dim, jnp.float32))
        self.out_proj = new.linear(c.size, d_model, False, new.out_scale)

    def step_bias(self) -> Float32[Array, " H"]:
        """None: b is in the place of dt, and its softplus is not used."""
        return jnp.zeros(self.config.num_heads, jnp.float32)

    def gates(self, projected: Array, dt: Float32[Array, "B T H"]) -> tuple[Array, Array]:
        c = self.config
        f = projected[..., : c.gate_rank or c.size]
        f = f if c.gate_rank is None else self.f_up(f)
        z = f.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None]
        z = z.reshape(*z.shape[:2], c.num_heads, c.head_dim)
        rates = jnp.exp(self.A_log[...].astype(jnp.float32))[None, None, :, None]
        if c.lower_bound is None:
            g = -rates * jax.nn.softplus(z)
        else:
            g = c.lower_bound * jax.nn.sigmoid(rounded(rates * z))
        b = projected[..., c.layout.columns[4] :].astype(jnp.float32)
        return rounded(g), jax.nn.sigmoid(b)

    def output_gate(self, projected: Array) -> tuple[Array, int]:
        rank = self.config.gate_rank
        if rank is None:
            return super().output_gate(projected)
        return self.z_up(projected[..., rank : 2 * rank]), 0
