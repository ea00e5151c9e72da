"""The compiled programs: a verify step, a prefill, and the decode loop."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

from benchmarks.static.deviceless import Compiled, Compiler  # first: sets XLA's flags

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.static.thunks import Thunk, Thunks, by_name, launches, num_loops
from benchmarks.steps import best_tokens, binary_tree
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.types import Context, Limits, Sampling, Step
from stree_jax.measuring.clock import memory_of
from stree_jax.models.cache import init_cache, path_to

MAX_LENGTH = 1024  # positions of KV caches
STEPS = 2  # in one program, as `SpeculativeDecoder.steps_per_sync` on a GPU


class Program(NamedTuple):
    """A compiled verify step or prefill."""

    launches: float  # kernels, library calls, copies and fills of a step
    copies: float  # copies and fills among them
    kernels: Counter[str]  # launches of a step by name
    shared_memory: int  # bytes, of the largest block
    spills: bool
    memory: dict[str, int]  # see `memory_of`

    @classmethod
    def of(cls, compiled: Compiled, thunks: list[Thunk], steps: int) -> "Program":
        """From a compiled program of some steps, and its thunks."""
        return cls(
            *(count / steps for count in launches(thunks)),
            Counter({name: count / steps for name, count in by_name(thunks).items()}),
            shared_memory=max(thunk.shared_memory for thunk in thunks),
            spills=compiled.spills,
            memory=memory_of(compiled.program),
        )

    def as_row(self) -> dict[str, Any]:
        """A whole model's row."""
        return {
            "launches": self.launches,
            "copies": self.copies,
            "spills": self.spills,
            "temporary_bytes": self.memory["temporary"],
            "argument_bytes": self.memory["arguments"],
            "all_bytes": sum(self.memory.values()),
        }


def verify_step(
    compiler: Compiler, config: st.ModelConfig, nodes: int, implementation: str
) -> Program:
    """Compiles calls of the target on full binary trees; batch of 1, bfloat16 weights.

    The program is `STEPS` calls, each replaying a path of the one before, as in the decode
    loop.
    """
    structure, weights = _abstract(compiler, config, implementation)
    topology = binary_tree(nodes)
    cache = jax.eval_shape(lambda: init_cache(config, 1, MAX_LENGTH, jnp.bfloat16))
    pending = jax.eval_shape(lambda: nnx.merge(structure, weights).init_pending(1, nodes))
    struct = jax.ShapeDtypeStruct

    def step(weights: Any, tokens: Any, valid: Any, last: Any, pending: Any, cache: Any) -> Any:
        model = nnx.merge(structure, weights)
        tree = topology.tree(valid)
        for _ in range(STEPS):
            tokens, pending, cache = best_tokens(
                model, tokens, tree, cache, replay=(pending, path_to(tree, last))
            )
            last = tokens[:, 0] % nodes  # a path that is not known in advance
        return tokens, pending, cache

    arguments = (
        weights,
        struct((1, nodes), jnp.int32),
        struct((1, nodes), jnp.bool_),
        struct((1,), jnp.int32),
        pending,
        cache,
    )
    jitted = jax.jit(step, donate_argnames=("pending", "cache"))
    compiled = compiler(jitted, *compiler.place(arguments))
    return Program.of(compiled, Thunks.parse(compiled.thunks).outside, STEPS)


def _abstract(compiler: Compiler, config: st.ModelConfig, implementation: str) -> tuple[Any, Any]:
    """A model in bfloat16, its matrices in the compiler's type."""
    plain = st.HybridLM.abstract(config, dtype="bfloat16", implementation=implementation)
    if compiler.weights == "bfloat16":
        return plain
    structure, weights = nnx.split(nnx.merge(*plain).quantized())
    return structure, nnx.to_pure_dict(weights)


