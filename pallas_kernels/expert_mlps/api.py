"""What a mixture of experts is between its router and its output: each token's chosen MLPs."""

import jax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.autodiff import differentiable
from pallas_kernels.expert_mlps import pallas_triton, xla


def expert_mlps(
    x: Float[Array, "n M"],
    weights: Float32[Array, "n k"],
    chosen: Int[Array, "n k"],
    experts_in: Float[Array, "experts M I"],
    experts_out: Float[Array, "experts F M"],
    *,
    activation: str,
    gated: bool,
    implementation: str | None = None,
) -> Float[Array, "n M"]:
    """The weighted sum of each token's `k` experts.

    An expert is `activation(x @ W_in) @ W_out`, or, gated, `(activation(x @ W_gate) * (x @ W_up)) @
    W_out` with `W_in = [W_gate | W_up]`.

    Of few tokens each takes the matrices of its experts. XLA's grouped product for more of them,
    `ragged_dot`, multiplies all tokens by all experts, also on a GPU; the kernel multiplies tokens
    by their experts only, as do XLA's loops on a CPU.

    Args:
        x: the tokens.
        weights: of the experts that each token has chosen.
        chosen: their numbers, of experts that exist.
        experts_in, experts_out: matrices of all experts, in the type of `x`.
        activation: one of `numerics.ACTIVATIONS`.
        gated: whether `I = 2 F`, or `I = F`.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here, for which
            few tokens are XLA's (`xla.few`).

    Returns:
        In the type of `x`. Where it is differentiated XLA's runs, in all implementations.

    Raises:
        ValueError: matrices that do not fit, or an implementation that does not exist, or cannot
            run these shapes.
    """
    columns, hidden = experts_in.shape[2], experts_out.shape[1]
    if columns != (2 * hidden if gated else hidden):
        raise ValueError(
            f"matrices with {columns} columns in front of those with {hidden} rows, and gated ="
            f" {gated}; gated ones have twice as many columns, others as many"
        )
    if implementation is None and xla.few(chosen, len(experts_in)):
        implementation = "xla"
    with jax.named_scope("expert_mlps"), dispatch.on(x, experts_in, experts_out):
        reason = pallas_triton.unsupported(x.shape[1], hidden, chosen.size, activation)
        run = differentiable(
            "expert_mlps",
            implementation,
            reason,
            xla=xla.expert_mlps,
            kernel=pallas_triton.expert_mlps,
            activation=activation,
            gated=gated,
        )
        return run(x, weights, chosen, experts_in, experts_out)
