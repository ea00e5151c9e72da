"""What does a decode step become on a GPU? Compiled for GPUs that are not there.

XLA compiles a verify step (replay, forward of a tree, best tokens) and the whole decode loop from
abstract weights; its own reports tell kernels, memory and bytes. Programs with one layer more of a
kind give the cost of such a layer; a whole model is the sum. `--whole` compiles it, too.

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
    python -m benchmarks.static [--presets mamba2-2.7b] [--gpus H100 A100 ...] [--nodes 16 64]

Results go to `benchmarks/results/static.json`, where a run of some presets or GPUs replaces those
rows only; exit code 1 if a kernel spills registers. Matrix products are not autotuned, since there
is nothing to time them on: kernel counts and memory hold, a device may choose other blocks.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.spills import DUMP, described_gpu, target_config  # first: sets XLA's flags

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stree_jax as st
from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.thunks import Thunks, launches
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.sampling import best_token
from stree_jax.decoding.state import Context, Limits, Sampling
from stree_jax.decoding.verify import VERIFIERS
from stree_jax.models.cache import init_cache, init_pending, path_to

GPUS = {"A100": 80, "RTX 3090": 86, "RTX 4090": 89, "H100": 90}
IMPLEMENTATIONS = ("xla", "pallas")
MAX_LENGTH = 1024  # places of attention caches
PLUGIN = "jax-cuda13-plugin and jax-cuda13-pjrt"

ON_SPILL = "xla_gpu_fail_ptx_compilation_on_register_spilling"
# What `benchmarks.spills` asks XLA to write, and what takes minutes here.
NO_CODE = {"xla_dump_emitter_re": "", "xla_gpu_dump_llvmir": False}


@dataclasses.dataclass(frozen=True)
class Cost:
    """A program's or a layer's cost; a difference of programs is the cost of what they differ in.

    Attributes:
        launches: kernels, library calls, copies and fills put on the device in one run.
        copies: copies and fills among them.
        bytes_moved: read and written, by XLA's cost model; a kernel of ours counts its arguments.
        floor_bytes: weights read once, caches read once and written once.
        temporary_bytes: memory beside arguments and results.
    """

    launches: int
    copies: int
    bytes_moved: float
    floor_bytes: int
    temporary_bytes: int

    def __sub__(self, other: "Cost") -> "Cost":
        return self.plus(other, -1)

    def plus(self, other: "Cost", times: int) -> "Cost":
        """With `times` more of another."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a + times * b for a, b in zip(mine, theirs, strict=True)))


class Compiler:
    """Compiles for one described GPU.

    Raises:
        SystemExit: the plugin, or a ptxas, is not installed.
    """

    def __init__(self, gpu: str):
        self.gpu, self.capability = gpu, GPUS[gpu]
        try:
            described = topologies.get_topology_desc(
                platform="cuda", target_config=target_config(self.capability), topology="1x1x1"
            )
        except Exception as error:  # jax has no type of its own for a platform that is not there
            raise SystemExit(
                f"cannot compile for a GPU here ({error!s:.200}): install {PLUGIN} in the version"
                f" of jax, {jax.__version__}, and put a ptxas on PATH"
            ) from None
        mesh = Mesh(np.array(described.devices), ("x",))
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def place(self, tree: Any) -> Any:
        """Abstract arguments on that GPU."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding),
            tree,
        )

    def __call__(self, jitted: Any, *arguments: Any) -> tuple[Any, str, bool]:
        """Compiles; returns the program, its thunks, and whether a kernel spills registers."""
        with described_gpu(self.capability):
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        spills = False
        for file in DUMP.iterdir():
            file.unlink()
        try:
            compiled = lowered.compile(compiler_options=NO_CODE | {ON_SPILL: True})
        except jax.errors.JaxRuntimeError as error:
            if "register spilling" not in str(error):
                raise
            spills = True
            compiled = lowered.compile(compiler_options=NO_CODE)
        (dump,) = DUMP.glob("*.thunk_sequence.txt")
        return compiled, dump.read_text(), spills


def num_bytes(tree: Any) -> int:
    """Bytes of abstract or real arrays."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_moved(compiled: Any) -> float:
    """XLA's estimate for the optimised program; NaN where this jax does not tell."""
    with contextlib.suppress(Exception):
        from jax._src.lib import _jax

        (module,) = compiled.runtime_executable().hlo_modules()
        client = jax.devices("cpu")[0].client
        return float(_jax.hlo_module_cost_analysis(client, module)["bytes accessed"])
    return float("nan")


