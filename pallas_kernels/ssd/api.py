"""The scan of a whole sequence in chunks, for prefill and training.

State space duality, section 6 of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).
"""

import functools
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import dispatch, triton
from pallas_kernels import native as cpu
from pallas_kernels.numerics import DeferredRMSNorm
from pallas_kernels.ssd import pallas_triton, xla
from pallas_kernels.tree_scan import native
from pallas_kernels.tree_scan.gate import Gate
from pallas_kernels.tree_scan.pallas_triton import MOST_STATE
from pallas_kernels.tree_scan.xla import gated, rates


def ssd(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "B T G S"],
    C: Float[Array, "B T G S"],
    D: Float[Array, "H P"] | Float[Array, " H"],
    state: Float[Array, "B H P S"],
    *,
    gate: Gate | None = None,
    A_is_log: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H P"] | DeferredRMSNorm, Float[Array, "B H P S"]]:
    """Outputs of a whole sequence and the state after it.

    Args:
        x: inputs.
        dt: time steps in float32, after softplus and clamp; 0 on padded positions, which then
            leave the state unchanged.
        A: negative, float32.
        B, C: head h uses group `h // (H / G)`.
        D: skip weight per channel or per head, float32.
        state: the state before the sequence, float32.
        gate: as in `tree_scan`.
        A_is_log: whether A holds `log(-A)`, as models store it.
        chunk_size: trades speed for memory in XLA's version; changes rounding only.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs as `tree_scan` returns them, and the state after the last position in float32.
        Under differentiation XLA's version runs, whatever the implementation.

    Raises:
        ValueError: a chunk size below 1, groups that do not divide the heads, a gate that does not
            fit.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} is not positive")
    if x.shape[2] % B.shape[2]:
        raise ValueError(f"{B.shape[2]} groups do not divide {x.shape[2]} heads")
    if gate is not None:
        gate.check(*x.shape[2:])
    sizes = dict(head_dim=x.shape[-1], state_size=B.shape[-1])

    def ungated(scan: Any, *arguments: Any, **options: Any) -> Any:
        """A scan, and the gate after it."""
        *others, gate = arguments
        y, state = scan(*others, **options)
        return y if gate is None else gated(y, gate), state

    def of_rates(x: Any, dt: Any, A: Any, *others: Any, **options: Any) -> Any:
        return xla.ssd(x, dt, rates(A, A_is_log), *others, **options)

    return dispatch.run(
        "ssd",
        {
            "xla": functools.partial(ungated, of_rates, chunk_size=chunk_size),
            "native": functools.partial(native.ssd, A_is_log=A_is_log),
            "pallas": functools.partial(ungated, pallas_triton.ssd, A_is_log=A_is_log),
        },
        (x, dt, A, B, C, D, state, gate),
        requested=implementation,
        unsupported={
            "native": cpu.unsupported(x, **sizes),
            "pallas": triton.unsupported_state(**sizes, dtype=x.dtype, most=MOST_STATE),
        },
        xla_derivatives=True,
    )
