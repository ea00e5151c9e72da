"""Depthwise causal convolution over a tree.

Each node convolves the inputs of its `K` nearest ancestors-or-self; above the root the path
continues into the conv state. The rows to read depend on the tree alone, so the gather index
(`conv_gather_index`) is computed once per step and shared by all layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.numerics import PartialSums
from pallas_kernels.tree_conv1d import native, pallas_triton, xla
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Layout, Mamba2Pending

ACTIVATIONS = (None, "silu")


def conv_gather_index(parents: Int[Array, "B N"], width: int) -> Int[Array, "B N K"]:
    """The conv gather index: rows of `concat(conv_state, inputs)` that each node convolves.

    Args:
        parents: `[B, N]`, parents before children, -1 above a root.
        width: the conv width `K`.

    Returns:
        Row numbers, oldest tap first.

    Worked example, `K = 4`, so rows 0 1 2 are the state's columns c0 c1 c2 and row `3 + i` is node
    i:

        root (node 0)          reads rows 0 1 2 3    = c0 c1 c2 x0
        node 2, child of root  reads rows 1 2 3 5    = c1 c2 x0 x2
        node 5, child of 2     reads rows 2 3 5 8    = c2 x0 x2 x5

    A virtual node -1 stands for c2, -2 for c1, ...; the parent of -1 is -2. Row = node + K - 1.
    """
    nodes = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32), parents.shape)
    return _walk(parents, nodes, width) + width - 1


def replay_gather_index(
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
    conv_gather_index: Int[Array, "B Q K"],
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
        conv_gather_index: the query rows of `conv_gather_index(parents, K)`.
        activation: "silu", applied before rounding, or None.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The convolution at the query nodes, accumulated in float32, in the dtype of `inputs`.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r} is not one of {ACTIVATIONS}")
    width, channels = weight.shape
    reason = pallas_triton.unsupported(channels, width)
    own = native.unsupported(inputs, width, channels=channels)
    return dispatch.run(
        "tree_conv1d",
        {"xla": xla, "pallas": pallas_triton, "native": native},
        (inputs, conv_state, weight, bias, conv_gather_index),
        requested=implementation,
        unsupported={"pallas": reason, "native": own},
        xla_derivatives=("native",),
        activation=activation,
    )


def tree_conv1d_layer(
    projected: Float[Array, "B Q X"] | PartialSums,
    conv_weight: Float[Array, "K C"],
    conv_bias: Float[Array, " C"] | None,
    dt_bias: Float32[Array, " H"],
    conv_state: Float[Array, "B J C"],
    conv_gather_index: Int[Array, "B Q K"],
    *,
    layout: Mamba2Layout,
    prefix_pending: Mamba2Pending | None = None,
    previous: tuple[Mamba2Pending, Int[Array, "B J"]] | None = None,
    implementation: str | None = None,
) -> tuple[Mamba2Pending, Float[Array, "B Q G S"], Float[Array, "B J C"]]:
    """Everything between a Mamba-2 layer's input projection and its scan, over a tree.

    Convolution with SiLU, time steps, and the pending record. As a kernel it is one launch, which
    reads the projection in place and convolves each channel once.

    Args:
        projected: the input projection at the last `Q` of the `N` nodes; columns as in `layout`.
        conv_weight, conv_bias: see `tree_conv1d`; for the channels x, B and C.
        dt_bias: bias of the time steps before softplus.
        conv_state: the `J = K - 1` conv inputs before the root: of the previous tree if there is
            one, otherwise of this tree.
        conv_gather_index: the query rows of `conv_gather_index(parents, K)`.
        layout: the columns of the projection.
        prefix_pending: the pending record of the first `N - Q` nodes; None if `Q == N`.
        previous: the previous tree's pending record, and `replay_gather_index` of its accepted
            path; the conv state advances along it first. None: it is up to date.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The pending record of all `N` nodes, C of the query nodes, and the conv state before this
        tree's root.

    Raises:
        ValueError: a projection or weights that do not fit the layout.
    """
    arrays = projected, conv_weight, conv_bias, dt_bias, conv_state, conv_gather_index
    return convolved_nodes(Convolution(*arrays, prefix_pending, previous, layout), implementation)


def convolved_nodes(convolution: Convolution, implementation: str | None) -> Any:
    """`tree_conv1d_layer` of these arguments."""
    convolution.check()
    layout, width = convolution.layout, len(convolution.conv_weight)
    reason = pallas_triton.unsupported_layer(layout, width)
    return dispatch.run(
        "tree_conv1d_layer",
        {"xla": xla, "pallas": pallas_triton, "native": native},
        convolution.arrays,
        requested=implementation,
        unsupported={
            "pallas": reason,
            "native": native.unsupported_layer(convolution.projected, layout, width),
        },
        xla_derivatives=("native",),
        layout=layout,
    )


def short_conv_layer(
    projected: Float[Array, "B Q X"] | PartialSums,
    weight: Float[Array, "K C"],
    bias: Float[Array, " C"] | None,
    conv_state: Float[Array, "B J C"],
    conv_gather_index: Int[Array, "B Q K"],
    *,
    prefix_pending: Float[Array, "B _ C"] | None = None,
    previous: tuple[Float[Array, "B O C"], Int[Array, "B J"]] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q C"], Float[Array, "B N C"], Float[Array, "B J C"]]:
    """A gated short convolution (LFM2) between its projections, over a tree: `c conv(b x)`.

    Args:
        projected: the input projection at the last `Q` of the `N` nodes, columns `[b | c | x]`.
        weight, bias, conv_gather_index: see `tree_conv1d`.
        conv_state: the `J = K - 1` products `b x` before the root: of the previous tree if there is
            one, otherwise of this tree.
        prefix_pending: the products of the first `N - Q` nodes; None if `Q == N`.
        previous: the products of the previous tree, and `replay_gather_index` of its accepted path;
            the conv state advances along it first. None: it is up to date.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Outputs at the query nodes; the products `b x` of all `N` nodes, which are the pending
        record; and the conv state before this tree's root. The convolution is rounded before it is
        gated.

    Raises:
        ValueError: a projection that does not have three columns for each channel.
    """
    width, channels = weight.shape
    if projected.shape[-1] != 3 * channels:
        raise ValueError(
            f"{projected.shape[-1]} columns of the projection are not b, c and x of {channels}"
            " channels"
        )
    # The convolution chooses for itself: it has native code.
    convolve = functools.partial(tree_conv1d, implementation=implementation)
    return dispatch.run(
        "short_conv_layer",
        {
            "xla": functools.partial(xla.short_conv_layer, convolve=convolve),
            "pallas": pallas_triton,
        },
        (projected, weight, bias, conv_state, conv_gather_index, prefix_pending, previous),
        requested=implementation,
        unsupported={"pallas": pallas_triton.unsupported(channels, width)},
    )


def replay_conv_state(
    inputs: Float[Array, "B N C"],
    conv_state: Float[Array, "B J C"],
    replay_gather_index: Int[Array, "B J"],
) -> Float[Array, "B J C"]:
    """The conv state after one path of the tree: its last `J = K - 1` inputs, oldest first.

    Args:
        inputs: the conv inputs of the tree's nodes.
        conv_state: the `J` inputs before the root.
        replay_gather_index: `replay_gather_index(parents, last, K)`.
    """
    with jax.named_scope("replay_conv_state"):
        return xla.replay_conv_state(inputs, conv_state, replay_gather_index)
