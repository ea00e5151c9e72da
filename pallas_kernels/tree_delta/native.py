"""The gated delta rule by our own code, `native.cc`: a head's state is read and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native


def scan(
    previous: Any, tree: Any, state: jax.Array, prefix_u: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """See `api._run`, whose arrays these are; a tree that is not there has no nodes."""
    replays = previous is not None
    some_k, some_u, some_g = (array[:, :0] for array in (tree[1:4] if tree else previous[:3]))
    batch = len(state)
    previous = previous or (some_k, some_u, some_g, jnp.zeros((batch, 0), bool))
    *nodes, mask = tree or (
        *(some_k, some_k, some_u, some_g, some_u[..., 0]),
        jnp.zeros((batch, 0, 0), bool),
    )
    v = nodes[2]
    results = [jax.ShapeDtypeStruct(v.shape, jnp.float32)] * 2
    if replays:
        results.append(jax.ShapeDtypeStruct(state.shape, jnp.float32))
    first = some_u if prefix_u is None else prefix_u
    y, u, *new_state = native.call(
        "replay_tree_delta" if replays else "tree_delta",
        results,
        *(*previous, *nodes, state, mask, first),
        aliases={9: 2} if replays else {},
    )
    (state,) = new_state or (state,)
    return (None, None, state) if tree is None else (y, u, state)


def delta_chunks(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `api.delta_chunks`, whose arrays these are. One step after the other."""
    v, state = arrays[2], arrays[5]
    results = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (v, state)]
    y, state = native.call("delta_chunks", results, *arrays, aliases={5: 1})
    return y, state
