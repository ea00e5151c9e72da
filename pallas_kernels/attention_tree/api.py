"""One attention layer over the nodes of a tree, between its projections."""

import functools

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention_tree import pallas_triton, xla
from pallas_kernels.attention_tree.keys import KeyCache, NodeKeys
from pallas_kernels.attention_tree.layout import AttentionLayout


def attention_tree(
    projected: Float[Array, "B Q X"],
    cache: KeyCache,
    depth: Int[Array, "B Q"],
    mask: Bool[Array, "B Q N"],
    *,
    layout: AttentionLayout,
    grown: NodeKeys | None = None,
    previous: tuple[NodeKeys, Bool[Array, "B O"]] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q W E"], NodeKeys, KeyCache]:
    """Rotary embedding and attention of the last `Q` nodes of a tree of `N`.

    The accepted path of the previous tree is written to the cache first. On a GPU all of it is one
    kernel, and a small one where programs share the cache of a row. Donate the cache, or XLA
    copies it before.

    Args:
        projected: the input projection at the query nodes.
        cache: before the root of the previous tree, if there is one, else of this one.
        depth: of the query nodes, 0 for the root: a node's position is the cache's length, when the
            path is written, and its depth.
        mask: ancestors of the query nodes, themselves included.
        layout: of the projection.
        grown: keys and values of the first `N - Q` nodes; None if `Q == N`.
        previous: those of the previous tree, and its accepted path; None: the cache is that before
            this tree's root.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Outputs at the query nodes, NaN in rows with more tokens than places; keys and values of all
        nodes; the cache before this tree's root.

    Raises:
        ValueError: grown keys of another number of nodes, or an implementation that does not exist
            or cannot run these shapes.
    """
    num_grown = 0 if grown is None else grown.keys.shape[1]
    if num_grown + projected.shape[1] != mask.shape[2]:
        raise ValueError(
            f"{num_grown} grown and {projected.shape[1]} query nodes are not the {mask.shape[2]}"
            " nodes of the mask; `grown` has the keys of all nodes before the query nodes"
        )
    with jax.named_scope("attention_tree"), dispatch.on(projected, cache):
        reason = pallas_triton.unsupported(layout, cache.keys.shape[2])
        match dispatch.choose("attention_tree", implementation, reason):
            case "xla":
                # Where this kernel cannot run that of the attention may.
                run = functools.partial(xla.attention_tree, implementation=implementation)
            case chosen:
                interpret = chosen == "pallas_interpret"
                run = functools.partial(pallas_triton.attention_tree, interpret=interpret)
        return run(projected, cache, depth, mask, layout=layout, grown=grown, previous=previous)
