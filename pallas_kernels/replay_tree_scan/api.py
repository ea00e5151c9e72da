"""One step of a speculative loop over one state: replay the last path, then scan the next tree."""

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels import dispatch
from pallas_kernels.replay_tree_scan import pallas_triton, xla


def replay_tree_scan(
    prev_x: Float[Array, "B O H P"],
    prev_dt: Float[Array, "B O H"],
    prev_B: Float[Array, "B O G S"],
    prev_path: Bool[Array, "B O"],
    x: Float[Array, "B N H P"],
    dt: Float[Array, "B N H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N G S"],
    C: Float[Array, "B Q G S"],
    D: Float[Array, "H P"],
    state: Float[Array, "B H P S"],
    ancestor_mask: Bool[Array, "B N N"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H P"], Float[Array, "B H P S"]]:
    """`replay` of the previous tree's path, then `tree_scan` of a new tree from there.

    The same as the two calls, but the state, which dwarfs everything else that they touch, is read
    once and written once. Donate it, or XLA copies it before the kernel updates it in place.

    Args:
        prev_x, prev_dt, prev_B: the pending record of the previous tree of `O` nodes.
        prev_path: its accepted path; all False (a first step) leaves the state as it is.
        x, dt, A, B, C, D, ancestor_mask: the new tree of `N` nodes, as in `tree_scan`; outputs are
            those of the last `Q`.
        state: the state before the root of the previous tree, float32.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        The outputs in the dtype of `x`, and the state before the root of the new tree, float32.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    arguments = (prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, ancestor_mask)
    with jax.named_scope("replay_tree_scan"), dispatch.on(x, state):
        reason = pallas_triton.unsupported(x.shape[-1], B.shape[-1], x.dtype)
        match dispatch.choose("replay_tree_scan", implementation, reason):
            case "xla":
                # Where this kernel cannot run those of the halves may.
                return xla.replay_tree_scan(*arguments, implementation=implementation)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.replay_tree_scan(*arguments, interpret=interpret)
