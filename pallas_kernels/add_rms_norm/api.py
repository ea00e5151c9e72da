"""Adds a layer's output to the residual stream and norms the sum for the next layer."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import pallas_triton, xla
from pallas_kernels.autodiff import differentiable
from pallas_kernels.numerics import Unscaled


def add_rms_norm(
    residual: Float[Array, "*rows M"],
    output: Float[Array, "*rows M"] | Unscaled,
    weight: Float[Array, " M"],
    *,
    epsilon: float,
    multiplier: float = 1.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows M"], Float[Array, "*rows M"]]:
    """`residual + multiplier * output`, and its root-mean-square norm.

    Args:
        residual: the stream so far.
        output: of a layer; if it is unscaled, its rows are scaled first, in float32.
        weight: of the norm.
        epsilon: added to the mean square.
        multiplier: of the output; unless that was unscaled, the product is rounded to its dtype.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        The sum, in the dtype of `residual`, and its norm in that of `output`; both are evaluated in
        float32. Where it is differentiated XLA's runs, in all implementations.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    with jax.named_scope("add_rms_norm"), dispatch.on(residual, output, weight):
        reason = pallas_triton.unsupported(residual.shape[-1])
        run = differentiable(
            "add_rms_norm",
            implementation,
            reason,
            xla=xla.add_rms_norm,
            kernel=pallas_triton.add_rms_norm,
            epsilon=epsilon,
            multiplier=multiplier,
        )
        return run(residual, output, weight)
