"""The gated delta rule by our own code, `native.cc`: a head's state is read and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native


def tree_delta(*arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `api.tree_delta`, whose arrays these are."""
    k, v, g = (array for array in arrays[1:4] if array is not None)
    nothing = k[:, :0], jnp.zeros_like(v[:, :0]), g[:, :0], jnp.zeros((len(k), 0), bool)
    y, u = _run("tree_delta", *nothing, *arrays)
    return y, u


def replay_tree_delta(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.replay_tree_delta`, whose arrays these are."""
    y, u, state = _run("replay_tree_delta", *arrays, None)
    return y, u, state


def replay_delta(*arrays: jax.Array) -> jax.Array:
    """See `api.replay_delta`, whose arrays these are: the same, with a new tree of no nodes."""
    k, u, g, state, path = arrays
    no_k, no_u = k[:, :0], u[:, :0]
    nothing = no_k, no_k, no_u, g[:, :0], no_u[..., 0]
    no_mask = jnp.zeros((len(k), 0, 0), bool)
    return _run("replay_tree_delta", k, u, g, path, *nothing, state, no_mask, None)[2]


def _run(name: str, *arrays: Any) -> tuple[jax.Array, ...]:
    """The outputs, u of all nodes, and the state if one is replayed."""
    *own, prefix_u = arrays
    v, state = own[6], own[9]
    results = [jax.ShapeDtypeStruct(v.shape, jnp.float32)] * 2
    replays = name == "replay_tree_delta"
    if replays:
        results.append(jax.ShapeDtypeStruct(state.shape, jnp.float32))
    first = jnp.zeros_like(v[:, :0]) if prefix_u is None else prefix_u
    aliases = {9: 2} if replays else {}
    y, u, *new_state = native.call(name, results, *own, first, aliases=aliases)
    return y, u if prefix_u is None else jnp.concatenate([prefix_u, u], axis=1), *new_state


def delta_chunks(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `api.delta_chunks`, whose arrays these are. One step after the other."""
    v, state = arrays[2], arrays[5]
    results = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (v, state)]
    y, state = native.call("delta_chunks", results, *arrays, aliases={5: 1})
    return y, state
