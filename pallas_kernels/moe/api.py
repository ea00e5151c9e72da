"""A mixture of experts between its router and its output: the chosen MLPs of each token."""

import functools

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.matmul import PackedMatrix
from pallas_kernels.moe import pallas_triton, xla

PACKED = ("xla", "native")  # implementations of products with packed experts


def expert_mlps(
    x: Float[Array, "tokens M"],
    weights: Float32[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    experts_in: Float[Array, "experts M X"] | PackedMatrix,
    experts_out: Float[Array, "experts F M"] | PackedMatrix,
    *,
    activation: str,
    gated: bool,
    limit: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens M"]:
    """The weighted sum of the `A` chosen experts of each token.

    An expert is `activation(x @ W_in) @ W_out`, or, gated, `(activation(x @ W_gate) * (x @ W_up)) @
    W_out` with `W_in = [W_gate | W_up]`.

    XLA's grouped product, `ragged_dot`, multiplies all tokens by all experts, on GPUs too. The
    kernel multiplies a token by its own experts only, as do XLA's loops on a CPU. With no more
    choices than experts, as for one token, gathering the matrices in XLA reads nothing twice, takes
    fewer launches than the kernel, and is the default, unless bits are wanted
    (`dispatch.to_the_bit`).

    Args:
        x: the tokens.
        weights: router weights of each token's chosen experts.
        chosen: indices of the chosen experts; all must be in range.
        experts_in, experts_out: weight matrices of all experts, in the dtype of `x`; or both
            packed, for a CPU.
        activation: a name from `numerics.ACTIVATIONS`.
        gated: whether `X = 2 F` or `X = F`.
        limit: of a gated expert's two factors, see `numerics.gated`; None: there is none.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The sums, in the dtype of `x`. Derivatives are XLA's in all implementations.

    Raises:
        ValueError: matrices that do not fit each other.
    """
    columns, hidden = experts_in.shape[-1], experts_out.shape[-2]
    if columns != (2 * hidden if gated else hidden):
        raise ValueError(
            f"experts_in has {columns} columns and experts_out {hidden} rows with gated = {gated};"
            " gated experts need twice as many columns as rows, others as many"
        )
    arguments = (x, weights, chosen, experts_in, experts_out)
    run = functools.partial(
        dispatch.run,
        "expert_mlps",
        xla_derivatives=True,
        activation=activation,
        gated=gated,
        limit=limit,
    )
    if isinstance(experts_in, PackedMatrix):
        versions = {name: functools.partial(xla.packed_mlps, product=name) for name in PACKED}
        return run(versions, arguments, requested=implementation)
    is_free = implementation is None and not dispatch.wants_bits()
    if is_free and xla.few(chosen, len(experts_in)):
        implementation = "xla"
    reason = pallas_triton.unsupported(x.shape[1], hidden, chosen.size, activation)
    return run(
        {"xla": xla, "pallas": pallas_triton},
        arguments,
        requested=implementation,
        unsupported={"pallas": reason},
    )
