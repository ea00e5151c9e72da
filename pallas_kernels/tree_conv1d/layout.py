"""The columns of a Mamba-2 input projection, how heads share them, and the pending record."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.numerics import PartialSums, Product, scaled, static, total


class Mamba2Pending(NamedTuple):
    """Pending record of a Mamba-2 layer: it can advance along any path of a tree of N nodes."""

    x: Float[Array, "B N H P"]
    dt: Float32[Array, "B N H"]  # of KDA the log-decays `[B, N, H, S]`
    B: Float[Array, "B N G S"]
    conv_input: Float[Array, "B N C"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Convolution:
    """The arguments of `tree_conv1d_layer`, for an op that may begin with it."""

    projected: Float[Array, "B Q X"] | PartialSums
    conv_weight: Float[Array, "K C"]
    conv_bias: Float[Array, " C"] | None
    dt_bias: Float32[Array, " H"]
    conv_state: Float[Array, "B J C"]
    conv_gather_index: Int[Array, "B Q K"]
    prefix_pending: Mamba2Pending | None
    previous: tuple[Mamba2Pending, Int[Array, "B J"]] | None
    layout: "Mamba2Layout" = static()

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All of them but the layout, in the order of the op."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)[:-1])

    def check(self) -> None:
        """Raises a ValueError unless projection and weights fit the layout."""
        layout, columns = self.layout, self.projected.shape[-1]
        if columns != layout.num_columns:
            raise ValueError(
                f"the projection has {columns} columns, {layout} has {layout.num_columns}"
            )
        if (channels := self.conv_weight.shape[-1]) != layout.num_channels:
            raise ValueError(
                f"conv_weight has {channels} channels, {layout} has {layout.num_channels}"
            )


@dataclasses.dataclass(frozen=True)
class Mamba2Layout:
    """Columns `[... | z | x | B | C | dt]` of the input projection of a Mamba-2 layer.

    Attributes:
        num_heads, head_dim, num_groups, state_size: `H`, `P`, `G` and `S` of the scan.
        x_heads, b_groups: heads of x and groups of B in the projection; each is repeated for as
            many neighbours as it takes to reach `H` and `G` (MambaInLlama).
        repeat_before_conv: repeat before the convolution; otherwise after it.
        first_column: columns before z, which the scan does not use.
        has_gate: whether z is among the columns.
        multipliers: factors of z, x, B, C and dt; the products are rounded (Falcon-H1).
        dt_limit: clamp of the time step after softplus.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    x_heads: int
    b_groups: int
    repeat_before_conv: bool = False
    first_column: int = 0
    has_gate: bool = True
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Number of columns of z, x, B, C and dt."""
        return (
            self.num_heads * self.head_dim * self.has_gate,
            self.x_heads * self.head_dim,
            self.b_groups * self.state_size,
            self.num_groups * self.state_size,
            self.num_heads,
        )

    @property
    def columns(self) -> tuple[int, ...]:
        """The first column of z, x, B, C and dt."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=self.first_column))

    @property
    def num_columns(self) -> int:
        """Columns of the whole projection."""
        return self.first_column + sum(self.sizes)

    @property
    def conv_heads(self) -> tuple[int, int]:
        """Heads of x and groups of B that are convolved."""
        if self.repeat_before_conv:
            return self.num_heads, self.num_groups
        return self.x_heads, self.b_groups

    @property
    def channels(self) -> tuple[int, int, int]:
        """The first channel of x, B and C in the convolution."""
        heads, groups = self.conv_heads
        end_of_x = heads * self.head_dim
        return 0, end_of_x, end_of_x + groups * self.state_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.channels[2] + self.num_groups * self.state_size

    def gate(self, projected: Product) -> tuple[Product, int]:
        """An array with the gate z, and z's first column; a slice only if z has a multiplier."""
        if self.multipliers[0] == 1.0:
            return projected, self.columns[0]
        return self._part(total(projected), 0), 0

    def conv_input(self, projected: jax.Array) -> jax.Array:
        """x, B and C before the convolution `[..., C]`."""
        x, B, C = (self._part(projected, index) for index in (1, 2, 3))
        if self.repeat_before_conv:
            x = _repeated(x, self.head_dim, self.num_heads)
            B = _repeated(B, self.state_size, self.num_groups)
        return jnp.concatenate([x, B, C], axis=-1)

    def time_steps(self, projected: jax.Array, bias: jax.Array) -> jax.Array:
        """Time steps after softplus and clamp `[..., H]`, float32."""
        return time_step(self._part(projected, 4), bias, self.dt_limit)

    def heads(self, conv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Splits the activated convolution into x `[..., H, P]`, B and C `[..., G, S]`."""
        x, B, C = jnp.split(conv, self.channels[1:], axis=-1)
        x = _repeated(x, self.head_dim, self.num_heads)
        B = _repeated(B, self.state_size, self.num_groups)
        rows = conv.shape[:-1]
        in_groups = (*rows, self.num_groups, self.state_size)
        return (
            x.reshape(*rows, self.num_heads, self.head_dim),
            B.reshape(in_groups),
            C.reshape(in_groups),
        )

    def _part(self, projected: jax.Array, index: int) -> jax.Array:
        start = self.columns[index]
        part = projected[..., start : start + self.sizes[index]]
        return scaled(part, self.multipliers[index])


def time_step(raw: jax.Array, bias: jax.Array, limit: tuple[float, float]) -> jax.Array:
    """The time step of the recurrence, float32; the same in prefill, tree and replay."""
    raw = raw.astype(jnp.float32) + lax.broadcast_to_rank(bias, raw.ndim)
    return jnp.clip(jax.nn.softplus(raw), *limit)


def _repeated(x: jax.Array, size: int, count: int) -> jax.Array:
    """Repeats each head of width `size` until there are `count` heads."""
    heads = x.reshape(*x.shape[:-1], -1, size)
    if heads.shape[-2] == count:
        return x
    return jnp.repeat(heads, count // heads.shape[-2], axis=-2).reshape(*x.shape[:-1], -1)