def read_prompt(
    compiler: Compiler, config: st.ModelConfig, positions: int, implementation: str
) -> Program:
    """Compiles the prefill of one prompt; bfloat16 weights.

    XLA's scan of a sequence has a loop over chunks: its launches are multiplied by its trip count.
    """
    structure, weights = _abstract(compiler, config, implementation)
    cache = jax.eval_shape(lambda: init_cache(config, 1, positions, jnp.bfloat16))

    def read(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
        _, cache = nnx.merge(structure, weights).prefill(tokens, lengths, cache)
        return cache  # the decode loop does not need the logits either

    arguments = (
        weights,
        jax.ShapeDtypeStruct((1, positions), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        cache,
    )
    compiled = compiler(jax.jit(read, donate_argnames="cache"), *compiler.place(arguments))
    outside, inside = Thunks.parse(compiled.thunks)
    if loops := num_loops(outside):
        # One per Mamba-2 layer; XLA removes loops of a single trip.
        assert config.mamba2 is not None
        assert loops == sum(kind in ("mamba2", "parallel") for kind in config.kinds)
        inside *= -(-positions // config.mamba2.chunk_size)
    return Program.of(compiled, outside + inside, 1)


class GivenDrafts(st.NgramDrafter):
    """Drafts the first tokens of the text, at next to no cost."""

    def propose(
        self, state: None, step: Step, topology: st.TreeTopology
    ) -> tuple[st.DraftTree, None]:
        root = st.root_only(step.context)
        drafts = step.context.tokens[:, : topology.num_nodes - 1]
        tokens = jnp.concatenate([root.tokens, drafts], axis=1)
        tree = topology.tree(jnp.ones(tokens.shape, bool))
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        return st.DraftTree(tokens, tree, None, none, root.finite), None


def outside_of_layers(
    compiler: Compiler, config: st.ModelConfig, implementation: str, nodes: int, *, sampled: bool
) -> dict[str, Any]:
    """Launches of a step of the loop beside the target's layers, with drafts of no cost.

    On a full binary tree. The layers' launches are the difference to a target with every layer
    twice.
    """
    targets = (dataclasses.replace(config, layers=config.layers * times) for times in (1, 2))
    once, twice = (
        _loop(compiler, target, implementation, binary_tree(nodes), sampled=sampled)
        for target in targets
    )
    names, more = (by_name(Thunks.parse(program.thunks).inside) for program in (once, twice))
    kernels = {name: (2 * names[name] - more[name]) / STEPS for name in sorted(names | more)}
    return {
        "loop_nodes": nodes,
        "sampled": sampled,
        "launches_a_step": sum(kernels.values()),
        # Below 0: XLA names kernels by what it fused, and a layer's may have other names here.
        "kernels": {name: count for name, count in kernels.items() if count},
        "spills": once.spills or twice.spills,
    }


def _loop(
    compiler: Compiler,
    target: st.ModelConfig,
    implementation: str,
    topology: st.TreeTopology,
    *,
    sampled: bool,
) -> Compiled:
    drafter = GivenDrafts()
    targets = nnx.merge(*_abstract(compiler, target, implementation))
    verifier = st.VERIFIERS["target_only" if sampled else "greedy"]
    decoder = SpeculativeDecoder(topology, verifier, 64, steps_per_sync=STEPS)
    context, keys, limits, sampling = abstract_requests(1, sampled=sampled)
    state = jax.eval_shape(
        lambda *arguments: decoder.start(*arguments), targets, drafter, context, keys
    )
    arguments = compiler.place((targets, drafter, state, limits, sampling))
    return compiler(SpeculativeDecoder.run, decoder, *arguments)


def abstract_requests(rows: int, *, sampled: bool) -> tuple[Context, Any, Limits, Sampling]:
    """Abstract prompts of 64 tokens, keys, limits and sampling of a batch."""
    struct = jax.ShapeDtypeStruct
    integer, real = struct((rows,), jnp.int32), struct((rows,), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    return (
        Context(struct((rows, 64), jnp.int32), integer),
        keys,
        Limits(integer, struct((rows, 4), jnp.int32)),
        Sampling(real, temperature_is_zero=not sampled),
    )
