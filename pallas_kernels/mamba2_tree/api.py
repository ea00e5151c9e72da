"""One Mamba-2 layer over the nodes of a tree, from its input to its output projection."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.mamba2_tree import pallas_triton, xla
from pallas_kernels.mamba2_tree.layout import Layout
from pallas_kernels.numerics import Unscaled


class Mamba2Weights(NamedTuple):
    """What is learned between the projections; the last three are float32."""

    conv_weight: Float[Array, "K C"]
    conv_bias: Float[Array, " C"] | None
    dt_bias: Float[Array, " H"]
    A_log: Float[Array, " H"]
    D: Float[Array, " D"]  # per head, or per channel of every head

    def A(self) -> Float32[Array, " H"]:
        """The recurrence's rates, negative."""
        return -jnp.exp(self.A_log.astype(jnp.float32))

    def skip(self, layout: Layout) -> Float32[Array, "H P"]:
        """D of every channel."""
        per_channel = self.D.astype(jnp.float32).reshape(layout.num_heads, -1)
        return jnp.broadcast_to(per_channel, (layout.num_heads, layout.head_dim))


class Mamba2Pending(NamedTuple):
    """What a Mamba-2 layer needs to advance along any path of a tree of N nodes."""

    x: Float[Array, "B N H P"]
    dt: Float32[Array, "B N H"]
    B: Float[Array, "B N G S"]
    conv_input: Float[Array, "B N C"]


class Previous(NamedTuple):
    """The tree before, and the path of it that was accepted."""

    pending: Mamba2Pending
    path: Bool[Array, "B O"]
    window: Int[Array, "B J"]  # `replay_window` of that path


def mamba2_tree(
    projected: Float[Array, "B Q X"],
    weights: Mamba2Weights,
    ssm: Float32[Array, "B H P S"],
    conv_state: Float[Array, "B J C"],
    window: Int[Array, "B Q K"],
    ancestor_mask: Bool[Array, "B N N"],
    *,
    layout: Layout,
    grown: Mamba2Pending | None = None,
    previous: Previous | None = None,
    gated: bool = False,
    norm_weight: Float[Array, " HP"] | None = None,
    norm_epsilon: float = 1e-5,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "B Q HP"] | Unscaled,
    Mamba2Pending,
    Float32[Array, "B H P S"],
    Float[Array, "B J C"],
]:
    """Convolution, time steps, scan and gate of the last `Q` nodes of a tree of `N`.

    The state is replayed along the accepted path of the previous tree first. On a GPU all of it is
    one kernel, which reads and writes the state once. Donate the state, or XLA copies it before.

    Args:
        projected: the input projection at the query nodes.
        weights: of the convolution and the scan.
        ssm, conv_state: before the root of the previous tree, if there is one, else of this one.
        window: the query rows of `conv_window(parents, K)`.
        ancestor_mask: of all `N` nodes.
        layout: of the projection.
        grown: the record of the first `N - Q` nodes; None if `Q == N`.
        previous: the previous tree; None: the states are those before this tree's root.
        gated: multiply the outputs by `silu(z)`.
        norm_weight: of a norm of the gated outputs over all `H * P` channels, which is then
            done but for the rows' scales; None: no norm, or one that is not of this kind.
        norm_epsilon: of that norm.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Outputs at the query nodes, `Unscaled` if there is a norm; the record of all nodes; both
        states before this tree's root.

    Raises:
        ValueError: a norm of outputs that are not gated, or an implementation that does not exist
            or cannot run these shapes.
    """
    if norm_weight is not None and not gated:
        raise ValueError("norm_weight is of a norm behind the gate, and gated = False")
    arguments = (projected, weights, ssm, conv_state, window, ancestor_mask)
    with jax.named_scope("mamba2_tree"):
        # jax-triton has some of the parts, and not this.
        parts_only = implementation == "jax_triton"
        reason = pallas_triton.unsupported(layout, window.shape[2], projected.dtype)
        match dispatch.choose("mamba2_tree", "xla" if parts_only else implementation, reason):
            case "xla":
                # Where this kernel cannot run those of the parts may.
                run = functools.partial(xla.mamba2_tree, implementation=implementation)
            case chosen:
                interpret = chosen == "pallas_interpret"
                run = functools.partial(pallas_triton.mamba2_tree, interpret=interpret)
        y, record, ssm, conv_state = run(
            *arguments,
            layout=layout,
            grown=grown,
            previous=previous,
            gated=gated,
            norm_weight=norm_weight,
            norm_epsilon=norm_epsilon,
        )
        return y, Mamba2Pending(*record), ssm, conv_state
