"""The gate and norm that a scan can fuse into its output."""

import dataclasses

import jax
from jaxtyping import Array, Float

from pallas_kernels.numerics import PartialSums, static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """Multiplies the outputs of a scan by `silu(z)`, optionally followed by a norm.

    Attributes:
        projected: `[B, Q, X]`, an array with the columns z `[B, Q, H * P]` at the query nodes, such
            as the input projection.
        norm_weight: `[H * P]`, scale of an RMS norm of the gated outputs; None: no norm.
        start: first column of z.
        multiplier: factor of z; the product is rounded.
        norm_epsilon: constant added to the mean square.
        norm_per_head: True norms each head alone. False norms over all heads and defers the norm
            (`DeferredRMSNorm`).
    """

    projected: Float[Array, "B Q X"] | PartialSums
    norm_weight: Float[Array, " HP"] | None = None
    start: int = static(0)
    multiplier: float = static(1.0)
    norm_epsilon: float = static(1e-5)
    norm_per_head: bool = static(False)

    @property
    def defers_norm(self) -> bool:
        """True if the scan returns a `DeferredRMSNorm`."""
        return self.norm_weight is not None and not self.norm_per_head

    def check(self, num_heads: int, head_dim: int) -> None:
        """Raises a ValueError unless there is a column for every channel."""
        columns, size = self.projected.shape[-1], num_heads * head_dim
        if not 0 <= self.start <= columns - size:
            raise ValueError(f"{size} gates from column {self.start} on, of {columns} columns")
        if self.norm_weight is not None and self.norm_weight.shape != (size,):
            raise ValueError(f"norm_weight {self.norm_weight.shape} is not of {size} channels")
