"""The scan of a whole sequence in chunks, for prefill and training.

State space duality, section 6 of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).
"""

import functools

from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels import native as cpu
from pallas_kernels.ssd import native, pallas_triton, xla
from pallas_kernels.tree_scan.pallas_triton import unsupported


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G S"],
    C: Float[Array, "B T G S"],
    D: Float[Array, "H P"],
    state: Float[Array, "B H P S"],
    *,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P S"]]:
    """Outputs of a whole sequence and the state after it.

    Args:
        x: inputs.
        dt: time steps in float32, after softplus and clamp; 0 on padded positions, which then
            leave the state unchanged.
        A: negative, float32.
        B, C: head h uses group `h // (H / G)`.
        D: the skip weight of each channel, float32.
        state: the state before the sequence, float32.
        chunk_size: trades speed for memory in XLA's version; changes rounding only.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs in the dtype of `x`, and the state after the last position in float32. Under
        differentiation XLA's version runs, whatever the implementation.

    Raises:
        ValueError: a chunk size below 1, groups that do not divide the heads, or an implementation
            that does not exist or cannot run these shapes.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} is not positive")
    if x.shape[2] % B.shape[2]:
        raise ValueError(f"{B.shape[2]} groups do not divide {x.shape[2]} heads")
    reason = unsupported(x.shape[-1], B.shape[-1], x.dtype)
    return dispatch.run(
        "ssd",
        {
            "xla": functools.partial(xla.ssd, chunk_size=chunk_size),
            "native": native.ssd,
            "pallas": pallas_triton.ssd,
        },
        (x, dt, A, B, C, D, state),
        requested=implementation,
        unsupported={"native": cpu.unsupported(x, head_dim=x.shape[-1]), "pallas": reason},
        xla_derivatives=True,
    )
