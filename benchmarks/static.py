"""What does a decode step become on a GPU? Compiled for GPUs that are not there.

XLA compiles a verify step (replay, forward of a tree, best tokens), the reading of a prompt and the
whole decode loop from abstract weights; its own reports tell kernels, memory and bytes. Programs
with one layer more of a kind give the cost of such a layer; a whole model is the sum. What memory
it needs is no sum; `--whole` compiles it, and tells.

    python -m benchmarks.static [--presets mamba2-2.7b] [--gpus H100 A100 ...] [--nodes 16 64]
        [--prompts 512]

What it needs is in `benchmarks/deviceless.py`. Results go to `benchmarks/results/static.json`;
a run of some presets or GPUs replaces those rows only. Exit code 1 if a kernel spills registers, or
if our kernels take more launches a layer, or memory, than `--most-launches` and `--most-temporary`
allow.

Matrix products are not autotuned, since there is nothing to time them on: kernel counts and memory
hold, a device may choose other blocks. What XLA chooses is to split the inner axis of small
products and to add the parts up in a kernel of its own; rows with `products` "whole" are compiled
without that (`xla_gpu_experimental_force_split_k=1`).
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.deviceless import GPUS, PRODUCTS, Compiler  # first: sets XLA's flags

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.common import RESULTS, merged, print_table, write_json
from benchmarks.programs import Memory
from benchmarks.thunks import Thunks, by_name, launches, num_loops
from pallas_kernels import RecordQueue
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.prefill import PIECE
from stree_jax.decoding.state import Context, Limits, Sampling
from stree_jax.decoding.verify import VERIFIERS
from stree_jax.models.cache import QueuedPending, init_cache, path_to

IMPLEMENTATIONS = ("xla", "pallas")
MAX_LENGTH = 1024  # places of attention caches
# Which row of the results it is; steps have nodes, prompts positions.
ROW = ("preset", "gpu", "implementation", "products", "nodes", "positions")
STEPS = 2  # in a program, as `SpeculativeDecoder.rounds` on a GPU


@dataclasses.dataclass(frozen=True)
class Cost:
    """A program's or a layer's cost; a difference of programs is the cost of what they differ in.

    Attributes:
        launches: kernels, library calls, copies and fills put on the device in one run.
        copies: copies and fills among them.
        bytes_moved: read and written, by XLA's cost model; a kernel of ours counts its arguments
            and results.
        floor_bytes: weights read once, caches read once and written once.
        record_bytes: of the record of a tree, with the free place if it is in a queue.
    """

    launches: float
    copies: float
    bytes_moved: float
    floor_bytes: int
    record_bytes: int

    def __sub__(self, other: "Cost") -> "Cost":
        return self.plus(other, -1)

    def plus(self, other: "Cost", times: int) -> "Cost":
        """With `times` more of another."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a + times * b for a, b in zip(mine, theirs, strict=True)))


