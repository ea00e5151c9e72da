"""The gated delta rule over a tree, over a sequence, and the replay of an accepted path.

It is the recurrence of Qwen3-Next and Qwen3.5 (Gated DeltaNet: Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464). From the state S of a node's parent, with q and k normed, a head computes

    S <- exp(g) S;   u = beta (v - S k);   S <- S + u (outer) k;   y = S q.

g is one number a head, or one for each channel of k (Kimi Delta Attention: Kimi Team 2025,
arXiv:2510.26692), which multiplies the column of S of that channel.

In closed form over a tree (TreeWY arXiv:2608.20961, Bole arXiv:2608.01651), with `a_i` the sum of
the g of the ancestors-or-self of node i, and j above i if it is one of its ancestors:

    u_i + sum_{j above i} beta_i exp(a_i - a_j) (k_i . k_j) u_j = beta_i (v_i - exp(a_i) state k_i)
    y_i = exp(a_i) state q_i + sum_{j above i, or i} exp(a_i - a_j) (q_i . k_j) u_j,

where decays of channels stand inside of the products with k_j and with the state. Their exponents
are differences, of one channel at a time, and at most 0. So no gate needs a bound; keys that are
divided by decays, for products of matrices, would need one.

**Record.** `k`, `u` and `g` of the nodes. Replay has no system to solve, and the order of nodes
enters by decays alone. But u depends on the state that the tree was run from, unlike x, dt and B of
Mamba-2: a record is valid only with that state, not with one that was advanced or forked since.

**Norms.** q and k are given as the convolution leaves them. The ops norm each vector in float32,
`x / sqrt(sum(x * x) + 1e-6)`, and multiply q by `S ** -0.5` after that. So the record holds what
the convolution wrote, in its dtype, and a kernel needs no launch for norms.

**Existence.** A node exists if the mask has it in its own row, as `Tree.ancestor_mask` does. What
the others hold, NaN included, reaches nothing.

**Rounding.** float32 throughout. The exponent `a_i - a_j` is never a difference of rounded sums: of
sums of g in steps of 1/256, which are exact, and of sums of what is left of g.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels import dispatch, triton
from pallas_kernels import native as cpu
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Pending
from pallas_kernels.tree_delta import native, pallas_triton, xla
from pallas_kernels.tree_delta.gates import Decays, StepSizes


def tree_delta(
    q: Float[Array, "B Q G S"],
    k: Float[Array, "B N G S"],
    v: Float[Array, "B Q H P"],
    g: Float32[Array, "B N H *S"] | Decays,
    beta: Float32[Array, "B Q H"] | StepSizes,
    state: Float32[Array, "B H P S"],
    mask: Bool[Array, "B N N"],
    *,
    prefix_u: Float32[Array, "B prefix H P"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H P"], Float32[Array, "B N H P"]]:
    """Outputs of the gated delta rule at the last `Q` of the `N` nodes of a tree, see the module.

    `Q = N` verifies a whole tree; `Q < N` grows a tree by its newest nodes, from the same state.

    Args:
        q: queries of the query nodes, before the norm. Head h uses group `h // (H / G)`.
        k: keys of all nodes so far, before the norm, parents before children.
        v: values of the query nodes.
        g: log-decays of all nodes, at most 0: one a head, or `S`; or what a kernel makes them of.
        beta: step sizes of the query nodes, 0 to 1, or to 2 (negative eigenvalues); or what a
            kernel makes them of.
        state: the state before the root.
        mask: ancestors-or-self of each node; `mask[b, i, j]` is False for `j > i`, and
            `mask[b, i, i]` says whether node i exists. Rows of nodes that do not exist are
            otherwise arbitrary; their columns are False in the rows of nodes that do.
        prefix_u: u of the first `N - Q` nodes, from calls with the same state; None if `Q == N`.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Outputs of the query nodes in the dtype of `v`, and u of all nodes; both are 0 at query
        nodes that do not exist.

    Raises:
        ValueError: groups that do not divide the heads, decays that are neither of heads nor of
            channels, a prefix that is not of `N - Q` nodes.
    """
    prefix = 0 if prefix_u is None else prefix_u.shape[1]
    if prefix + q.shape[1] != k.shape[1]:
        raise ValueError(f"{prefix} prefix and {q.shape[1]} query nodes are not {k.shape[1]} nodes")
    tree = (q, k, v, _by_channel(g), beta, mask)
    y, u, _ = _run("tree_delta", (None, tree, state, prefix_u), implementation)
    return y, u if prefix_u is None else jnp.concatenate([prefix_u, u], axis=1)


def replay_delta(
    k: Float[Array, "B N G S"],
    u: Float32[Array, "B N H P"],
    g: Float32[Array, "B N H *S"] | Decays,
    state: Float32[Array, "B H P S"],
    path: Bool[Array, "B N"],
    *,
    implementation: str | None = None,
) -> Float32[Array, "B H P S"]:
    """Advances a state along a path of the tree that was run from it.

    With l the last node of the path and sums over the path only,

        state' = exp(a_l) state + sum_j exp(a_l - a_j) u_j (outer) k_j.

    Args:
        k: keys of the nodes, before the norm, parents before children.
        u: what `tree_delta` returned for them.
        g: log-decays of the nodes.
        state: the state before the root.
        path: a root-to-node path; all False returns the state unchanged. What other nodes hold
            reaches nothing.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The new state.

    Raises:
        ValueError: groups that do not divide the heads, decays that are neither of heads nor of
            channels.
    """
    previous = (k, u, _by_channel(g), path)
    return _run("replay_delta", (previous, None, state, None), implementation)[2]


def replay_tree_delta(
    prev_k: Float[Array, "B O G S"],
    prev_u: Float32[Array, "B O H P"],
    prev_g: Float32[Array, "B O H *S"] | Decays,
    prev_path: Bool[Array, "B O"],
    q: Float[Array, "B N G S"],
    k: Float[Array, "B N G S"],
    v: Float[Array, "B N H P"],
    g: Float32[Array, "B N H *S"] | Decays,
    beta: Float32[Array, "B N H"] | StepSizes,
    state: Float32[Array, "B H P S"],
    ancestor_mask: Bool[Array, "B N N"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N H P"], Float32[Array, "B N H P"], Float32[Array, "B H P S"]]:
    """`replay_delta` along the previous tree's path, then `tree_delta` of a whole new tree.

    Args:
        prev_k, prev_u, prev_g: the record of the previous tree of `O` nodes. If `prev_g` and `g`
            are both `Decays`, they have one `A_log`: that of the layer.
        prev_path: accepted path of the previous tree; all False (a first step) is a no-op.
        q, k, v, g, beta, ancestor_mask: the new tree of `N` nodes, as in `tree_delta`.
        state: the state before the root of the previous tree.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Outputs and u of the new tree, and the state before its root.

    Raises:
        ValueError: groups that do not divide the heads, decays that are neither of heads nor of
            channels.
    """
    previous = (prev_k, prev_u, _by_channel(prev_g), prev_path)
    tree = (q, k, v, _by_channel(g), beta, ancestor_mask)
    return _run("replay_tree_delta", (previous, tree, state, None), implementation)


def tree_delta_layer(
    convolution: Convolution,
    A_log: Float32[Array, " H"],
    beta: StepSizes,
    state: Float32[Array, "B H P S"],
    mask: Bool[Array, "B N N"],
    path: Bool[Array, "B O"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Array, Mamba2Pending, Array, Array] | None:
    """A layer with decays of heads, from the input projection to the outputs, as one kernel.

    It is `tree_conv1d_layer`, and then `tree_delta` or, after a previous tree, `replay_tree_delta`.

    Args:
        convolution: the arguments of `tree_conv1d_layer`; x of its records is u.
        A_log: of the `Decays`, whose time steps the convolution makes.
        beta, mask: as in `tree_delta`.
        state, path: as in `tree_scan_layer`.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs, the record, and both states before the root, with the bits of the two ops.
        None if they have to be two: their kernels do not run here, or there are too many nodes.

    Raises:
        ValueError: a projection or weights that do not fit the layout.
    """
    previous, prefix_u = None, None
    if convolution.previous is not None:
        old, _ = convolution.previous
        previous = old.B, old.x, Decays(old.dt, A_log), path
    if convolution.prefix_pending is not None:
        prefix_u = convolution.prefix_pending.x

    def fits() -> bool:
        return pallas_triton.convolves(convolution, state)

    arrays = previous, (A_log, beta, mask), state, prefix_u, convolution
    with dispatch.kernel("tree_delta_layer", implementation, fits, arrays[::-1]) as interpret:
        if interpret is None:
            return None
        convolution.check()
        results = pallas_triton.run(*arrays, interpret=interpret)
    u = results["u"] if prefix_u is None else jnp.concatenate([prefix_u, results["u"]], axis=1)
    record = Mamba2Pending(u, *(results[name] for name in Mamba2Pending._fields[1:]))
    conv_state = results.get("conv_state", convolution.conv_state)
    return results["y"], record, results.get("state", state), conv_state


def delta_chunks(
    q: Float[Array, "B T G S"],
    k: Float[Array, "B T G S"],
    v: Float[Array, "B T H P"],
    g: Float32[Array, "B T H *S"] | Decays,
    beta: Float32[Array, "B T H"] | StepSizes,
    state: Float32[Array, "B H P S"],
    valid: Bool[Array, "B T"],
    *,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H P"], Float32[Array, "B H P S"]]:
    """Outputs of a whole sequence and the state after it, for prefill and training.

    Args:
        q, k, v, g, beta: of all positions, as in `tree_delta`.
        state: the state before the sequence.
        valid: True on real positions. The others, wherever they are, leave the state unchanged, and
            what they hold reaches nothing.
        chunk_size: trades speed for memory in XLA's version; changes rounding only.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs in the dtype of `v`, 0 at positions that are not valid, and the state after the
        last position. All derivatives are XLA's.

    Raises:
        ValueError: a chunk size below 1, groups that do not divide the heads, decays that are
            neither of heads nor of channels.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} is not positive")
    g = _by_channel(g)
    return dispatch.run(
        "delta_chunks",
        {"xla": functools.partial(xla.delta_chunks, chunk_size=chunk_size), "native": native},
        (q, k, v, g, beta, state, valid),
        requested=implementation,
        unsupported=_unsupported(q, k, v, g),
        xla_derivatives=("native",),
    )


