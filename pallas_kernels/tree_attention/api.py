"""Attention of tree nodes to a KV cache and to their ancestors in the tree.

`tree_attention` is the softmax alone. With a causal mask over the nodes it is the attention of a
sequence that continues a cache, such as a chunk of a prompt; with an empty cache, of a whole
sequence. `tree_attention_layer` is a layer between its projections.
"""

import functools

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels import native as cpu
from pallas_kernels.numerics import PartialSums
from pallas_kernels.tree_attention import native, pallas_triton, pallas_triton_layer, xla
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV
from pallas_kernels.tree_attention.layout import AttentionLayout, HeadNorms
from pallas_kernels.tree_attention.online_softmax import SoftmaxParts


def tree_attention(
    query: Float[Array, "B Q W E"],
    node_keys: Float[Array, "B N U E"],
    node_values: Float[Array, "B N U E"],
    keys: Float[Array, "B U L E"],
    values: Float[Array, "B U L E"],
    length: Int[Array, " B"],
    mask: Bool[Array, "B Q N"],
    *,
    scale: float,
    window: int | None = None,
    is_block: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B Q W E"]:
    """Grouped-query attention; query head w uses key and value head `w // (W / U)`.

    Args:
        query: queries of the query nodes, the last `Q` of `N`; after RoPE, if the model has it.
        node_keys, node_values: keys and values of all nodes so far.
        keys, values: the cache of the tokens before the root. Each head is contiguous, so that no
            product transposes the cache.
        length: number of tokens in the cache, for each row.
        mask: which nodes a query attends to. It must include the query itself, or its output is
            unspecified, and no later nodes: the kernel skips them.
        scale: multiplies the scores.
        window: how many tokens a query attends to, itself and those before it on its path; the
            cache is then a ring, see `KVCache`. None: all. The Pallas kernel has none.
        is_block: whether the queries are places in a row, whose windows begin by place, and the
            mask alone says which nodes they see. With a window only, and in XLA alone.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        The outputs, in the dtype of `query`; softmax in float32. The output of a fully masked query
        is finite but unspecified. Derivatives are XLA's in all implementations; there is no reverse
        mode for caches of more than 1,024 positions.
    """
    unsupported = {
        "pallas": pallas_triton.unsupported(query.shape[-1]),
        "native": cpu.unsupported(query, keys, head_dim=query.shape[-1]),
    }
    if window is not None:
        unsupported["pallas"] = "the kernel has no windows"
        if is_block:
            unsupported["native"] = "the code has no blocks"
    return dispatch.run(
        "tree_attention",
        {
            "xla": functools.partial(xla.tree_attention, window=window, is_block=is_block),
            "pallas": functools.partial(
                pallas_triton.tree_attention, to_the_bit=dispatch.wants_bits()
            ),
            "native": functools.partial(native.tree_attention, window=window),
        },
        (query, node_keys, node_values, keys, values, length, mask),
        requested=implementation,
        unsupported=unsupported,
        xla_derivatives=True,
        scale=scale,
    )


def tree_attention_layer(
    projected: Float[Array, "B Q X"] | PartialSums,
    cache: KVCache,
    depth: Int[Array, "B Q"],
    mask: Bool[Array, "B Q N"],
    *,
    layout: AttentionLayout,
    norms: HeadNorms | None = None,
    prefix_pending: NodeKV | None = None,
    previous: tuple[NodeKV, Bool[Array, "B O"]] | None = None,
    in_parts: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q W E"] | SoftmaxParts, NodeKV, KVCache]:
    """An attention layer between its projections, at the last `Q` of `N` tree nodes.

    Norms and rotates queries and keys, appends the accepted path of the previous tree to the cache,
    and attends. On a GPU that is one kernel, and a small reduction of what its programs add up.
    Donate the cache: the kernel writes it in place, and XLA copies it first if it is not donated.

    Args:
        projected: the input projection at the query nodes.
        cache: the tokens before the root of `previous`, or of this tree if that is None.
        depth: depth of the query nodes; 0 for the root. A node's position is its depth plus the
            length of the cache after the path is appended.
        mask: ancestors of the query nodes, self included.
        layout: the columns of the projection.
        norms: of the heads of queries and keys; None: they have none.
        prefix_pending: keys and values of the first `N - Q` nodes; None if `Q == N`.
        previous: keys and values of the previous tree of `O` nodes, and its accepted path.
        in_parts: the outputs may be `SoftmaxParts`, for a product that puts them together.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Outputs at the query nodes, NaN for rows whose cache is overfull; keys and values of all
        nodes; the cache before this tree's root.

    Raises:
        ValueError: prefix and query nodes are not the nodes of the mask, or the projection has
            fewer columns than the layout.
    """
    num_prefix = 0 if prefix_pending is None else prefix_pending.keys.shape[1]
    if num_prefix + projected.shape[1] != mask.shape[2]:
        raise ValueError(
            f"{num_prefix} prefix and {projected.shape[1]} query nodes are not the"
            f" {mask.shape[2]} nodes of the mask; `prefix_pending` must have the keys and values of"
            " all nodes before the query nodes"
        )
    end = layout.first_column + layout.num_columns
    if projected.shape[-1] < end:
        raise ValueError(f"the projection has {projected.shape[-1]} columns, {layout} needs {end}")
    # The attention chooses for itself: its kernel may run where that of the layer cannot.
    attention = functools.partial(tree_attention, implementation=implementation)
    by_xla = functools.partial(
        xla.tree_attention_layer, attention=attention, implementation=implementation
    )
    by_pallas = functools.partial(pallas_triton_layer.tree_attention_layer, in_parts=in_parts)
    reason = pallas_triton_layer.unsupported(layout, cache.keys.shape[2])
    return dispatch.run(
        "tree_attention_layer",
        {"xla": by_xla, "pallas": by_pallas},
        (projected, cache, depth, mask),
        requested=implementation,
        unsupported={"pallas": reason},
        layout=layout,
        norms=norms,
        prefix_pending=prefix_pending,
        previous=previous,
    )
