"""What a GPU session measures, at real size on a GPU or tiny anywhere; see `gpu_session`."""

import concurrent.futures
import dataclasses
import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks import batch, byte_pair, kernels, lossless, packed, transformers_step
from benchmarks.common import interleaved, summary
from benchmarks.kernels import KERNELS, Problem
from benchmarks.models import RANDOM_NOTE, Pair, on_gpu
from benchmarks.sections import Clock
from benchmarks.shapes import (
    ATTENTIONS,
    EXPERTS,
    HEADS,
    MIXERS,
    AttentionShape,
    ExpertShape,
    HeadShape,
    MixerShape,
)
from benchmarks.steps import run_steps
from benchmarks.tree_size import fits as fits_of
from benchmarks.tree_size import tree_of
from stree_jax.training.recipe import Training

THREADS = 8  # XLA compiles outside of Python's lock
MOST_TOKENS_OF_EXPERTS = 128  # of 4,096 XLA's products of all tokens and experts need 17 GB


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything is done.

    Attributes:
        implementations: that are compared, the kernels last.
        mixers, attentions, heads, experts: shapes that kernels are checked on.
        capacity: of the attention's cache.
        checked_nodes: sizes of trees that kernels are checked on.
        families, trees, tokens: that losslessness is checked on.
        timed: shapes that kernels are timed on, and with which numbers of nodes and batches.
        mamba2, hybrid: models whose steps are timed.
        dtype: of their weights.
        step_nodes: sizes of trees, the most telling first.
        pair: names or configs of target and draft with random weights.
        beams, beam_steps: of table 1.
        count, rounds: calls in a timed program, and timed programs.
        training: target, draft and optimisation.
        copied: bytes that are copied for the bandwidth.
    """

    implementations: tuple[str, ...]
    mixers: Mapping[str, MixerShape]
    attentions: Mapping[str, AttentionShape]
    heads: Mapping[str, HeadShape]
    experts: Mapping[str, ExpertShape]
    capacity: int
    checked_nodes: tuple[int, ...]
    families: tuple[str, ...]
    trees: tuple[str, ...]
    tokens: int
    timed: Mapping[str, Sequence[Any]]
    mamba2: st.ModelConfig
    hybrid: st.ModelConfig
    dtype: str
    step_nodes: tuple[int, ...]
    pair: tuple[st.ModelConfig, st.ModelConfig]
    beams: tuple[int, ...]
    beam_steps: tuple[int, ...]
    count: int
    rounds: int
    training: tuple[st.ModelConfig, st.ModelConfig, Training]
    copied: int


FULL = Scale(
    implementations=("xla", "pallas"),
    mixers=MIXERS,
    attentions={
        name: ATTENTIONS[name]
        for name in ("MambaInLlama-8B", "Falcon-H1-0.5B", "Granite-4-H-Tiny", "Nemotron-3-Nano-30B")
    },
    heads=HEADS,
    experts=EXPERTS,
    capacity=4096,
    checked_nodes=(64, 13, 1, 100),
    families=tuple(lossless.FAMILIES),
    trees=("random tree of 32", "chain of 4", "tree A"),
    tokens=48,
    timed={
        "shapes": ("mamba2-2.7b", "MambaInLlama-8B", "Nemotron-3-Nano-30B"),
        "nodes": (64, 16),
        "batches": (1, 64),
    },
    mamba2=st.ModelConfig.preset("mamba2-2.7b"),
    hybrid=st.ModelConfig.preset("MambaInLlama-8B"),
    dtype="bfloat16",
    step_nodes=(1, 63, 5, 15, 31, 2, 8, 48),
    pair=(st.ModelConfig.preset("mamba2-2.7b"), st.ModelConfig.preset("mamba2-130m")),
    beams=(4, 2, 5, 3),
    beam_steps=(16, 8, 4),
    count=10,
    rounds=10,
    training=(byte_pair.TARGET, byte_pair.DRAFT, byte_pair.TRAINING),
    copied=1 << 30,
)
_TINY = st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16, tie_embeddings=False)
_TINY_HYBRID = dataclasses.replace(
    lossless.FAMILIES["MambaInLlama"], layers=("mamba2", "attention"), mlp=None
)
_TINY_BYTES = st.ModelConfig.tiny(vocab_size=256, num_layers=1)
SMOKE = Scale(
    implementations=("xla", "pallas_interpret"),
    mixers={"tiny": MixerShape(4, 16, 16, 1)},
    attentions={"tiny": AttentionShape(4, 2, 16)},
    heads={"tiny": HeadShape(32, 100)},
    experts={"tiny": ExpertShape(32, 16, 4, 2, True)},
    capacity=40,
    checked_nodes=(5,),
    families=("MambaInLlama",),
    trees=("chain of 4",),
    tokens=8,
    timed={"shapes": ("tiny",), "nodes": (3,), "batches": (2,)},
    mamba2=_TINY,
    hybrid=_TINY_HYBRID,
    dtype="bfloat16",
    step_nodes=(1, 5, 7),
    pair=(_TINY, _TINY),
    beams=(2,),
    beam_steps=(2,),
    count=2,
    rounds=2,
    training=(
        _TINY_BYTES,
        _TINY_BYTES,
        Training(steps=10**9, batch_size=2, sequence_length=16, warmup_steps=2),
    ),
    copied=1 << 20,
)


def copy_bandwidth(num_bytes: int, count: int, rounds: int) -> float:
    """Bytes a second, read and written, of adding 1 to a large array in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(value: jax.Array) -> jax.Array:
        def step(_: Any, value: jax.Array) -> jax.Array:
            return jax.lax.optimization_barrier(value + 1)

        return jax.lax.fori_loop(0, count, step, value)

    value = jax.block_until_ready(copies(jnp.zeros(num_bytes // 4, jnp.int32)))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        value = jax.block_until_ready(copies(value))
        seconds.append(time.perf_counter() - began)
    return 2 * value.nbytes * count / min(seconds)


def check_kernels(scale: Scale, clock: Clock) -> dict[str, Any]:
    """Relative errors of every kernel against float64, with two heads, or two groups, of a shape.

    The second row of the batch has another tree, an empty path and a shorter cache.
    """

    def check(task: tuple) -> dict[str, Any] | None:
        nodes, dtype, name, shape, full = task
        what = {"kernel": name, "shape": shape, "nodes": nodes, "dtype": dtype}
        if not clock.fits(", ".join(map(str, what.values()))):
            return None
        problem = Problem(kernels.small(full), nodes, dtype, batch=2, capacity=scale.capacity)
        if reason := kernels.refused(name, problem._replace(shape=full)):
            return what | {"refused": reason, "errors": {}, "right": True}
        found = kernels.errors(name, problem, scale.implementations)
        right = all(kernels.within_limits(name, dtype, errors) for errors in found.values())
        return what | {"errors": found, "right": right}

    tasks = [
        (nodes, dtype, name, shape, full)
        for nodes in scale.checked_nodes
        for dtype in ("bfloat16", "float32")
        for name in KERNELS
        for shape, full in _shapes(scale, name).items()
    ]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        rows = [row for row in pool.map(check, tasks) if row is not None]
    return {"right": bool(rows) and all(row["right"] for row in rows), "rows": rows}


def _shapes(scale: Scale, name: str) -> Mapping[str, Any]:
    kinds: dict[type, Mapping[str, Any]] = {
        MixerShape: scale.mixers,
        AttentionShape: scale.attentions,
        HeadShape: scale.heads,
        ExpertShape: scale.experts,
    }
    return kinds[kernels.kind_of_shapes(name)]


def check_lossless(scale: Scale, clock: Clock) -> dict[str, Any]:
    """Greedy tokens of trees against autoregressive decoding; the kernels first."""

    def check(task: tuple[str, str, str]) -> dict[str, Any] | None:
        implementation, tree, family = task
        if not clock.fits(", ".join(task)):
            return None
        trees = {tree: lossless.TREES[tree]}
        config = lossless.FAMILIES[family]
        found = lossless.check(config, implementation, trees, tokens=scale.tokens)
        return {"family": family, "implementation": implementation, "tree": tree} | found[tree]

    # The interpreter takes minutes to compile such a loop.
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


def time_kernels(scale: Scale, bandwidth: float, clock: Clock) -> list[dict[str, Any]]:
    """Microseconds of a call of each kernel, as a share of many in one program.

    With one sequence the operands stay in the L2 cache, and a call can be below the floor; with
    many they do not.
    """
    rows = []
    for nodes in scale.timed["nodes"]:
        for shape in scale.timed["shapes"]:
            for size in scale.timed["batches"]:
                names = [name for name in kernels.TIMED if shape in _shapes(scale, name)]
                if nodes * size > MOST_TOKENS_OF_EXPERTS:
                    names = [n for n in names if kernels.kind_of_shapes(n) is not ExpertShape]
                if not names:
                    continue
                if clock.fits(f"{shape}, {nodes} nodes, batch of {size}"):
                    rows += _timed(scale, bandwidth, shape, nodes, size, names)
    return rows


def _timed(
    scale: Scale, bandwidth: float, shape: str, nodes: int, size: int, names: list[str]
) -> list[dict[str, Any]]:
    operands = {
        name: KERNELS[name].operands(
            Problem(_shapes(scale, name)[shape], nodes, scale.dtype, size, scale.capacity)
        )
        for name in names
    }

    def compiled(key: tuple[str, str]) -> Any:
        name, implementation = key
        function = functools.partial(KERNELS[name].function, implementation=implementation)
        many = kernels.repeated(function, KERNELS[name].feedback, scale.count)
        return jax.jit(many).lower(*operands[name]).compile()

    keys = [(name, implementation) for name in names for implementation in scale.implementations]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        programs = dict(zip(keys, pool.map(compiled, keys), strict=True))
    rows = []
    for name in names:
        calls = {
            implementation: functools.partial(_wait, programs[name, implementation], operands[name])
            for implementation in scale.implementations
        }
        for call in calls.values():
            call()
        seconds = interleaved(calls, scale.rounds, lambda: None)
        microseconds = {
            implementation: summary([1e6 * value / scale.count for value in values])
            for implementation, values in seconds.items()
        }
        moved = kernels.bytes_moved(name, operands[name])
        floor = 1e6 * moved / bandwidth
        fastest = microseconds[scale.implementations[-1]]["median"]
        rows.append(
            {
                "kernel": name,
                "shape": shape,
                "nodes": nodes,
                "batch": size,
                "microseconds": microseconds,
                "bytes": moved,
                "floor_microseconds": floor,
                "kernel_over_floor": fastest / floor,
                "xla_over_kernel": microseconds["xla"]["median"] / fastest,
            }
        )
    return rows


def _wait(program: Any, operands: Sequence[Any]) -> None:
    jax.block_until_ready(program(*operands))


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
    """Milliseconds of a verify step by implementation and number of nodes; an empty prompt.

    Chains to 5 nodes, then the first nodes of a full binary tree, as in `benchmarks.tree_size`.
    """
    models = random_models(config, scale.dtype, scale.implementations)

    def compiled(key: tuple[int, str]) -> Any:
        nodes, name = key
        if not clock.fits(f"{nodes} nodes, {name}"):
            return None
        return run_steps.lower(models[name], tree_of(nodes), scale.count).compile()

    # Tracing a deep model takes long, and holds Python's lock: more threads would all end late.
    keys = [(nodes, name) for nodes in scale.step_nodes for name in scale.implementations]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        done = dict(zip(keys, pool.map(compiled, keys), strict=True))
    programs = {
        (nodes, name): program
        for (nodes, name), program in done.items()
        if all(done[nodes, other] is not None for other in scale.implementations)
    }
    calls = {
        f"{nodes} {name}": functools.partial(_wait, program, (models[name],))
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
            warnings.simplefilter("ignore")  # of fits to as few points as there was time for
            result["fits"] = fits_of(sizes)
    return result


def measure_packed(scale: Scale, pair: Pair, clock: Clock) -> dict[str, Any]:
    """Table 1, see `benchmarks.packed`; the largest trees first."""
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
    """A token of transformers with the shape of `scale.mamba2`."""
    device = "cuda" if on_gpu() else "cpu"
    if obstacle := transformers_step.obstacle(device):
        clock.left_out.append(f"all of it: {obstacle}")
        return None
    return transformers_step.measure(
        scale.mamba2, device=device, dtype=scale.dtype, tokens=scale.tokens, rounds=5
    )


def end_to_end(scale: Scale, trained: byte_pair.Trained, clock: Clock) -> dict[str, Any]:
    """Speed and tau of the trained pair: tokens checked in float32, then timed in bfloat16."""
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
