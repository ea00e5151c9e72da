"""Attention of tree nodes: to everything in a cache, and to their ancestors in the tree.

A causal mask over the nodes makes it ordinary attention of a sequence that continues a cache; an
empty cache makes it attention of a whole sequence.
"""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.autodiff import differentiable
from pallas_kernels.tree_attention import pallas_triton, xla


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
    implementation: str | None = None,
) -> Float[Array, "B Q W E"]:
    """Grouped-query attention; query head w uses key and value head `w // (W / U)`.

    Args:
        query: of the query nodes, rotated if the model rotates.
        node_keys, node_values: of all nodes so far.
        keys, values: of the tokens before the root; a head's are contiguous, so that no product
            transposes the cache.
        length: how many of the cache's L places are filled in each row.
        mask: which nodes a query sees: itself, unless nobody looks at its output, and none behind
            it, where the kernel does not look. Queries are the last Q nodes.
        scale: of the scores, which are softmaxed in float32.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        In the dtype of `query`. A query that sees nothing gets something finite, of no meaning.
        Where it is differentiated XLA's runs, in all implementations; it has no gradients in
        reverse mode of a cache of more than 1,024 places.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    with jax.named_scope("tree_attention"), dispatch.on(query, keys, values):
        reason = pallas_triton.unsupported(query.shape[-1])
        run = differentiable(
            "tree_attention",
            implementation,
            reason,
            xla=xla.tree_attention,
            kernel=pallas_triton.tree_attention,
            scale=scale,
        )
        return run(query, node_keys, node_values, keys, values, length, mask)
