"""The scan of a tree (STree: Wu et al. 2025, arXiv:2505.14969) and activation replay.

`tree_scan` computes the outputs of all nodes from one state; `replay` advances the state along the
accepted path; `replay_tree_scan` is one step of a speculative loop: both in one pass over the
state.
"""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels import dispatch, triton
from pallas_kernels import native as cpu
from pallas_kernels.numerics import DeferredRMSNorm
from pallas_kernels.tree_conv1d.api import convolved_nodes
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Pending
from pallas_kernels.tree_scan import jax_triton_versions, native, pallas_triton, xla
from pallas_kernels.tree_scan.gate import Gate


def tree_scan(
    x: Float[Array, "B N H P"],
    dt: Float[Array, "B N H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N G S"],
    C: Float[Array, "B Q G S"],
    D: Float[Array, "H P"] | Float[Array, " H"],
    state: Float[Array, "B H P S"],
    mask: Bool[Array, "B N N"],
    *,
    gate: Gate | None = None,
    A_is_log: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B Q H P"] | DeferredRMSNorm:
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
        C: output projections of the query nodes only.
        D: skip weight per channel or per head, float32.
        state: the state before the root, float32.
        mask: ancestors-or-self of each node; `mask[b, i, j]` is False for `j > i`. Rows of invalid
            nodes are otherwise arbitrary; their columns are False in the rows of valid nodes.
        gate: gates the outputs before they are written, and may start a norm; None: no gate.
        A_is_log: whether A holds `log(-A)`, as models store it.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Outputs of the query nodes in the dtype of `x`; with a norm after the gate, a
        `DeferredRMSNorm` of rows `[B, Q, H * P]`. Rounding: float32 throughout; where it is
        computed as above the exponent is a difference of sums, so a weight is off by about
        `1e-7 |a_i|`. Native code runs the recurrence from parent to child: of the mask it reads
        which node is the parent, the last one above, and whether a node is there at all.

    Raises:
        ValueError: a gate that does not fit.
    """
    tree = (x, dt, B, C, D, mask)
    return _run("tree_scan", (None, tree, A, state, gate), implementation, A_is_log)[0]


def replay(
    x: Float[Array, "B N H P"],
    dt: Float[Array, "B N H"],
    A: Float[Array, " H"],
    B: Float[Array, "B N G S"],
    state: Float[Array, "B H P S"],
    path: Bool[Array, "B N"],
    *,
    A_is_log: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B H P S"]:
    """Advances a state along a path of the tree, without a state per node.

    With l the last node of the path and sums over the path only,

        state' = exp(a_l) state + sum_k exp(a_l - a_k) dt_k x_k (outer) B_k.

    Args:
        x: scan inputs of the nodes, parents before children.
        dt: time steps in float32, after softplus and clamp.
        A: negative, float32.
        B: head h uses group `h // (H / G)`.
        state: the state before the root, float32. Donate it: the kernel updates it in place.
        path: a root-to-node path; all False returns the state unchanged.
        A_is_log: whether A holds `log(-A)`, as models store it.
        implementation: a name from `dispatch.IMPLEMENTATIONS`, or "jax_triton"; None: the fastest
            that runs here.

    Returns:
        The new state, float32.
    """
    previous = (x, dt, B, path)
    return _run("replay", (previous, None, A, state, None), implementation, A_is_log)[1]


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
    D: Float[Array, "H P"] | Float[Array, " H"],
    state: Float[Array, "B H P S"],
    ancestor_mask: Bool[Array, "B N N"],
    *,
    gate: Gate | None = None,
    A_is_log: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H P"] | DeferredRMSNorm, Float[Array, "B H P S"]]:
    """`replay` along the previous tree's path, then `tree_scan` of a new tree.

    Same result as the two calls, but the state, which is larger than all other inputs together, is
    read once and written once. Donate it, or XLA copies it before the kernel updates it in place.

    Args:
        prev_x, prev_dt, prev_B: the pending record of the previous tree of `O` nodes.
        prev_path: accepted path of the previous tree; all False (a first step) is a no-op.
        x, dt, A, B, C, D, ancestor_mask, gate, A_is_log: the new tree of `N` nodes, as in
            `tree_scan`; outputs are computed at the last `Q`.
        state: the state before the root of the previous tree, float32.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs as `tree_scan` returns them, and the state before the root of the new tree,
        float32.

    Raises:
        ValueError: a gate that does not fit.
    """
    previous, tree = (prev_x, prev_dt, prev_B, prev_path), (x, dt, B, C, D, ancestor_mask)
    arrays = (previous, tree, A, state, gate)
    return _run("replay_tree_scan", arrays, implementation, A_is_log)


def tree_scan_layer(
    convolution: Convolution,
    A_log: Float32[Array, " H"],
    D: Float[Array, "H P"] | Float[Array, " H"],
    state: Float[Array, "B H P S"],
    mask: Bool[Array, "B N N"],
    path: Bool[Array, "B O"] | None = None,
    *,
    gate: Gate | None = None,
    implementation: str | None = None,
) -> tuple[Any, Mamba2Pending, Float[Array, "B H P S"], Float[Array, "B J C"]]:
    """Everything between the projections of a Mamba-2 layer, over a tree.

    It is `tree_conv1d_layer`, and then `tree_scan` or, after a previous tree, `replay_tree_scan`.
    Of few nodes both kernels are one, with the same bits.

    Args:
        convolution: the arguments of `tree_conv1d_layer`.
        A_log: `log(-A)`, float32.
        D, mask, gate: as in `tree_scan`.
        state: of the scan, as old as the convolution's.
        path: accepted path of the previous tree, whose record the convolution has; None: there is
            no previous tree.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs as `tree_scan` returns them, the pending record of all `N` nodes, and the states
        of the scan and of the convolution before this tree's root.

    Raises:
        ValueError: a projection, weights or a gate that do not fit the layout.
    """
    replayed = None
    if convolution.previous is not None:
        old, _ = convolution.previous
        replayed = old.x, old.dt, old.B, path

    def fits() -> bool:
        return pallas_triton.convolves(convolution, mask.shape[1], state)

    arrays: Any = replayed, (D, mask), A_log, state, gate, convolution
    with dispatch.kernel("tree_scan_layer", implementation, fits, arrays[::-1]) as interpret:
        if interpret is not None:
            convolution.check()
            if gate is not None:
                gate.check(convolution.layout.num_heads, convolution.layout.head_dim)
            return pallas_triton.tree_scan_layer(*arrays, interpret=interpret)
    pending, C, conv_state = convolved_nodes(convolution, implementation)
    tree = pending.x, pending.dt, pending.B, C, D, mask
    op = "tree_scan" if replayed is None else "replay_tree_scan"
    y, state = _run(op, (replayed, tree, A_log, state, gate), implementation, A_is_log=True)
    return y, pending, state, conv_state


def _run(op: str, arrays: tuple[Any, ...], implementation: str | None, A_is_log: bool) -> Any:
    """The outputs of a new tree, or None, and the state before it; a ValueError for a wrong gate.

    Arrays are x, dt, B and path of a previous tree, or None; x, dt, B, C, D and mask of a new one,
    or None; A, the state, and the gate. Each version has one function of them.
    """
    previous, tree, _, _, gate = arrays
    x, _, B, *_ = tree or previous
    if gate is not None:
        gate.check(*x.shape[2:])
    sizes = dict(head_dim=x.shape[-1], state_size=B.shape[-1])
    unsupported = {
        "pallas": triton.unsupported_state(**sizes, dtype=x.dtype, most=pallas_triton.MOST_STATE),
        "native": cpu.unsupported(x, **sizes),
    }
    versions: dict[str, Any] = {
        "xla": xla.scan,
        "pallas": pallas_triton.scan,
        "native": native.scan,
    }
    if tree is None:
        versions["jax_triton"] = _jax_triton_replay
    if implementation == "jax_triton":
        unsupported["jax_triton"] = jax_triton_versions.obstacle() or unsupported["pallas"]
    return dispatch.run(
        op,
        versions,
        arrays,
        requested=implementation,
        unsupported=unsupported,
        xla_derivatives=("native",),
        A_is_log=A_is_log,
    )


def _jax_triton_replay(
    previous: Any, _tree: None, A: jax.Array, state: jax.Array, _gate: None, *, A_is_log: bool
) -> tuple[None, jax.Array]:
    from pallas_kernels.tree_scan import jax_triton  # needs triton

    x, dt, B, path = previous
    return None, jax_triton.replay(x, dt, xla.rates(A, A_is_log), B, state, path)
