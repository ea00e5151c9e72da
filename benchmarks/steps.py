"""Programs whose time is measured: verify steps in a loop on the device, and a whole request."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.common import timed_calls
from pallas_kernels import dispatch
from pallas_kernels.numerics import best_of
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import plan
from stree_jax.decoding.types import DecodeState, DraftTree, Verdict
from stree_jax.measuring.clock import memory_of, summary
from stree_jax.models.cache import path_to


def best_tokens(model: st.HybridLM, *arguments: Any, **options: Any) -> tuple[jax.Array, Any, Any]:
    """`model.tree_forward` with the best token of each node instead of its logits."""
    logits, pending, cache = model.tree_forward(*arguments, **options)
    return best_of(logits, model.config.vocab_size)[0], pending, cache


def binary_tree(nodes: int) -> st.TreeTopology:
    """The first nodes of a full binary tree, level by level."""
    return st.TreeTopology((-1, *((node - 1) // 2 for node in range(1, nodes))))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def run_steps(
    model: st.HybridLM,
    topology: st.TreeTopology,
    count: int,
    batch: int = 1,
    to_the_bit: bool = False,
) -> jax.Array:
    """Runs `count` target calls on a tree; each replays a path of the previous one."""
    tree = topology.tree(jnp.ones((batch, topology.num_nodes), bool))
    path = path_to(tree, jnp.full(batch, topology.num_nodes - 1, jnp.int32))
    pending = model.init_pending(batch, topology.num_nodes)

    max_length = count * (topology.depth + 1)

    def step(_, carry):
        tokens, pending, cache = carry
        with dispatch.to_the_bit(to_the_bit):
            return best_tokens(model, tokens, tree, cache, replay=(pending, path))

    tokens = jnp.zeros((batch, topology.num_nodes), jnp.int32)
    carry = (tokens, pending, model.init_cache(batch, max_length))
    unroll = 1 if dispatch.device_obstacle() else min(2, count)  # as the decode loop
    return jax.lax.fori_loop(0, count, step, carry, unroll=unroll)[0]


class Program:
    """The loop of one request, compiled ahead of time: its memory is known.

    All prompts must have the same padded width; rows run to `max_new_tokens`, past any end token.
    """

    def __init__(self, model: st.HybridLM, prompt: Sequence[int], **options: Any):
        self._model, self._options = model, options
        decoder, arguments = self._start(prompt)
        self._run = SpeculativeDecoder.run.lower(decoder, *arguments).compile()
        self.temporary = memory_of(self._run)["temporary"]  # bytes

    def _start(self, prompt: Sequence[int]) -> tuple[SpeculativeDecoder, tuple]:
        """The decoder, and the arguments of its loop after the prefill."""
        p = plan(self._model, [[*prompt]], **self._options, eos_token=())
        state = p.decoder.start(self._model, p.drafter, p.context, p.keys, p.sampling)
        return p.decoder, (self._model, p.drafter, state, p.limits, p.sampling)

    def __call__(self, prompt: Sequence[int]) -> DecodeState:
        """The state at the end of a whole generation; blocks."""
        return jax.block_until_ready(self._run(*self._start(prompt)[1]))

    def steps(self, prompt: Sequence[int]) -> Iterator[tuple[DraftTree, Verdict]]:
        """The draft trees of a whole generation, step by step, and what was accepted."""
        decoder, (model, drafter, state, *settings) = self._start(prompt)
        while not state.done.all():
            state, draft, verdict = decoder.step(model, drafter, state, *settings)
            yield draft, verdict


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
    calls = {n: functools.partial(run_steps, model, tree, count) for n, tree in trees.items()}
    taken = timed_calls(f"target call, {name}", calls, rounds, 1e3 / count)
    milliseconds = {nodes: summary(each) for nodes, each in taken.items()}
    return {
        "model": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model.in_first()))),
        "milliseconds_by_nodes": milliseconds,
        "relative_to_one_node": {
            nodes: value["median"] / milliseconds[1]["median"]
            for nodes, value in milliseconds.items()
        },
    }
