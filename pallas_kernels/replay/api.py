"""The state after one path of a tree: activation replay (STree, algorithm 1), in closed form."""

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels import dispatch, jax_triton_backend
from pallas_kernels.replay import pallas_triton, xla


def replay(
    x: Float[Array, "B N H P"],
    dt: Float[Array, "B N H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N G S"],
    state: Float[Array, "B H P S"],
    path: Bool[Array, "B N"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B H P S"]:
    """Advances a state along the nodes that `path` marks, without a state per node.

    With l the last node of the path and sums over the path only,

        state' = exp(a_l) state + sum_k exp(a_l - a_k) dt_k x_k (outer) B_k.

    Args:
        x: scan inputs of the nodes, parents before children.
        dt: time steps in float32, after softplus and clamp.
        A: negative, float32.
        B: head h uses group `h // (H / G)`.
        state: the state before the root, float32.
        path: a root-to-node path; all False returns the state unchanged.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        The new state, float32.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    with jax.named_scope("replay"), dispatch.on(x, state):
        reason = pallas_triton.unsupported(x.shape[-1], B.shape[-1])
        others = {"jax_triton": jax_triton_backend.obstacle}
        match dispatch.choose("replay", implementation, reason, others=others):
            case "xla":
                return xla.replay(x, dt, A, B, state, path)
            case "jax_triton":
                from pallas_kernels.replay import jax_triton  # needs triton

                return jax_triton.replay(x, dt, A, B, state, path)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.replay(x, dt, A, B, state, path, interpret=interpret)