def verify_step(
    compiler: Compiler, config: st.ModelConfig, nodes: int, implementation: str
) -> tuple[Cost, bool]:
    """Compiles one call of the target on a full binary tree; batch of 1, bfloat16 weights."""
    structure, weights = st.HybridLM.abstract(
        config, dtype="bfloat16", implementation=implementation
    )
    topology = st.TreeTopology((-1, *((node - 1) // 2 for node in range(1, nodes))))
    cache = jax.eval_shape(lambda: init_cache(config, 1, MAX_LENGTH, jnp.bfloat16))
    pending = jax.eval_shape(lambda: init_pending(config, 1, nodes, jnp.bfloat16))
    struct = jax.ShapeDtypeStruct

    def step(weights: Any, tokens: Any, valid: Any, last: Any, pending: Any, cache: Any) -> Any:
        model = nnx.merge(structure, weights)
        tree = topology.tree(valid)
        logits, pending, cache = model.tree_forward(
            tokens, tree, cache, replay=(pending, path_to(tree, last))
        )
        return best_token(logits, config.vocab_size), pending, cache

    arguments = (
        weights,
        struct((1, nodes), jnp.int32),
        struct((1, nodes), jnp.bool_),
        struct((1,), jnp.int32),
        pending,
        cache,
    )
    compiled, thunks, spills = compiler(
        jax.jit(step, donate_argnames=("pending", "cache")), *compiler.place(arguments)
    )
    count, copies = launches(Thunks.parse(thunks).outside)
    cost = Cost(
        launches=count,
        copies=copies,
        bytes_moved=bytes_moved(compiled),
        floor_bytes=num_bytes(weights) + 2 * num_bytes(cache),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )
    return cost, spills


def with_layers(config: st.ModelConfig, layers: tuple[str, ...]) -> st.ModelConfig:
    """The same model with other layers."""
    return dataclasses.replace(config, layers=layers)


def by_layer(
    compiler: Compiler, config: st.ModelConfig, nodes: int, implementation: str
) -> dict[str, Any]:
    """Cost of a layer of each kind, and of the whole model as their sum."""
    kinds = tuple(dict.fromkeys(config.layers))
    # Two of each, since a first layer fuses with the embedding.
    base, spills = verify_step(compiler, with_layers(config, kinds * 2), nodes, implementation)
    costs = {}
    for kind in kinds:
        # Before the last layer of the same kind, so that its neighbours are what they always are.
        longer, spilled = verify_step(
            compiler, with_layers(config, _insert(kinds * 2, kind)), nodes, implementation
        )
        costs[kind], spills = longer - base, spills or spilled
    whole = base
    for kind in kinds:
        whole = whole.plus(costs[kind], config.layers.count(kind) - 2)
    # Temporary memory is reused from layer to layer, so that it does not add up.
    whole = dataclasses.replace(whole, temporary_bytes=base.temporary_bytes)
    return {
        "gpu": compiler.gpu,
        "nodes": nodes,
        "implementation": implementation,
        "layers": {kind: _without_memory(cost) for kind, cost in costs.items()},
        "step": dataclasses.asdict(whole),
        "spills": spills,
    }


def _without_memory(cost: Cost) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(cost).items() if k != "temporary_bytes"}


def _insert(layers: tuple[str, ...], kind: str) -> tuple[str, ...]:
    last = len(layers) - 1 - layers[::-1].index(kind)
    return (*layers[:last], kind, *layers[last:])


def decode_loop(
    compiler: Compiler, config: st.ModelConfig, draft: st.ModelConfig, implementation: str
) -> dict[str, Any]:
    """The whole loop with tree A, both models cut to one layer of each kind: what is not layers."""

    def abstract(config: st.ModelConfig) -> st.HybridLM:
        short = with_layers(config, tuple(dict.fromkeys(config.layers)))
        return nnx.merge(
            *st.HybridLM.abstract(short, dtype="bfloat16", implementation=implementation)
        )

    target, drafter = abstract(config), st.ModelDrafter(abstract(draft))
    decoder = SpeculativeDecoder(st.TreeTopology.paper("A"), VERIFIERS["greedy"], False, 64)
    struct = jax.ShapeDtypeStruct
    context = Context(struct((1, 64), jnp.int32), struct((1,), jnp.int32))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(
        lambda *arguments: decoder.start(*arguments), target, drafter, context, keys
    )
    integer, real = struct((), jnp.int32), struct((), jnp.float32)
    arguments = compiler.place(
        (
            target,
            drafter,
            state,
            Limits(integer, struct((1,), jnp.int32)),
            Sampling(real, integer, real),
        )
    )
    compiled, thunks, spills = compiler(SpeculativeDecoder.run, decoder, *arguments)
    outside, inside = Thunks.parse(thunks)
    return {
        "gpu": compiler.gpu,
        "implementation": implementation,
        "topology": "A",
        "launches_an_iteration": launches(inside)[0],
        "copies_an_iteration": launches(inside)[1],
        # The host reads the predicate of every loop whose trip count XLA does not know.
        "host_reads_an_iteration": outside["kWhile"] + inside["kWhile"],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "spills": spills,
    }


def main() -> None:
    """Compiles everything asked for, prints tables and writes JSON; exit code 1 on spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["mamba2-2.7b"])
    parser.add_argument("--draft", default="mamba2-130m", help="preset, for the loop")
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=GPUS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS
    )
    parser.add_argument("--whole", action="store_true", help="compile whole models, too")
    options = parser.parse_args()
    configs = {name: st.ModelConfig.preset(name) for name in options.presets}
    draft = st.ModelConfig.preset(options.draft)
    compilers = [Compiler(gpu) for gpu in options.gpus]
    rows: list[dict[str, Any]] = []
    loops: list[dict[str, Any]] = []
    for name, config in configs.items():
        for compiler in compilers:
            for implementation in options.implementations:
                for nodes in options.nodes:
                    began = time.monotonic()
                    row = by_layer(compiler, config, nodes, implementation)
                    if options.whole:
                        whole, spilled = verify_step(compiler, config, nodes, implementation)
                        row |= {"whole": dataclasses.asdict(whole) | {"spills": spilled}}
                    row |= {"preset": name, "seconds": round(time.monotonic() - began, 1)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                loops.append(
                    {"preset": name} | decode_loop(compiler, config, draft, implementation)
                )
                print(json.dumps(loops[-1]), flush=True)
    with contextlib.suppress(OSError):
        for file in DUMP.iterdir():
            file.unlink()
        DUMP.rmdir()
    path = report(rows, loops)
    spilled = sum(row["spills"] for row in (*rows, *loops))
    print(
        json.dumps(
            {"static": {"programs": len(rows), "with_spills": spilled, "results": str(path)}}
        )
    )
    raise SystemExit(1 if spilled else 0)


def report(rows: list[dict[str, Any]], loops: list[dict[str, Any]]) -> Path:
    """Prints the tables and writes the JSON."""
    print_table(
        "A layer of a verify step (batch 1, bfloat16)",
        ("preset", "gpu", "kernels", "nodes", "layer", "launches", "copies", "bytes / floor"),
        [
            (
                row["preset"],
                row["gpu"],
                row["implementation"],
                row["nodes"],
                kind,
                cost["launches"],
                cost["copies"],
                cost["bytes_moved"] / cost["floor_bytes"],
            )
            for row in rows
            for kind, cost in row["layers"].items()
        ],
    )
    print_table(
        "The whole step",
        ("preset", "gpu", "kernels", "nodes", "launches", "bytes / floor", "temp. MiB", "spills"),
        [
            (
                row["preset"],
                row["gpu"],
                row["implementation"],
                row["nodes"],
                row["step"]["launches"],
                row["step"]["bytes_moved"] / row["step"]["floor_bytes"],
                row["step"]["temporary_bytes"] / 2**20,
                "yes" if row["spills"] else "no",
            )
            for row in rows
        ],
    )
    print_table(
        "An iteration of the loop, one layer of each kind in target and draft",
        ("preset", "gpu", "kernels", "launches", "copies", "host reads", "spills"),
        [
            (
                row["preset"],
                row["gpu"],
                row["implementation"],
                row["launches_an_iteration"],
                row["copies_an_iteration"],
                row["host_reads_an_iteration"],
                "yes" if row["spills"] else "no",
            )
            for row in loops
        ],
    )
    settings = {
        "question": __doc__.splitlines()[0],
        "jax": jax.__version__,
        "dtype": "bfloat16",
        "batch": 1,
        "attention_places": MAX_LENGTH,
    }
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((RESULTS / "static.json").read_text())
        if earlier.items() >= settings.items():
            rows, loops = merged(earlier["steps"], rows), merged(earlier["loops"], loops)
    return write_json("static", settings | {"steps": rows, "loops": loops})


def merged(earlier: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows, after those earlier ones that they do not replace."""

    def which(row: dict[str, Any]) -> tuple:
        return tuple(row.get(key) for key in ("preset", "gpu", "implementation", "nodes"))

    replaced = {which(row) for row in new}
    return [row for row in earlier if which(row) not in replaced] + new


if __name__ == "__main__":
    main()
