"""`tree_conv1d` as one Pallas-Triton kernel.

Passes: a program handles one row, one block of query nodes and one block of channels. For each tap
it gathers one row of inputs or of the conv state a query, both from where they are: XLA's way
concatenates them first. A node's inputs are read by up to K of its descendants, from cache after
the first. The result is written once.

Numerics: float32 from load to store, activation included, rounded once. The conv state is rounded
to the type of the inputs first, which is what it was before it was stored.

Refuses numbers of channels that are not multiples of 16. Any numbers of queries and
nodes, any width but 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.tree_conv1d.config import BlockSizes, block_sizes


def unsupported(channels: int, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if width == 1:
        return "a convolution of width 1 has no state"
    return tb.unsupported_in_parts("channels", channels)


def tree_conv1d(
    inputs,
    conv_state,
    weight,
    bias,
    window,
    *,
    activation,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.tree_conv1d`."""
    blocks = blocks or block_sizes()
    batch, num_nodes, num_channels = inputs.shape
    num_queries, width = window.shape[1:]
    queries = min(blocks.queries, tb.padded_size(num_queries))
    channels = math.gcd(num_channels, blocks.channels)

    def of_row(length):
        return pl.BlockSpec((None, length, channels), lambda c, i, b: (b, 0, c))

    biases = [] if bias is None else [bias]
    return tb.call(
        functools.partial(_kernel, block_queries=queries, activation=activation),
        name="tree_conv1d",
        num_warps=blocks.num_warps,
        num_stages=1,
        interpret=interpret,
        grid=(num_channels // channels, pl.cdiv(num_queries, queries), batch),
        in_specs=[
            of_row(num_nodes),
            of_row(conv_state.shape[1]),
            pl.BlockSpec((width, channels), lambda c, i, b: (0, c)),
            pl.BlockSpec((None, num_queries, width), lambda c, i, b: (b, 0, 0)),
            *(pl.BlockSpec((channels,), lambda c, i, b: (c,)) for _ in biases),
        ],
        out_specs=of_row(num_queries),
        out_shape=jax.ShapeDtypeStruct((batch, num_queries, num_channels), inputs.dtype),
    )(inputs, conv_state, weight, window, *biases)


def _kernel(
    inputs_ref,  # [N, c]
    conv_state_ref,  # [K - 1, c]
    weight_ref,  # [K, c]
    window_ref,  # [Q, K]
    *refs,  # bias [c], if there is one; output [Q, c]
    block_queries: int,
    activation: str | None,
):
    *bias_refs, output_ref = refs
    num_nodes, channels = inputs_ref.shape
    num_before = conv_state_ref.shape[0]
    num_queries, width = window_ref.shape
    query, _ = tb.rows(pl.program_id(1) * block_queries, block_queries, num_queries)

    output = jnp.zeros((block_queries, channels), jnp.float32)
    for ref in bias_refs:
        output = output + ref[...].astype(jnp.float32)[None, :]
    for tap in range(width):
        row = window_ref[query, tap]
        node = jnp.clip(row - num_before, 0, num_nodes - 1)
        value = inputs_ref[node, :]
        before = conv_state_ref[jnp.clip(row, 0, num_before - 1), :].astype(value.dtype)
        value = jnp.where((row < num_before)[:, None], before, value)
        output = output + value.astype(jnp.float32) * weight_ref[tap, :].astype(jnp.float32)[None]
    if activation == "silu":
        output = jax.nn.silu(output)
    output_ref[query, :] = output.astype(output_ref.dtype)
