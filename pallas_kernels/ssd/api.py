"""The chunked scan of a whole sequence (Mamba-2, section 6), for prefill and training."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.ssd import xla


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
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H P S"]]:
    """Outputs of a whole sequence and the state after it.

    Args:
        x: inputs.
        dt: time steps in float32, after softplus and clamp; 0 on padded positions, which then pass
            the state through unchanged.
        A: negative, float32.
        B, C: head h uses group `h // (H / G)`.
        D: the skip weight of each channel, float32.
        state: the state before the sequence, float32.
        chunk_size: a matter of speed and memory; the result does not depend on it beyond rounding.

    Returns:
        The outputs in the dtype of `x`, and the state after the last position in float32.
    """
    with jax.named_scope("ssd"):
        return xla.ssd(x, dt, A, B, C, D, state, chunk_size)
