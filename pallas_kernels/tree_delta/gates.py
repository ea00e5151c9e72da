"""Gates of the delta rule that a kernel computes while it loads what they are made of."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.numerics import Deferred, PartialSums, rounded, static, total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decays(Deferred):
    """Log-decays `-exp(A_log) dt` of heads `[B, N, H, 1]`."""

    dt: Float32[Array, "B N H"]
    A_log: Float32[Array, " H"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the log-decays."""
        return (*self.dt.shape, 1)

    def total(self) -> Array:
        """The log-decays."""
        return rounded(-jnp.exp(self.A_log)[None, None] * self.dt)[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepSizes(Deferred):
    """Step sizes beta `[B, N, H]`: `scale sigmoid(b)`, of columns b of an input projection.

    Attributes:
        projected: `[B, N, X]`.
        start: first column of b.
        num_heads: columns of b.
        scale: what beta stays below.
    """

    projected: Float[Array, "B N X"] | PartialSums
    start: int = static()
    num_heads: int = static()
    scale: float = static()

    def total(self) -> Array:
        """The step sizes, float32."""
        columns = total(self.projected)[..., self.start : self.start + self.num_heads]
        return self.scale * jax.nn.sigmoid(columns.astype(jnp.float32))