def num_bytes(tree: Any) -> int:
    """Bytes of abstract or real arrays."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_moved(compiled: Any, queues: Iterable[RecordQueue] = ()) -> float:
    """XLA's estimate for the optimised program, and the arguments and results of our kernels.

    NaN where this jax does not tell. Of queues a kernel reads one place and writes one.
    """
    text = None
    with contextlib.suppress(Exception):
        from jax._src.lib import _jax

        (module,) = compiled.runtime_executable().hlo_modules()
        client = jax.devices("cpu")[0].client
        estimate = float(_jax.hlo_module_cost_analysis(client, module)["bytes accessed"])
        text = module.to_string()
    if text is None:
        return float("nan")
    places = {
        _hlo_shape(array): len(array)
        for queue in queues
        for array in jax.tree.leaves(queue.records)
    }
    kernels = kernel_bytes(text, places)
    return estimate + sum(kernels) + len(kernels)  # each of which is -1 in XLA's estimate


def _hlo_shape(array: Any) -> str:
    """Such as `bf16[2,3]`."""
    names = {"bfloat16": "bf16", "float32": "f32"}
    return f"{names[array.dtype.name]}[{','.join(map(str, array.shape))}]"


def kernel_bytes(module: str, places: Mapping[str, int]) -> list[int]:
    """Bytes of arguments and results of each Triton kernel in the text of a program.

    Args:
        module: the text.
        places: by shape, such as `bf16[2,3]`, of how many equal parts a kernel needs one only.
    """
    shapes = dict(re.findall(r"(%[\w.-]+) = (\([^()]*\)|\S+) [\w-]+\(", module))
    calls = re.findall(
        r'(%[\w.-]+) = [^\n]*? custom-call\(([^)]*)\),[^\n]*"__gpu\$xla\.gpu\.triton"', module
    )
    return [
        sum(
            _shape_bytes(shapes[name], places)
            # An argument may be passed twice, for two parts of it.
            for name in {result, *re.findall(r"%[\w.-]+", operands)}
        )
        for result, operands in calls
    ]


def _shape_bytes(shape: str, places: Mapping[str, int]) -> int:
    """Of an array or a tuple, such as `(f32[2,3]{1,0}, pred[])`."""
    total = 0
    for array, bits, sizes in re.findall(r"((?:[a-z]*?(\d+)|pred)\[([\d,]*)\])", shape):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        total += count * (int(bits) // 8 if bits else 1) // places.get(array, 1)
    return total


class Program(NamedTuple):
    """What a verify step, or the reading of a prompt, was compiled to."""

    cost: Cost
    kernels: Counter[str]  # launches by name
    steps: int  # that `kernels` are of
    shared_memory: int  # most of a block
    spills: bool
    memory: Memory


def verify_step(
    compiler: Compiler, config: st.ModelConfig, nodes: int, implementation: str
) -> Program:
    """Compiles calls of the target on full binary trees; batch of 1, bfloat16 weights.

    The program is `STEPS` of them, each of which replays a path of the one before, as in the decode
    loop. Their cost is divided by their number.
    """
    structure, weights = st.HybridLM.abstract(
        config, dtype="bfloat16", implementation=implementation
    )
    topology = st.TreeTopology((-1, *((node - 1) // 2 for node in range(1, nodes))))
    cache = jax.eval_shape(lambda: init_cache(config, 1, MAX_LENGTH, jnp.bfloat16))
    pending = jax.eval_shape(lambda: nnx.merge(structure, weights).init_pending(1, nodes))
    queues = [pending.queue] if isinstance(pending, QueuedPending) else []
    struct = jax.ShapeDtypeStruct

    def step(weights: Any, tokens: Any, valid: Any, last: Any, pending: Any, cache: Any) -> Any:
        model = nnx.merge(structure, weights)
        tree = topology.tree(valid)
        for _ in range(STEPS):
            (tokens, _), pending, cache = model.tree_best(
                tokens, tree, cache, replay=(pending, path_to(tree, last))
            )
            last = tokens[:, 0] % nodes  # a path that is not known before
        return tokens, pending, cache

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
    found = Thunks.parse(thunks).outside
    count, copies = launches(found)
    cost = Cost(
        launches=count / STEPS,
        copies=copies / STEPS,
        bytes_moved=bytes_moved(compiled, queues) / STEPS,
        floor_bytes=num_bytes(weights) + 2 * num_bytes(cache),
        record_bytes=num_bytes(pending),
    )
    shared_memory = max(thunk.shared_memory for thunk in found)
    return Program(cost, by_name(found), STEPS, shared_memory, spills, Memory.of(compiled))


def read_prompt(
    compiler: Compiler, config: st.ModelConfig, positions: int, implementation: str
) -> Program:
    """Compiles the reading of a piece of one prompt; bfloat16 weights.

    XLA's scan of a sequence has a loop over chunks, whose launches count as often as it runs; its
    bytes count once, since XLA's cost model does not know how often.
    """
    structure, weights = st.HybridLM.abstract(
        config, dtype="bfloat16", implementation=implementation
    )
    cache = jax.eval_shape(lambda: init_cache(config, 1, positions, jnp.bfloat16))

    def read(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
        _, cache = nnx.merge(structure, weights).prefill(tokens, lengths, cache)
        return cache  # as the decode loop, which samples from the last token itself

    arguments = (
        weights,
        jax.ShapeDtypeStruct((1, positions), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        cache,
    )
    compiled, thunks, spills = compiler(
        jax.jit(read, donate_argnames="cache"), *compiler.place(arguments)
    )
    outside, inside = Thunks.parse(thunks)
    if loops := num_loops(outside):
        # Each Mamba-2 layer has one; XLA may have done with a loop of one trip.
        assert config.mamba2 is not None
        assert loops == sum(kind in ("mamba2", "parallel") for kind in config.layers)
        trips = -(-positions // config.mamba2.chunk_size)
    else:
        trips = 0
    found = [*outside, *inside * trips]
    cost = Cost(
        *launches(found),
        bytes_moved=bytes_moved(compiled),
        floor_bytes=num_bytes(weights) + 2 * num_bytes(cache),
        record_bytes=0,
    )
    shared_memory = max(thunk.shared_memory for thunk in found)
    return Program(cost, by_name(found), 1, shared_memory, spills, Memory.of(compiled))


def with_layers(config: st.ModelConfig, layers: tuple[str, ...]) -> st.ModelConfig:
    """The same model with other layers; a shared block has but one use, for each reads it anew."""
    shared = config.shared
    if shared is not None:
        shared = dataclasses.replace(shared, num_blocks=layers.count("shared"))
    return dataclasses.replace(config, layers=layers, shared=shared)


def few_layers(config: st.ModelConfig) -> tuple[str, ...]:
    """One of each kind, but two Mamba-2 layers behind a shared block, which needs one behind it."""
    kinds = dict.fromkeys(config.layers)
    if "shared" not in kinds:
        return tuple(kinds)
    assert {*kinds} == {"shared", "mamba2"}
    return ("shared", "mamba2", "mamba2")


def by_layer(config: st.ModelConfig, build: Callable[[st.ModelConfig], Program]) -> dict[str, Any]:
    """Cost of a layer of each kind in a program, and of the whole model as their sum.

    Of steps with our kernels the sum is what `--whole` finds.
    """
    # Twice, since a first layer fuses with the embedding.
    few = few_layers(config) * 2
    base = build(with_layers(config, few))
    layers, whole = {}, base.cost
    longer: dict[str, Program] = {}
    for kind in sorted({*few}, key=lambda kind: (kind == "shared", few.index(kind))):
        # Before the last layer of the same kind, so that its neighbours are what they always are.
        new, without = (kind,), base
        if kind == "shared":  # and the layer behind it, which the program without it has, too
            new, without = ("shared", "mamba2"), longer["mamba2"]
        longer[kind] = build(with_layers(config, _insert(few, new)))
        cost, more = longer[kind].cost - without.cost, longer[kind].kernels - without.kernels
        layers[kind] = dataclasses.asdict(cost) | {
            "kernels": {name: count / base.steps for name, count in sorted(more.items())}
        }
        whole = whole.plus(cost, config.layers.count(kind) - few.count(kind))
    programs = (base, *longer.values())
    return {
        "layers": layers,
        "step": dataclasses.asdict(whole),
        "shared_memory_bytes": max(program.shared_memory for program in programs),
        "spills": any(program.spills for program in programs),
    }


def _insert(layers: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    last = len(layers) - 1 - layers[::-1].index(new[0])
    return (*layers[:last], *new, *layers[last:])


def decode_loop(
    compiler: Compiler, config: st.ModelConfig, draft: st.ModelConfig, implementation: str
) -> dict[str, Any]:
    """The whole loop with tree A, both models cut to one layer of each kind: what is not layers."""

    def abstract(config: st.ModelConfig) -> st.HybridLM:
        short = with_layers(config, few_layers(config))
        return nnx.merge(
            *st.HybridLM.abstract(short, dtype="bfloat16", implementation=implementation)
        )

    target, drafter = abstract(config), st.ModelDrafter(abstract(draft))
    decoder = SpeculativeDecoder(
        st.TreeTopology.paper("A"), VERIFIERS["greedy"], False, 64, rounds=STEPS
    )
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
        "topology": "A",
        "launches_a_step": launches(inside)[0] / STEPS,
        "copies_a_step": launches(inside)[1] / STEPS,
        # The host reads the predicate of loops whose trip count is not known: all of these.
        "host_reads_a_step": (num_loops(outside) + num_loops(inside)) / STEPS,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "spills": spills,
    }


def main() -> None:
    """Compiles everything asked for, prints tables and writes JSON; exit code 1 on spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["mamba2-2.7b"])
    parser.add_argument("--draft", default="mamba2-130m", help="preset, for the loop")
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=GPUS)
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 64])
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[],
        help=f"tokens; of long prompts {PIECE} are read at a time",
    )
    parser.add_argument(
        "--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS
    )
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument(
        "--most-launches",
        nargs="+",
        type=limit,
        default=[],
        metavar="KIND=NUMBER",
        help="of a layer with our kernels, products whole, such as mamba2=4 attention=6; and"
        " prompt-mamba2=11 where a prompt is read",
    )
    parser.add_argument("--whole", action="store_true", help="compile whole models, too")
    parser.add_argument(
        "--most-temporary",
        type=float,
        default=math.inf,
        metavar="MIB",
        help="memory of a whole model's step with our kernels, products whole, beside arguments",
    )
    parser.add_argument("--output", type=Path, help="directory of the results")
    options = parser.parse_args()
    if options.most_temporary < math.inf and not options.whole:
        parser.error("--most-temporary is of whole models: add --whole")
    configs = {name: st.ModelConfig.preset(name) for name in options.presets}
    draft = st.ModelConfig.preset(options.draft)
    compilers = [Compiler(gpu, products) for gpu in options.gpus for products in options.products]
    rows: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    loops: list[dict[str, Any]] = []
    kinds = (
        ("nodes", options.nodes, verify_step, rows),
        ("positions", options.prompts, read_prompt, prompts),
    )
    for name, config in configs.items():
        for compiler in compilers:
            for implementation in options.implementations:
                which = {"preset": name, "gpu": compiler.gpu, "implementation": implementation}
                which |= {"products": compiler.products}
                for unit, sizes, program, results in kinds:
                    for size in sizes:
                        began = time.monotonic()
                        build = functools.partial(
                            program, compiler, **{unit: size}, implementation=implementation
                        )
                        row = which | {unit: size} | by_layer(config, build)
                        if options.whole:
                            whole = build(config)
                            row["whole"] = {
                                **dataclasses.asdict(whole.cost),
                                "spills": whole.spills,
                                "temporary_bytes": whole.memory.temporary,
                                "argument_bytes": whole.memory.arguments,
                            }
                        row |= {"seconds": round(time.monotonic() - began, 1)}
                        results.append(row)
                        print(json.dumps(row), flush=True)
                loops.append(which | decode_loop(compiler, config, draft, implementation))
                print(json.dumps(loops[-1]), flush=True)
    path = report(rows, prompts, loops, options.output)
    passes = (*rows, *prompts)
    programs = (*passes, *loops, *(row["whole"] for row in passes if "whole" in row))
    spilled = sum(program["spills"] for program in programs)
    most: dict[str, float] = {}
    temporary = []
    for row in passes:
        if (row["implementation"], row["products"]) == ("pallas", "whole"):
            is_prompt = "positions" in row
            for kind, layer in row["layers"].items():
                kind = f"prompt-{kind}" if is_prompt else kind
                most[kind] = max(most.get(kind, 0.0), layer["launches"])
            if "whole" in row and not is_prompt:
                temporary.append(row["whole"]["temporary_bytes"] / 2**20)
    summary = {
        "programs": len(rows) + len(prompts),
        "with_spills": spilled,
        "most_launches_of_a_layer": most,
    }
    print(json.dumps({"static": summary | {"results": str(path)}}))
    failures = [
        f"{kind}: {most.get(kind, 'no such layer, or no such program, was compiled;')} launches,"
        f" at most {number} are wanted; compiled were {most}"
        for kind, number in options.most_launches
        if most.get(kind, math.inf) > number
    ]
    if options.most_temporary < max(temporary, default=math.inf):
        failures.append(
            f"temporary memory, MiB: {temporary or 'nothing was compiled --whole'}; at most"
            f" {options.most_temporary} are wanted"
        )
    if spilled:
        failures.append(f"{spilled} programs spill registers")
    if failures:
        raise SystemExit("\n".join(failures))


