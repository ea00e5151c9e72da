"""Depthwise causal convolution over a tree.

Each node convolves the inputs of its `K` nearest ancestors-or-self and continues, above the root,
into the conv state. Which rows those are depends on the tree alone, so the index table
(`conv_window`) is computed once a step and shared by all layers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.tree_conv1d import pallas_triton, xla

ACTIVATIONS = (None, "silu")


def conv_window(parents: Int[Array, "B N"], width: int) -> Int[Array, "B N K"]:
    """Rows of `concat(conv_state, inputs)` that each node convolves, oldest first.

    Args:
        parents: `[B, N]`, parents before children, -1 above a root.
        width: the conv width `K`.

    Worked example, `K = 4`, so rows 0 1 2 are the state's columns c0 c1 c2 and row `3 + i` is node
    i:
        root (node 0)          reads rows 0 1 2 3    = c0 c1 c2 x0
        node 2, child of root  reads rows 1 2 3 5    = c1 c2 x0 x2
        node 5, child of 2     reads rows 2 3 5 8    = c2 x0 x2 x5
    A virtual node -1 stands for c2, -2 for c1, ...; the parent of -1 is -2. Row = node + K - 1.
    """
    nodes = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32), parents.shape)
    return _walk(parents, nodes, width) + width - 1


def replay_window(
    parents: Int[Array, "B N"], last: Int[Array, " B"], width: int
) -> Int[Array, "B J"]:
    """Rows of `concat(conv_state, inputs)` that are the conv state after the path ending in `last`.

    `last = -1` is the empty path: the rows of the state itself. `J = K - 1`.
    """
    return _walk(parents, last[:, None], width - 1)[:, 0] + width - 1


def _walk(parents: jax.Array, nodes: jax.Array, length: int) -> jax.Array:
    """The `length` nearest ancestors-or-self of `nodes` `[B, Q]`, oldest first."""
    path = [nodes]
    for _ in range(length - 1):
        above = jnp.take_along_axis(parents, jnp.maximum(path[-1], 0), axis=1)
        path.append(jnp.where(path[-1] >= 0, above, path[-1] - 1))
    return jnp.stack(path[::-1], axis=-1)


def tree_conv1d(
    inputs: Float[Array, "B N C"],
    conv_state: Float[Array, "B J C"],
    weight: Float[Array, "K C"],
    bias: Float[Array, " C"] | None,
    window: Int[Array, "B Q K"],
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B Q C"]:
    """Convolves the `Q` query nodes of a tree of `N` nodes.

    Args:
        inputs: the conv inputs of all nodes so far.
        conv_state: the `J = K - 1` inputs before the root, oldest first.
        weight: oldest tap first.
        bias: optional.
        window: the query rows of `conv_window(parents, K)`.
        activation: "silu", applied before anything is rounded, or None.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        The convolution at the query nodes, accumulated in float32, in the dtype of `inputs`.

    Raises:
        ValueError: an unknown activation, or an implementation that does not exist or cannot run
            these shapes.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r} is not one of {ACTIVATIONS}")
    arguments = (inputs, conv_state, weight, bias, window)
    with jax.named_scope("tree_conv1d"), dispatch.on(inputs, conv_state, weight):
        reason = pallas_triton.unsupported(inputs.shape[-1], weight.shape[0])
        match dispatch.choose("tree_conv1d", implementation, reason):
            case "xla":
                return xla.tree_conv1d(*arguments, activation=activation)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.tree_conv1d(
                    *arguments, activation=activation, interpret=interpret
                )


def replay_conv_state(
    inputs: Float[Array, "B N C"],
    conv_state: Float[Array, "B J C"],
    window: Int[Array, "B J"],
) -> Float[Array, "B J C"]:
    """The conv state after one path of the tree: its last `J = K - 1` inputs, oldest first.

    Args:
        inputs: the conv inputs of the tree's nodes.
        conv_state: the `J` inputs before the root.
        window: `replay_window(parents, last, K)`.
    """
    with jax.named_scope("replay_conv_state"):
        context = jnp.concatenate([conv_state, inputs.astype(conv_state.dtype)], axis=1)
        return jnp.take_along_axis(context, window[..., None], axis=1)
