"""Verify steps in a loop on the device, so that Python is not timed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import stree_jax as st
from pallas_kernels import dispatch
from pallas_kernels.numerics import best_of
from stree_jax.models.cache import path_to


def best_tokens(model: st.HybridLM, *arguments: Any, **options: Any) -> tuple[jax.Array, Any, Any]:
    """`model.tree_forward` with the best token of each node instead of its logits."""
    logits, pending, cache = model.tree_forward(*arguments, **options)
    return best_of(logits, model.config.vocab_size)[0], pending, cache


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def run_steps(
    model: st.HybridLM, topology: st.TreeTopology, count: int, batch: int = 1
) -> jax.Array:
    """Runs `count` target calls on a tree; each replays a path of the previous one."""
    tree = topology.tree(jnp.ones((batch, topology.num_nodes), bool))
    path = path_to(tree, jnp.full(batch, topology.num_nodes - 1, jnp.int32))
    pending = model.init_pending(batch, topology.num_nodes)

    max_length = count * (topology.depth + 1)

    def step(_, carry):
        tokens, pending, cache = carry
        return best_tokens(model, tokens, tree, cache, replay=(pending, path))

    tokens = jnp.zeros((batch, topology.num_nodes), jnp.int32)
    carry = (tokens, pending, model.init_cache(batch, max_length))
    unroll = 1 if dispatch.device_obstacle() else min(2, count)  # as the decode loop
    return jax.lax.fori_loop(0, count, step, carry, unroll=unroll)[0]
