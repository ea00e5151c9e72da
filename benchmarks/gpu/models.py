"""Checks and times whole models: losslessness, steps, table 1, transformers, a trained pair."""

import concurrent.futures
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks import lossless
from benchmarks.common import interleaved, summary
from benchmarks.gpu import byte_pair, transformers_step
from benchmarks.gpu.kernels import THREADS, wait
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.sections import Clock
from benchmarks.models import RANDOM_NOTE, Pair, on_gpu
from benchmarks.paper import batch, packed
from benchmarks.paper.tree_size import fits as fits_of
from benchmarks.paper.tree_size import tree_of
from benchmarks.steps import run_steps


def check_lossless(scale: Scale, clock: Clock) -> dict[str, Any]:
    """Greedy tokens of trees against autoregressive decoding, with the kernels first."""

    def check(task: tuple[str, str, str]) -> dict[str, Any] | None:
        implementation, tree, family = task
        if not clock.fits(", ".join(task)):
            return None
        trees = {tree: lossless.TREES[tree]}
        config = lossless.FAMILIES[family]
        found = lossless.check(config, implementation, trees, tokens=scale.tokens)
        return {"family": family, "implementation": implementation, "tree": tree} | found[tree]

    # The interpreter takes minutes to compile a loop.
    real = [name for name in scale.implementations if name != "pallas_interpret"]
    tasks = [
        (implementation, tree, family)
        for tree in scale.trees
        for implementation in reversed(real)
        for family in scale.families
    ]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        rows = [row for row in pool.map(check, tasks) if row is not None]
    return {"identical": bool(rows) and all(row["identical"] for row in rows), "rows": rows}


def random_models(
    config: st.ModelConfig, dtype: str, implementations: tuple[str, ...]
) -> dict[str, st.HybridLM]:
    """A model for each implementation, all with the same random weights, made on the device."""

    @jax.jit
    def weights() -> dict:
        return nnx.to_pure_dict(nnx.state(st.HybridLM(config, dtype=dtype, rngs=nnx.Rngs(0))))

    shared = weights()
    return {
        name: nnx.merge(st.HybridLM.abstract(config, dtype=dtype, implementation=name)[0], shared)
        for name in implementations
    }


def measure_steps(
    scale: Scale, config: st.ModelConfig, bandwidth: float, clock: Clock
) -> dict[str, Any]:
    """Milliseconds of a verify step by implementation and number of nodes, after an empty prompt.

    The trees are the same as in `benchmarks.tree_size`.
    """
    models = random_models(config, scale.dtype, scale.implementations)

    def compiled(key: tuple[int, str]) -> Any:
        nodes, name = key
        if not clock.fits(f"{nodes} nodes, {name}"):
            return None
        return run_steps.lower(models[name], tree_of(nodes), scale.count).compile()

    # Tracing a deep model holds Python's lock for long: with more threads all would finish late.
    keys = [(nodes, name) for nodes in scale.step_nodes for name in scale.implementations]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        done = dict(zip(keys, pool.map(compiled, keys), strict=True))
    programs = {
        (nodes, name): program
        for (nodes, name), program in done.items()
        if all(done[nodes, other] is not None for other in scale.implementations)
    }
    calls = {
        f"{nodes} {name}": functools.partial(wait, program, (models[name],))
        for (nodes, name), program in programs.items()
    }
    for call in calls.values():
        call()
    seconds = interleaved(calls, scale.rounds, lambda: None)
    rows = [
        {
            "nodes": nodes,
            "milliseconds": {
                name: summary([1e3 * value / scale.count for value in seconds[f"{nodes} {name}"]])
                for name in scale.implementations
            },
        }
        for nodes in sorted({nodes for nodes, _ in programs})
    ]
    model = models[scale.implementations[0]]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    if not config.tie_embeddings:  # one row of the embedding is read
        weights -= config.num_embeddings * config.d_model * jnp.dtype(scale.dtype).itemsize
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(1, 0)))
    floor = 1e3 * (weights + 2 * state) / bandwidth
    result = {
        "dtype": scale.dtype,
        "note": RANDOM_NOTE,
        "weight_bytes": weights,
        "state_bytes": state,
        "floor_milliseconds": floor,
        "steps": rows,
    }
    best = {row["nodes"]: row["milliseconds"][scale.implementations[-1]] for row in rows}
    if 1 in best:
        result["one_node_over_floor"] = best[1]["median"] / floor
        most = max(best)
        result[f"{most}_nodes_over_one"] = best[most]["median"] / best[1]["median"]
    if len(best) >= 3 and 5 in best:
        sizes = [{"nodes": nodes, "milliseconds": value} for nodes, value in best.items()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fits to few points
            result["fits"] = fits_of(sizes)
    return result


def measure_packed(scale: Scale, pair: Pair, clock: Clock) -> dict[str, Any]:
    """Table 1 (`benchmarks.packed`), the largest trees first."""
    rows = packed.measure(
        pair,
        beams=scale.beams,
        steps=scale.beam_steps,
        tokens=min(scale.tokens, 32),
        rounds=scale.rounds // 3 + 1,
        fits=clock.fits,
    )
    return {"pair": pair.name, "note": pair.note(), "rows": rows}


def measure_transformers(scale: Scale, clock: Clock) -> dict[str, Any] | None:
    """Time of a token of transformers, with the shape of `scale.mamba2`."""
    device = "cuda" if on_gpu() else "cpu"
    if obstacle := transformers_step.obstacle(device):
        clock.left_out.append(f"all of it: {obstacle}")
        return None
    return transformers_step.measure(
        scale.mamba2, device=device, dtype=scale.dtype, tokens=scale.tokens, rounds=5
    )


def end_to_end(scale: Scale, trained: byte_pair.Trained, clock: Clock) -> dict[str, Any]:
    """Speed and tau of the trained pair: checked in float32, then timed in bfloat16."""
    result: dict[str, Any] = {"note": trained.pair.note(), "prompts": trained.pair.source}
    for dtype in ("float32", scale.dtype):
        for size in (1, len(trained.pair.prompts)):
            if clock.fits(f"{dtype}, batch of {size}"):
                rows = batch.measure(
                    trained.as_type(dtype),
                    batches=(size,),
                    tokens=4 * scale.tokens,
                    rounds=scale.rounds // 2,
                )
                result.setdefault(dtype, []).extend(rows)
    exact = result.get("float32", [])
    result["same_tokens_in_float32"] = bool(exact) and all(row["same_tokens"] for row in exact)
    return result
