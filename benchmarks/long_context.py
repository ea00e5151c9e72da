"""How much memory does a tree take with a long prompt, and how much would snapshots of the state?

Compiles a verify step of the first layers of a preset with abstract float32 weights, for a context
of 8,192 tokens and trees of growing size, and reads the compiler's own account of the memory. A
step holds the cache (which does not depend on the tree), the pending record of the tree's nodes,
and temporary buffers, mostly logits. An engine without replay keeps a copy of the recurrent state
per node instead: the last column.

    python -m benchmarks.long_context [--preset Granite-4-H-350M] [--layers 22] [--length 8192]
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.common import Memory, conclude, print_table, read_options, save
from benchmarks.steps import best_tokens
from stree_jax.models.cache import Mamba2Cache, init_cache, path_to

NODES = (1, 13, 63)


def measure(config: st.ModelConfig, length: int, num_nodes: int) -> dict[str, float]:
    """MiB of cache, pending record, temporary buffers, and of snapshots for every node."""
    structure, weights = st.HybridLM.abstract(config, dtype=jnp.float32)
    topology = st.TreeTopology.from_branching((num_nodes - 1,) if num_nodes > 1 else ())

    def step(weights, tokens, cache, pending, last):
        tree = topology.tree(jnp.ones(tokens.shape, bool))
        model = nnx.merge(structure, weights)
        replay = (pending, path_to(tree, last))
        return best_tokens(model, tokens, tree, cache, replay=replay)

    cache = jax.eval_shape(lambda: init_cache(config, 1, length, jnp.float32))
    pending = jax.eval_shape(lambda: nnx.merge(structure, weights).init_pending(1, num_nodes))
    integers = jax.ShapeDtypeStruct((1, num_nodes), jnp.int32)
    last = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = jax.jit(step, donate_argnums=(2, 3)).lower(weights, integers, cache, pending, last)

    recurrent = [
        leaf
        for layer in jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, Mamba2Cache))
        if isinstance(layer, Mamba2Cache)
        for leaf in layer
    ]
    return {
        "nodes": num_nodes,
        "cache": _mib(jax.tree.leaves(cache)),
        "pending": _mib(jax.tree.leaves(pending)),
        "temporary": Memory.of(lowered.compile()).temporary / 2**20,
        "snapshots": num_nodes * _mib(recurrent),
    }


def _mib(leaves: list) -> float:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 2**20


def main() -> None:
    """Runs the benchmark and writes `long-context-<device>.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="Granite-4-H-350M")
    parser.add_argument("--layers", type=int, default=22, help="22 compile in a minute")
    parser.add_argument("--length", type=int, default=8192)
    options = read_options(parser)

    config = st.ModelConfig.preset(options.preset)
    config = dataclasses.replace(config, layers=config.layers[: options.layers])
    rows = [measure(config, options.length, nodes) for nodes in NODES]
    print_table(
        f"{options.preset}, {len(config.layers)} layers, {options.length:,} tokens, MiB",
        ("nodes", "cache", "pending record", "temporary", "a state per node instead"),
        [tuple(row.values()) for row in rows],
    )
    results = {
        "preset": options.preset,
        "layers": list(config.layers),
        "length": options.length,
        "mebibytes": rows,
    }
    path = save("long-context", __doc__, results, options.output)
    conclude("long_context", preset=options.preset, results=str(path))


if __name__ == "__main__":
    main()
