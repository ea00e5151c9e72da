"""The state-space output of every node of a tree, from one state (STree, section 3)."""

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels import dispatch, jax_triton_backend
from pallas_kernels.tree_scan import pallas_triton, xla


def tree_scan(
    x: Float[Array, "B N H P"],
    dt: Float[Array, "B N H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N G S"],
    C: Float[Array, "B Q G S"],
    D: Float[Array, "H P"],
    state: Float[Array, "B H P S"],
    mask: Bool[Array, "B N N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B Q H P"]:
    """Mamba-2 outputs at the last `Q` of the `N` nodes of a tree.

    With `a_i` the sum of `dt_j * A` over the ancestors-or-self j of node i,

        y_i = C_i . (exp(a_i) state) + sum_j mask_ij exp(a_i - a_j) dt_j (C_i . B_j) x_j + D x_i.

    `Q = N` verifies a whole tree; `Q < N` grows a tree by its newest nodes, from the same one
    state.

    Args:
        x: scan inputs of all nodes so far, parents before children.
        dt: time steps in float32, after softplus and clamp.
        A: negative, float32.
        B: head h uses group `h // (H / G)`.
        C: of the query nodes only.
        D: the skip weight of each channel, float32.
        state: the state before the root, float32.
        mask: ancestors-or-self of each node, `mask[b, i, j]` only for `j <= i`. Rows of nodes that
            do not exist may hold anything within that; columns of such nodes are False for the
            others.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Outputs of the query nodes in the dtype of `x`. Rounding: float32 throughout, and the
        exponent `a_i - a_j` is a difference of sums, so a weight is off by about `1e-7 |a_i|`.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    with jax.named_scope("tree_scan"), dispatch.on(x, state):
        reason = pallas_triton.unsupported(x.shape[-1], B.shape[-1])
        others = {"jax_triton": jax_triton_backend.obstacle}
        match dispatch.choose("tree_scan", implementation, reason, others=others):
            case "xla":
                return xla.tree_scan(x, dt, A, B, C, D, state, mask)
            case "jax_triton":
                from pallas_kernels.tree_scan import jax_triton  # needs triton

                return jax_triton.tree_scan(x, dt, A, B, C, D, state, mask)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.tree_scan(x, dt, A, B, C, D, state, mask, interpret=interpret)
