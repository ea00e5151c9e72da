"""Verify steps in a loop on the device, so that Python is not timed, and the time of a step."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.common import summary, timed
from pallas_kernels import dispatch
from pallas_kernels.numerics import best_of
from stree_jax.models.cache import path_to


def best_tokens(model: st.HybridLM, *arguments: Any, **options: Any) -> tuple[jax.Array, Any, Any]:
    """`model.tree_forward` with the best token of each node instead of its logits."""
    logits, pending, cache = model.tree_forward(*arguments, **options)
    return best_of(logits, model.config.vocab_size)[0], pending, cache


def binary_tree(nodes: int) -> st.TreeTopology:
    """The first nodes of a full binary tree, level by level."""
    return st.TreeTopology((-1, *((node - 1) // 2 for node in range(1, nodes))))


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


TREES = {
    tree.num_nodes: tree
    for tree in (*map(st.TreeTopology.chain, (0, 1, 4)), *map(st.TreeTopology.paper, "AB"))
}
COLUMNS = {"model": "{model}"} | {
    f"{nodes} nodes": f"{{milliseconds_by_nodes[{nodes}][median]:.2f}}"
    f" ({{relative_to_one_node[{nodes}]:.1f}})"
    for nodes in TREES
}


def time_of_calls(
    name: str,
    model: st.HybridLM,
    count: int,
    rounds: int = 5,
    trees: Mapping[int, st.TreeTopology] = TREES,
) -> dict[str, Any]:
    """Milliseconds of a target call by number of nodes; `count` calls in a timed run."""

    def run(topology: st.TreeTopology, _: None) -> None:
        run_steps(model, topology, count).block_until_ready()

    ways = {nodes: functools.partial(run, tree) for nodes, tree in trees.items()}
    seconds = timed(f"target call, {name}", ways, [None], rounds)[1]
    milliseconds = {
        nodes: summary((1e3 * taken[:, 0] / count).tolist()) for nodes, taken in seconds.items()
    }
    return {
        "model": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))),
        "milliseconds_by_nodes": milliseconds,
        "relative_to_one_node": {
            nodes: value["median"] / milliseconds[1]["median"]
            for nodes, value in milliseconds.items()
        },
    }
