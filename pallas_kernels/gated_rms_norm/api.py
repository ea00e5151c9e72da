"""The gate and the norm between the scan and the output projection of a Mamba-2 layer."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.autodiff import differentiable
from pallas_kernels.gated_rms_norm import pallas_triton, xla

NORMS = ("gate_then_norm", "norm_then_gate", "none")


def gated_rms_norm(
    y: Float[Array, "*rows M"],
    gate: Float[Array, "*rows E"],
    weight: Float[Array, " M"] | None,
    *,
    norm: str = "gate_then_norm",
    epsilon: float = 1e-5,
    num_groups: int = 1,
    gate_start: int = 0,
    implementation: str | None = None,
) -> Float[Array, "*rows M"]:
    """`y * silu(gate)` with a root-mean-square norm before or after the gate, or none.

    Args:
        y: outputs of the scan.
        gate: before its SiLU; may be one part of a wider array, as the input projection is.
        weight: of the norm; None if and only if `norm` is "none".
        norm: "gate_then_norm" (Mamba-2), "norm_then_gate" (Falcon-H1's option) or "none".
        epsilon: added to the mean square.
        num_groups: equal parts of a row, each normed alone.
        gate_start: the first column of `gate` that is one; the kernel reads it where it is.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        An array in the dtype of `y`. Evaluated in float32 and rounded once, at the end. Where it is
        differentiated XLA's runs, in all implementations.

    Raises:
        ValueError: an unknown norm, a weight where there is no norm or none where there is one,
            groups that do not divide a row, too few columns of gates, or an implementation that
            does not exist or cannot run these shapes.
    """
    if norm not in NORMS:
        raise ValueError(f"norm = {norm!r} is not one of {NORMS}")
    if (weight is None) != (norm == "none"):
        raise ValueError(f"norm = {norm!r} with weight = {weight!r}")
    if y.shape[-1] % num_groups:
        raise ValueError(f"{num_groups} groups do not divide rows of {y.shape[-1]}")
    if not 0 <= gate_start <= gate.shape[-1] - y.shape[-1]:
        raise ValueError(
            f"{y.shape[-1]} gates from column {gate_start} on, of {gate.shape[-1]} columns"
        )
    with jax.named_scope("gated_rms_norm"), dispatch.on(y, gate, weight):
        reason = pallas_triton.unsupported(y.shape[-1] // num_groups)
        run = differentiable(
            "gated_rms_norm",
            implementation,
            reason,
            xla=xla.gated_rms_norm,
            kernel=pallas_triton.gated_rms_norm,
            norm=norm,
            epsilon=epsilon,
            num_groups=num_groups,
            gate_start=gate_start,
        )
        return run(y, gate, weight)