def limit(text: str) -> tuple[str, float]:
    """`KIND=NUMBER`."""
    kind, _, number = text.partition("=")
    return kind, float(number)


def print_programs(title: str, unit: str, rows: list[dict[str, Any]]) -> None:
    """Tables of the layers of programs, and of whole programs."""
    which = ("preset", "gpu", "implementation", "products", unit)
    print_table(
        f"A layer of {title} (batch 1, bfloat16)",
        (*which, "layer", "launches", "copies", "bytes / floor"),
        [
            (
                *(row[name] for name in which),
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
        f"The whole of {title}",
        (*which, "launches", "bytes / floor", "temp. MiB", "record", "shared KiB", "spills"),
        [
            (
                *(row[name] for name in which),
                row["step"]["launches"],
                row["step"]["bytes_moved"] / row["step"]["floor_bytes"],
                row["whole"]["temporary_bytes"] / 2**20 if "whole" in row else "-",
                row["step"]["record_bytes"] / 2**20,
                row["shared_memory_bytes"] / 2**10,
                "yes" if row["spills"] else "no",
            )
            for row in rows
        ],
    )


def report(
    rows: list[dict[str, Any]],
    prompts: list[dict[str, Any]],
    loops: list[dict[str, Any]],
    directory: Path | None,
) -> Path:
    """Prints the tables and writes the JSON."""
    print_programs("a verify step", "nodes", rows)
    if prompts:
        print_programs("the reading of a prompt", "positions", prompts)
    print_table(
        "A step of the loop, one layer of each kind in target and draft",
        ("preset", "gpu", "kernels", "products", "launches", "copies", "host reads", "spills"),
        [
            (
                row["preset"],
                row["gpu"],
                row["implementation"],
                row["products"],
                row["launches_a_step"],
                row["copies_a_step"],
                row["host_reads_a_step"],
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
        earlier = json.loads(((directory or RESULTS) / "static.json").read_text())
        if earlier.items() >= settings.items():
            rows = merged(earlier["steps"], rows, ROW)
            prompts = merged(earlier["prompts"], prompts, ROW)
            loops = merged(earlier["loops"], loops, ROW)
    results = settings | {"steps": rows, "prompts": prompts, "loops": loops}
    return write_json("static", results, directory)


if __name__ == "__main__":
    main()
