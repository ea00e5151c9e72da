"""Checks and times whole models: steps, batches, losslessness, table 1."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks import lossless, packed
from benchmarks.gpu.kernels import timing
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task
from benchmarks.models import Pair, random_model
from benchmarks.steps import run_steps
from benchmarks.tree_size import tree_of
from stree_jax.measuring.clock import num_bytes


def steps(model: str, scale: Scale) -> list[Task]:
    """Milliseconds of a verify step of the pure model or the hybrid, by number of nodes."""
    return _steps(scale, getattr(scale, model), [(nodes, 1) for nodes in scale.step_nodes])


def batches(scale: Scale) -> list[Task]:
    """Milliseconds of a verify step of the pure model by batch size."""
    sizes = [*itertools.product(scale.batch_nodes, scale.batches)]
    return _steps(scale, scale.mamba2, sizes)


def _steps(scale: Scale, config: st.ModelConfig, sizes: list[tuple[int, int]]) -> list[Task]:
    """Implementations are interleaved; trees are those of `benchmarks.tree_size`, after no prompt.

    All models share their weights.
    """
    weights = nnx.to_pure_dict(nnx.state(random_model(config, scale.dtype).in_first()))
    models = {
        name: nnx.merge(
            st.HybridLM.abstract(config, dtype=scale.dtype, implementation=name)[0], weights
        )
        for name in scale.implementations
    }

    def compiled(nodes: int, size: int) -> tuple[dict[str, Any], Row]:
        calls = {
            name: functools.partial(
                run_steps.lower(model, tree_of(nodes), scale.steps, size).compile(), model
            )
            for name, model in models.items()
        }
        return calls, bytes_of_step(models["xla"], size)

    return [
        timing(
            f"{nodes} nodes, batch of {size}",
            scale,
            {"nodes": nodes, "batch": size},
            "milliseconds",
            functools.partial(compiled, nodes, size),
        )
        for nodes, size in sizes
    ]


def bytes_of_step(model: st.HybridLM, batch: int) -> dict[str, int]:
    """The least that a step moves: weights read once, states read once and written once."""
    config = model.config
    weights = num_bytes(nnx.state(model))
    if not config.tie_embeddings:  # a row of the embedding for each token, next to nothing
        weights -= config.num_embeddings * config.d_model * jnp.dtype(model.dtype).itemsize
    state = jax.eval_shape(functools.partial(model.init_cache, batch, 0))
    size = num_bytes(state)
    return {"weight_bytes": weights, "state_bytes": size, "bytes": weights + 2 * size}


def lossless_texts(scale: Scale) -> list[Task]:
    """Greedy texts of trees against autoregressive decoding in float32, the kernels first."""

    def check(implementation: str, tree: str, family: str) -> Row:
        config, topology = lossless.FAMILIES[family], lossless.TREES[tree]
        row = lossless.check(config, implementation, topology, scale.tokens)
        return {"family": family, "implementation": implementation, "tree": tree} | row

    # The interpreter takes minutes to compile a loop.
    real = [name for name in scale.implementations if name != "pallas_interpret"]
    return [
        Task(
            f"{implementation}, {tree}, {family}",
            functools.partial(check, implementation, tree, family),
        )
        for tree in scale.trees
        for implementation in reversed(real)
        for family in scale.families
    ]


def packed_trees(scale: Scale) -> list[Task]:
    """Table 1 (`benchmarks.packed`), the largest trees first."""
    tokens = min(scale.tokens, 32)

    @functools.cache
    def plain() -> tuple[Pair, list]:
        target, draft = (random_model(config, scale.dtype) for config in scale.pair)
        pair = Pair("random pair", target, draft, [[1] * 16], "one token")
        return pair, packed.without_drafts(pair, tokens)

    def measure(beams: int, num_steps: int, _: None) -> Row:
        (pair, want), tree = plain(), st.TreeTopology.beam(beams, num_steps)
        return packed.compared(pair, tree, want, tokens, scale.rounds // 3 + 1)

    return [
        Task(f"{beams} beams of {num_steps}", measure=functools.partial(measure, beams, num_steps))
        for num_steps in scale.beam_steps
        for beams in scale.beams
    ]
