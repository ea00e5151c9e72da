"""The programs: a verify step, a prefill, and the decode loop.

Each is a jitted function and its abstract arguments, as a compiler takes them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.steps import best_tokens, binary_tree
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.types import Context, Limits, Sampling, Step
from stree_jax.models.cache import init_cache, path_to

MAX_LENGTH = 1024  # positions of KV caches
SETTINGS = {"dtype": "bfloat16", "batch": 1, "cache_positions": MAX_LENGTH}  # for results
STEPS = 2  # in one program, as `SpeculativeDecoder.steps_per_sync` on a GPU

Call = tuple[Any, ...]  # a jitted function, and its arguments


def verify_step(
    config: st.ModelConfig,
    nodes: int,
    implementation: str | None,
    weights: str = "bfloat16",
    steps: int = STEPS,
) -> Call:
    """Calls of the target on full binary trees; batch of 1, bfloat16 weights.

    The program is `steps` calls, each replaying a path of the one before, as in the decode loop.
    """
    structure, arrays = _abstract(config, implementation, weights)
    topology = binary_tree(nodes)
    cache = jax.eval_shape(lambda: init_cache(config, 1, MAX_LENGTH, jnp.bfloat16))
    pending = jax.eval_shape(lambda: nnx.merge(structure, arrays).init_pending(1, nodes))
    struct = jax.ShapeDtypeStruct

    def step(weights: Any, tokens: Any, valid: Any, last: Any, pending: Any, cache: Any) -> Any:
        model = nnx.merge(structure, weights)
        tree = topology.tree(valid)
        for _ in range(steps):
            tokens, pending, cache = best_tokens(
                model, tokens, tree, cache, replay=(pending, path_to(tree, last))
            )
            last = tokens[:, 0] % nodes  # a path that is not known in advance
        return tokens, pending, cache

    return (
        jax.jit(step, donate_argnames=("pending", "cache")),
        arrays,
        struct((1, nodes), jnp.int32),
        struct((1, nodes), jnp.bool_),
        struct((1,), jnp.int32),
        pending,
        cache,
    )


def _abstract(config: st.ModelConfig, implementation: str | None, weights: str) -> tuple[Any, Any]:
    """A model in bfloat16, its matrices in a type of `deviceless.WEIGHTS`."""
    plain = st.HybridLM.abstract(config, dtype="bfloat16", implementation=implementation)
    if weights == "bfloat16":
        return plain
    structure, arrays = nnx.split(nnx.merge(*plain).quantized())
    return structure, nnx.to_pure_dict(arrays)


def read_prompt(
    config: st.ModelConfig, positions: int, implementation: str | None, weights: str = "bfloat16"
) -> Call:
    """The prefill of one prompt; bfloat16 weights."""
    structure, arrays = _abstract(config, implementation, weights)
    cache = jax.eval_shape(lambda: init_cache(config, 1, positions, jnp.bfloat16))

    def read(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
        _, cache = nnx.merge(structure, weights).prefill(tokens, lengths, cache)
        return cache  # the decode loop does not need the logits either

    return (
        jax.jit(read, donate_argnames="cache"),
        arrays,
        jax.ShapeDtypeStruct((1, positions), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        cache,
    )


class GivenDrafts(st.NgramDrafter):
    """Drafts the first tokens of the text, at next to no cost."""

    def propose(
        self, state: None, step: Step, topology: st.TreeTopology
    ) -> tuple[st.DraftTree, None]:
        root = st.root_only(step.context)
        drafts = step.context.tokens[:, : topology.num_nodes - 1]
        tokens = jnp.concatenate([root.tokens, drafts], axis=1)
        tree = topology.tree(jnp.ones(tokens.shape, bool))
        return st.DraftTree.of(tokens, tree), None


def abstract_model(
    config: st.ModelConfig, implementation: str | None, weights: str = "bfloat16"
) -> st.HybridLM:
    """A model of abstract weights."""
    return nnx.merge(*_abstract(config, implementation, weights))


def decode_loop(
    target: st.HybridLM,
    drafter: st.Drafter,
    topology: st.TreeTopology,
    *,
    sampled: bool,
    steps: int = STEPS,
) -> Call:
    """The loop of one row; above temperature 0 a node's token is the target's own sample."""
    verifier = st.VERIFIERS["target_only" if sampled else "greedy"]
    decoder = SpeculativeDecoder(topology, verifier, 64, steps_per_sync=steps)
    context, keys, limits, sampling = abstract_requests(1, sampled=sampled)
    state = jax.eval_shape(decoder.start, target, drafter, context, keys)
    run = functools.partial(SpeculativeDecoder.run, decoder)
    return jax.jit(run, donate_argnums=2), target, drafter, state, limits, sampling


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
