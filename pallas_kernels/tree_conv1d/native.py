"""`tree_conv1d` and `tree_conv1d_layer` by our own code, `native.cc`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.tree_conv1d.layout import Mamba2Layout, Mamba2Pending

_MOST_TAPS = 16


def unsupported(inputs: jax.Array, width: int, **sizes: int) -> str | None:
    """Why a convolution cannot run, or None."""
    if width > _MOST_TAPS:
        return f"convolutions are at most {_MOST_TAPS} wide"
    return native.unsupported(inputs, **sizes)


def unsupported_layer(projected: jax.Array, layout: Mamba2Layout, width: int) -> str | None:
    """Why a layer cannot run, or None."""
    if (layout.x_heads, layout.b_groups) != (layout.num_heads, layout.num_groups):
        return "heads of x or groups of B are repeated"
    _, channels, states, *_ = layout.sizes
    return unsupported(projected, width, channels=channels, states=states)


def tree_conv1d(
    *arrays: Any,
    activation: str | None,
) -> jax.Array:
    """See `api.tree_conv1d`, whose arrays these are."""
    inputs, conv_state, weight, bias, conv_gather_index = arrays
    shape = (*conv_gather_index.shape[:2], inputs.shape[2])
    floats = (conv_state, weight, jnp.zeros(0) if bias is None else bias)
    return native.call(
        *("tree_conv1d", jax.ShapeDtypeStruct(shape, jnp.float32), inputs),
        *(array.astype(jnp.float32) for array in floats),
        conv_gather_index.astype(jnp.int32),
        has_silu=int(activation == "silu"),
    )


def tree_conv1d_layer(
    *arrays: Any,
    layout: Mamba2Layout,
) -> tuple[Mamba2Pending, jax.Array, jax.Array]:
    """See `api.tree_conv1d_layer`, whose arrays these are."""
    projected, conv_weight, conv_bias, dt_bias, conv_state, conv_gather_index, *trees = arrays
    prefix_pending, previous = trees
    batch, queries = projected.shape[:2]
    heads, channels = layout.num_heads, conv_weight.shape[1]
    in_groups = layout.num_groups, layout.state_size

    def shapes(nodes: int) -> list[tuple[int, ...]]:
        """Of the arrays of a pending record."""
        own = (heads, layout.head_dim), (heads,), in_groups, (channels,)
        return [(batch, nodes, *sizes) for sizes in own]

    nothing = Mamba2Pending(*(jnp.zeros(shape, jnp.float32) for shape in shapes(0)))
    prefix = nothing if prefix_pending is None else prefix_pending
    old, index = (nothing, jnp.zeros((0,), jnp.int32)) if previous is None else previous
    of_queries = batch, queries, *in_groups
    results = [*shapes(prefix.x.shape[1] + queries), of_queries, conv_state.shape]
    *pending, C, conv_state = native.call(
        "tree_conv1d_layer",
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results],
        projected,
        conv_weight.astype(jnp.float32),
        None if conv_bias is None else conv_bias.astype(jnp.float32),
        dt_bias.astype(jnp.float32),
        conv_state.astype(jnp.float32),
        conv_gather_index.astype(jnp.int32),
        *prefix,
        old.conv_input,
        index.astype(jnp.int32),
        aliases={4: 5},
        first_column=layout.columns[1],
        multipliers=np.array(layout.multipliers[1:], np.float32),
        dt_low=float(layout.dt_limit[0]),
        dt_high=float(layout.dt_limit[1]),
    )
    return Mamba2Pending(*pending), C, conv_state