def _by_channel(g: Any) -> Any:
    """Decays `[B, N, H, 1]`, or `[B, N, H, S]`."""
    return g if len(g.shape) == 4 else g[..., None]


def _run(op: str, arrays: tuple[Any, ...], implementation: str | None) -> Any:
    """Outputs and u of a new tree's queries, or None, and the state before the tree.

    Arrays are k, u, g and path of a previous tree, or None; q, k, v, g, beta and mask of a new one,
    or None; the state, and u of the nodes before the queries or None. Each version has one function
    of them.
    """
    previous, tree, *_ = arrays
    q, k, v, g = tree[:4] if tree else (previous[0], *previous[:3])
    return dispatch.run(
        op,
        {"xla": xla.scan, "native": native.scan, "pallas": pallas_triton.scan},
        arrays,
        requested=implementation,
        unsupported=_unsupported(q, k, v, g),
        xla_derivatives=True,
    )


def _unsupported(q: jax.Array, k: jax.Array, v: jax.Array, g: Any) -> dict[str, str | None]:
    """Why versions cannot run these shapes; a ValueError if no version can."""
    if v.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} groups do not divide {v.shape[2]} heads")
    if g.shape[2] != v.shape[2] or g.shape[3] not in (1, k.shape[3]):
        raise ValueError(
            f"decays g of {g.shape[2:]} are neither of {v.shape[2]} heads nor of their"
            f" {k.shape[3]} channels of k"
        )
    sizes = dict(head_dim=v.shape[-1], state_size=k.shape[-1])
    return {
        "native": cpu.unsupported(q, k, v, **sizes),
        "pallas": triton.unsupported_state(**sizes, dtype=k.dtype, most=pallas_triton.MOST_STATE),
    }
