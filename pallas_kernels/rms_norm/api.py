"""Root-mean-square norms, alone and fused with their neighbours in a layer.

`add_rms_norm` adds a layer's output to the residual stream and norms the sum for the next layer;
`gated_rms_norm` is the gate and the norm between the scan and the output projection of Mamba-2.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, numerics
from pallas_kernels import native as cpu
from pallas_kernels.numerics import Deferred, DeferredRMSNorm, PartialSums, static, total
from pallas_kernels.rms_norm import native, pallas_triton, xla

NORMS = ("gate_then_norm", "norm_then_gate", "none")


def rms_norm(
    x: Float[Array, "*rows M"] | PartialSums,
    weight: Float[Array, " M"],
    *,
    epsilon: float,
    implementation: str | None = None,
) -> Float[Array, "*rows M"]:
    """The root-mean-square norm of each row.

    Args:
        x: the rows.
        weight: scale of the norm.
        epsilon: constant added to the mean square.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.
            On a GPU XLA fuses the norm with its neighbours, so the kernel runs only where bits are
            wanted (`dispatch.to_the_bit`).

    Returns:
        An array in the dtype of `x`, evaluated in float32. Derivatives are XLA's in all
        implementations.
    """
    size = x.shape[-1]
    versions = {"xla": numerics, "native": native}
    if implementation is not None or dispatch.wants_bits():
        versions["pallas"] = pallas_triton
    return dispatch.run(
        "rms_norm",
        versions,
        (x, weight),
        requested=implementation,
        unsupported={
            "native": cpu.unsupported(x, channels=size),
            "pallas": pallas_triton.unsupported("row size", size),
        },
        xla_derivatives=True,
        epsilon=epsilon,
    )


def add_rms_norm(
    residual: Float[Array, "*rows M"],
    output: Float[Array, "*rows M"] | PartialSums | DeferredRMSNorm,
    weight: Float[Array, " M"],
    *,
    epsilon: float,
    multiplier: float = 1.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows M"], Float[Array, "*rows M"]]:
    """`residual + multiplier * output`, and its root-mean-square norm.

    Args:
        residual: the residual stream.
        output: a layer's output; the rows of a deferred norm are scaled first, in float32.
        weight: scale of the norm.
        epsilon: constant added to the mean square.
        multiplier: factor of `output`; the product is rounded to the output's dtype, unless the
            norm is deferred.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The sum in the dtype of `residual` and its norm in the dtype of `output`, both evaluated in
        float32. Derivatives are XLA's in all implementations.
    """
    size = residual.shape[-1]
    value = output.value if isinstance(output, DeferredRMSNorm) else output
    return dispatch.run(
        "add_rms_norm",
        {"xla": xla, "native": native, "pallas": pallas_triton},
        (residual, output, weight),
        requested=implementation,
        unsupported={
            "native": cpu.unsupported(residual, value, channels=size),
            "pallas": pallas_triton.unsupported("row size", size),
        },
        xla_derivatives=True,
        epsilon=epsilon,
        multiplier=multiplier,
    )


def gated_rms_norm(
    y: Float[Array, "*rows M"],
    gate: Float[Array, "*rows X"] | PartialSums,
    weight: Float[Array, " _"] | None,
    *,
    norm: str = "gate_then_norm",
    epsilon: float = 1e-5,
    num_groups: int = 1,
    gate_start: int = 0,
    activation: str = "silu",
    implementation: str | None = None,
) -> Float[Array, "*rows M"]:
    """`y * activation(gate)` with a root-mean-square norm before or after the gate, or none.

    Args:
        y: outputs of the scan.
        gate: input of the activation; may be columns of a wider array, as of an input projection.
        weight: scale of the norm, `[M]`, or `[M / num_groups]` for all groups; None if and only if
            `norm` is "none".
        norm: "gate_then_norm" (Mamba-2), "norm_then_gate" (an option of Falcon-H1) or "none".
        epsilon: constant added to the mean square.
        num_groups: number of equal groups of channels, each normed alone.
        gate_start: the gate's first column; the kernel reads it in place.
        activation: "silu", or "sigmoid" (Kimi Delta Attention).
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        An array in the dtype of `y`. Evaluated in float32 and rounded once, at the end. Derivatives
        are XLA's in all implementations.

    Raises:
        ValueError: an unknown norm or activation, a weight without a norm or a norm without a
            weight, groups that do not divide a row, a weight of another size, too few columns of
            gates.
    """
    options = epsilon, num_groups, gate_start, activation, implementation
    return GatedNorm(y, gate, weight, norm, *options).total()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedNorm(Deferred):
    """`gated_rms_norm` of these arguments, which the product of a few such rows computes first.

    Without a gate and a norm they are outputs that are deferred.
    """

    y: Any  # [*rows, M], an array or one that is deferred
    gate: Float[Array, "*rows X"] | PartialSums | None
    weight: Float[Array, " _"] | None
    norm: str = static("gate_then_norm")
    epsilon: float = static(1e-5)
    num_groups: int = static(1)
    gate_start: int = static(0)
    activation: str = static("silu")
    implementation: str | None = static(None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return self.y.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the rows."""
        return self.y.dtype

    def total(self) -> Array:
        """The rows, by the op."""
        self.check()
        y, size = total(self.y), self.y.shape[-1] // self.num_groups
        if self.gate is None:
            return y
        return dispatch.run(
            "gated_rms_norm",
            {"xla": xla, "native": native, "pallas": pallas_triton},
            (y, self.gate, self.weight),
            requested=self.implementation,
            unsupported={
                "native": cpu.unsupported(y, self.gate, channels=size),
                "pallas": pallas_triton.unsupported("group size", size),
            },
            xla_derivatives=True,
            norm=self.norm,
            epsilon=self.epsilon,
            num_groups=self.num_groups,
            gate_start=self.gate_start,
            activation=self.activation,
        )

    def check(self) -> None:
        """Raises the ValueError of `gated_rms_norm`."""
        if self.norm not in NORMS:
            raise ValueError(f"norm = {self.norm!r} is not one of {NORMS}")
        if self.activation not in xla.ACTIVATIONS:
            names = tuple(xla.ACTIVATIONS)
            raise ValueError(f"activation = {self.activation!r} is not one of {names}")
        size, weight = self.y.shape[-1], self.weight
        if (weight is None) != (self.norm == "none"):
            given = "None" if weight is None else f"of {weight.shape[0]} channels"
            raise ValueError(
                f"norm = {self.norm!r} with weight = {given}: every norm but 'none' needs a weight"
            )
        if size % self.num_groups:
            raise ValueError(f"{self.num_groups} groups do not divide rows of {size}")
        columns = size if self.gate is None else self.gate.shape[-1]
        if not 0 <= self.gate_start <= columns - size:
            raise ValueError(f"{size} gates from column {self.gate_start} on, of {columns} columns")
        of_group = size // self.num_groups
        if weight is not None and weight.shape[0] not in (size, of_group):
            raise ValueError(f"a weight of {weight.shape[0]} channels, not of {size} or {of_group}")
