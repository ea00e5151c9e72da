"""One Mamba-2 layer over the nodes of a tree, from its input to its output projection."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.mamba2_tree import pallas_triton, xla
from pallas_kernels.mamba2_tree.layout import Layout
from pallas_kernels.mamba2_tree.records import Mamba2Pending, RecordQueue, after_turn, oldest_record
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


class Previous(NamedTuple):
    """The tree before, and the path of it that was accepted."""

    pending: Mamba2Pending | RecordQueue  # of a queue the oldest record, which is this layer's
    path: Bool[Array, "B O"]
    window: Int[Array, "B J"]  # `replay_window` of that path


def implementation_of_mamba2_tree(
    layout: Layout, conv_width: int, dtype: DTypeLike, implementation: str | None
) -> str:
    """What `mamba2_tree` runs as. "xla": it copies a whole queue of records, and does not need one.

    Args:
        layout: of the projection.
        conv_width: K of the convolution.
        dtype: of the projection.
        implementation: what is asked for.

    Raises:
        ValueError: it does not exist or cannot run these shapes.
    """
    # jax-triton has some of the parts, and not this.
    requested = "xla" if implementation == "jax_triton" else implementation
    reason = pallas_triton.unsupported(layout, conv_width, dtype)
    return dispatch.choose("mamba2_tree", requested, reason)


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
    Mamba2Pending | RecordQueue,
    Float32[Array, "B H P S"],
    Float[Array, "B J C"],
]:
    """Convolution, time steps, scan and gate of the last `Q` nodes of a tree of `N`.

    The state is replayed along the accepted path of the previous tree first. On a GPU all of it is
    one kernel, which reads and writes the state once. Donate the state and a queue of records, or
    XLA copies them before.

    Args:
        projected: the input projection at the query nodes.
        weights: of the convolution and the scan.
        ssm, conv_state: before the root of the previous tree, if there is one, else of this one.
        window: the query rows of `conv_window(parents, K)`.
        ancestor_mask: of all `N` nodes.
        layout: of the projection.
        grown: the record of the first `N - Q` nodes; None if `Q == N`.
        previous: the previous tree; None: the states are those before this tree's root. If its
            record is in a queue, that of this tree goes into the queue too.
        gated: multiply the outputs by `silu(z)`.
        norm_weight: of a norm of the gated outputs over all `H * P` channels, which is then
            done but for the rows' scales; None: no norm, or one that is not of this kind.
        norm_epsilon: of that norm.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Outputs at the query nodes, `Unscaled` if there is a norm; the record of all nodes, or the
        queue with it; both states before this tree's root.

    Raises:
        ValueError: a norm of outputs that are not gated, a queue of records of trees of another
            size, or an implementation that does not exist or cannot run these shapes.
    """
    if norm_weight is not None and not gated:
        raise ValueError("norm_weight is of a norm behind the gate, and gated = False")
    queue = None
    if previous is not None and isinstance(previous.pending, RecordQueue):
        queue = previous.pending
        sizes = {"tree": ancestor_mask.shape[1], "path": previous.path.shape[1]}
        queued = queue.records.x.shape[2]
        for what, size in sizes.items():
            if size != queued:
                raise ValueError(
                    f"a {what} of {size} nodes does not fit a queue of trees of {queued};"
                    " fill trees up with nodes that are not valid, or pass records one by one"
                )
    arguments = (projected, weights, ssm, conv_state, window, ancestor_mask)
    with jax.named_scope("mamba2_tree"), dispatch.on(projected, ssm):
        width, dtype = window.shape[2], projected.dtype
        match implementation_of_mamba2_tree(layout, width, dtype, implementation):
            case "xla":
                # Where this kernel cannot run those of the parts may.
                run = functools.partial(xla.mamba2_tree, implementation=implementation)
                if queue is not None:
                    run = functools.partial(_with_queue, run)
            case chosen:
                interpret = chosen == "pallas_interpret"
                run = functools.partial(pallas_triton.mamba2_tree, interpret=interpret)
        return run(
            *arguments,
            layout=layout,
            grown=grown,
            previous=previous,
            gated=gated,
            norm_weight=norm_weight,
            norm_epsilon=norm_epsilon,
        )


def _with_queue(run, *arguments, previous: Previous, **options):
    """Runs what takes records one by one with a queue of them."""
    queue = previous.pending
    assert isinstance(queue, RecordQueue)
    previous = previous._replace(pending=oldest_record(queue))
    y, record, *states = run(*arguments, previous=previous, **options)
    return y, after_turn(queue, record), *states
