"""Do the kernels run on this GPU, are they right, and how fast is a step? In fifteen minutes.

    python -m benchmarks.gpu --output DIR [--minutes 8] [--tiny]

Parts, each with its own process and a share of the time; time that one leaves goes to the next:

- device: the bandwidth of its memory, from which the floors of steps follow;
- models: logits of real widths, few layers, by XLA and by the kernels against XLA in float32;
- steps: a call of the target on trees of 1 to 64 nodes, XLA against the kernels interleaved, with
  the times to trace and compile, and memory;
- loops: whole texts without drafts and with trees.

Programs of a row are compiled side by side, XLA's take most of the time. `gpu.json` is written
after every row, so that a cut loses nothing; the same command with the same folder does what is
missing. A row in which its process dies has failed; one that is cut comes last the next time.
`--tiny` rehearses all of it on any device. Exit code 1 if anything is wrong.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import stree_jax as st
from benchmarks import common, steps
from benchmarks.methods import TWO_TREES
from benchmarks.models import Pair, embedded_pair
from benchmarks.tree_size import tree_of
from pallas_kernels import dispatch
from stree_jax.decoding.plan import plan
from stree_jax.measuring.clock import memory_of, num_bytes, summary
from stree_jax.measuring.report import write_json
from stree_jax.models.cache import path_to
from stree_jax.testing.exactness import first_difference

Row = dict[str, Any]
T = TypeVar("T")
Rows = Iterator[tuple[str, Callable[[], Row]]]  # the name of a row, and what measures it
OPTIONS = {"--minutes": 8.0, "--part": None, "--seconds": 0.0, "--tiny": common.SMOKE}
HELP = {"--minutes": "time limit", "--part": "only this", "--seconds": "its rows begin in"}
LEAST, LATEST = 20.0, 1.4  # seconds that a part needs; times its share: when it is killed
THREADS = 4  # that compile; XLA chooses its products for one at a time
ATTEMPTS = 4  # a process that died is started again without the row in which it died
PAPER = st.TreeTopology.paper("A")


class Sizes(NamedTuple):
    """Sizes of a measurement: on a GPU, or of `--tiny`."""

    models: Mapping[str, st.ModelConfig]  # the last one drafts
    kernel: str = "pallas"
    nodes: tuple[int, ...] = (1, 16, 64, 5)  # the most important first
    layers: int = 8  # of models whose logits are compared; Qwen3.5 repeats every eight
    positions: int = 512  # of their prompts
    repeats: int = 20  # of calls that must give the same bits
    calls: int = 20  # in a timed program
    rounds: int = 7  # of timed programs
    tokens: int = 64  # of a text
    copied: int = 1 << 30  # bytes
    loops: tuple[str, ...] = ("xla", "pallas")  # the interpreter compiles a loop for minutes


SHAPES = ("mamba2-2.7b", "Qwen3.5-0.8B", "mamba2-130m")
FULL = Sizes({name: st.ModelConfig.preset(name) for name in SHAPES})
_ONE = {"one layer": st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16)}
_LESS: dict[str, Any] = dict(nodes=(5,), layers=1, positions=20, repeats=2, calls=2, rounds=2)
_LESS |= dict(tokens=4, copied=1 << 20, loops=("xla",))
TINY = Sizes(_ONE, kernel="pallas_interpret", **_LESS)


def side_by_side(makers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What some functions return, each on a thread."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(makers, pool.map(lambda make: make(), makers.values()), strict=True))


def running(model: st.HybridLM, implementation: str, dtype: Any = None) -> st.HybridLM:
    """The same weights by another implementation."""
    options: dict[str, Any] = {"dtype": dtype or model.dtype, "implementation": implementation}
    structure, like = st.HybridLM.abstract(model.config, **options)
    own = nnx.to_pure_dict(nnx.state(model.in_first()))
    return nnx.merge(structure, jax.tree.map(lambda a, b: a.astype(b.dtype), own, like))


@functools.lru_cache(maxsize=1)  # the newest: weights are large
def random_model(config: st.ModelConfig) -> st.HybridLM:
    """A model in bfloat16, made array by array: one program of all would compile for long."""
    return st.HybridLM(config, dtype="bfloat16", rngs=nnx.Rngs(0))


def of_device(sizes: Sizes) -> Rows:
    """Adding 1 to a large array in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(value: jax.Array) -> jax.Array:
        return lax.fori_loop(0, sizes.calls, lambda _, x: lax.optimization_barrier(x + 1), value)

    def measure() -> Row:
        value = jnp.zeros(sizes.copied // 4, jnp.int32)

        def call() -> jax.Array:
            nonlocal value
            return (value := run(value))

        seconds = common.timed_calls("copies", {"copy": call}, sizes.rounds)["copy"]
        return {"bytes_per_second": 2 * sizes.copied * sizes.calls / min(seconds)}

    yield "bandwidth", measure


@jax.jit
def text_logits(model: st.HybridLM, prompt: jax.Array, nodes: jax.Array) -> jax.Array:
    """Logits of a tree after a prompt and a path of another tree: all kernels of a layer."""
    tree = PAPER.tree(jnp.ones(nodes.shape, bool))
    size = prompt.shape[1]
    cache = model.init_cache(2, size + PAPER.num_nodes)
    _, cache = model.prefill(prompt, jnp.array([size, size // 3 + 1]), cache)  # a row is padded
    _, pending, cache = model.tree_forward(nodes, tree, cache)
    path = path_to(tree, jnp.array([PAPER.num_nodes - 1, -1]))  # the second row has none
    return model.tree_forward(nodes[:, ::-1], tree, cache, replay=(pending, path))[0]


def of_models(sizes: Sizes) -> Rows:
    """Both implementations in bfloat16 against XLA in float32, with the same weights."""

    def measure(config: st.ModelConfig) -> Row:
        model = random_model(config.with_layers(config.kinds[: sizes.layers]))
        rng, shapes = np.random.default_rng(0), ((2, sizes.positions), (2, PAPER.num_nodes))
        tokens = [jnp.asarray(rng.integers(config.vocab_size, size=shape)) for shape in shapes]
        models = {each: running(model, each) for each in ("xla", sizes.kernel)}
        models["truth"] = running(model, "xla", jnp.float32)
        lowered = {}
        for each, own in models.items():
            with jax.default_matmul_precision("highest" if each == "truth" else None):
                lowered[each] = text_logits.lower(own, *tokens)
        programs = side_by_side({each: low.compile for each, low in lowered.items()})
        calls = {each: functools.partial(programs[each], models[each], *tokens) for each in models}
        truth, errors, changed = calls.pop("truth")(), dict[str, float](), dict[str, int]()
        for each, call in calls.items():
            difference = jnp.linalg.norm((first := call()) - truth) / jnp.linalg.norm(truth)
            errors[each] = float(jnp.nan_to_num(difference, nan=1e9))
            # Other bits in another call are a race.
            again = (call() for _ in range(sizes.repeats))
            changed[each] = sum(not bool(jnp.array_equal(first, other)) for other in again)
        right = errors[sizes.kernel] <= max(1.5 * errors["xla"], 1e-3)  # of 8 layers in bfloat16
        right &= changed[sizes.kernel] <= changed["xla"]
        return {"errors": errors, "changed": changed, "right": right}

    yield from ((name, functools.partial(measure, each)) for name, each in sizes.models.items())


def of_steps(sizes: Sizes) -> Rows:
    """Milliseconds of a call, and the least that it moves: weights once, states there and back."""

    def measure(config: st.ModelConfig) -> Row:
        model, every = random_model(config), itertools.product(sizes.nodes, ("xla", sizes.kernel))

        def program(nodes: int, each: str) -> tuple[Callable[[], Any], Row]:
            own, began = running(model, each), time.perf_counter()
            lowered = steps.run_steps.lower(own, tree_of(nodes), sizes.calls)
            traced, program = time.perf_counter(), lowered.compile()
            seconds = {"trace": traced - began, "compile": time.perf_counter() - traced}
            found = {"seconds": seconds, "bytes": memory_of(program)}
            return functools.partial(program, own), found

        names = {f"{nodes} nodes, {each}": (nodes, each) for nodes, each in every}
        made = side_by_side({name: functools.partial(program, *names[name]) for name in names})
        calls = {name: call for name, (call, _) in made.items()}
        taken = common.timed_calls("steps", calls, sizes.rounds, 1e3 / sizes.calls)
        unread = 0 if config.tie_embeddings else config.num_embeddings * config.d_model * 2
        weights = num_bytes(nnx.state(model)) - unread  # of the embedding: all but a row a token
        states = num_bytes(jax.eval_shape(functools.partial(model.init_cache, 1, 0)))
        found = {name: {"milliseconds": summary(taken[name])} | made[name][1] for name in made}
        return {"bytes": weights + 2 * states, "programs": found}

    yield from ((name, functools.partial(measure, each)) for name, each in sizes.models.items())


def of_loops(sizes: Sizes) -> Rows:
    """The embedded pair in float32, whose texts must agree, and random weights in bfloat16."""
    embedded, configs = embedded_pair(4, 16), sizes.models
    (large, config), small = next(iter(configs.items())), [*configs.values()][-1]

    def random_pair() -> Pair:
        draft = st.HybridLM(small, dtype="bfloat16", rngs=nnx.Rngs(1))
        return Pair(large, random_model(config), draft, [[1] * 16], "")

    def measure(pair: Callable[[], Pair], implementation: str) -> Row:
        _, target, draft, prompts, _ = pair()
        target, draft = running(target, implementation), running(draft, implementation)

        def program(tree: st.TreeTopology | None) -> tuple[steps.Program, float]:
            drafts = {"drafter": st.ModelDrafter(draft), "topology": tree} if tree else {}
            began, most = time.perf_counter(), sizes.tokens
            made = steps.Program(target, prompts[0], max_new_tokens=most, **drafts)
            return made, time.perf_counter() - began

        trees = {"no drafts": None} | TWO_TREES
        made = side_by_side({way: functools.partial(program, trees[way]) for way in trees})
        programs = {way: each for way, (each, _) in made.items()}
        ends, seconds = common.timed(implementation, programs, prompts, sizes.rounds // 2 + 1)
        row, differences = Row(), []
        for way, states in ends.items():
            calls = sum(int(end.statistics.target_calls[0]) for end in states)
            emitted = sum(int(end.statistics.emitted[0]) for end in states)
            row[way] = {
                "tau": emitted / calls,
                "milliseconds_of_call": summary(1e3 * seconds[way].sum(axis=1) / calls),
                "compile_seconds": made[way][1],
                "temporary_bytes": programs[way].temporary,
            }
            for prompt, *both in zip(prompts, states, ends["no drafts"], strict=True):
                new = slice(len(prompt), len(prompt) + sizes.tokens)
                texts = [np.asarray(each.context.tokens[0, new]) for each in both]
                request = plan(target, [prompt], max_new_tokens=sizes.tokens)
                if found := first_difference(target, request, 0, *texts):
                    differences.append({"way": way} | found._asdict())
        # In bfloat16 products of other numbers of rows may choose another token.
        right = target.dtype != jnp.float32 or all(each["is_tie"] for each in differences)
        return {"ways": row, "differences": differences, "right": right}

    pairs = {embedded.name: lambda: embedded, large: random_pair}
    for (name, pair), each in itertools.product(pairs.items(), sizes.loops):
        yield f"{name}, {each}", functools.partial(measure, pair, each)


# And the share of the time of each, relative to those after it.
PARTS: dict[str, tuple[Callable[[Sizes], Rows], float]] = {
    "device": (of_device, 0.5),
    "models": (of_models, 2.0),
    "steps": (of_steps, 5.0),
    "loops": (of_loops, 3.0),
}


class Results:
    """The file of all rows, read when a process begins and replaced for every row."""

    def __init__(self, path: Path, part: str):
        self.path = path
        self.data = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        self.rows: dict[str, Row] = self.data["parts"].setdefault(part, {})

    def save(self, name: str, row: Row) -> None:
        """Writes a row, the newest last."""
        self.rows.pop(name, None)
        self.rows[name] = row
        write_json(self.path, self.data)


def work(part: str, sizes: Sizes, path: Path, seconds: float) -> None:
    """Measures the rows of a part that are missing; refuses results of another device."""
    end, results = time.monotonic() + seconds, Results(path, part)
    if sizes is FULL and (obstacle := dispatch.device_obstacle()):
        raise SystemExit(f"nothing was measured: {obstacle}; --tiny rehearses it here")
    machine = results.data.setdefault("machine", now := common.machine())
    if (machine["device"], machine["jax"]) != (now["device"], now["jax"]):
        raise SystemExit(f"{path} is of {machine['device']}, jax {machine['jax']}; move it away")
    rows = dict(PARTS[part][0](sizes))
    missing = [name for name in rows if "cut" in results.rows.get(name, {"cut": True})]
    for name in sorted(missing, key=results.rows.__contains__):
        if time.monotonic() > end:
            break
        results.save(name, {"cut": True})
        began = time.perf_counter()
        try:
            row = rows[name]()
        except Exception as error:  # one row must not cost the others
            row = {"failed": f"{type(error).__name__}: {error!s:.500}", "right": False}
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        row |= {"seconds": round(time.perf_counter() - began, 2), "peak_bytes": peak}
        results.save(name, row)
        print(f"{part}, {name}: {row['seconds']} s", flush=True)
        jax.clear_caches()
        jnp.ones(8).sum().block_until_ready()  # a device that is broken ends the process


def run_part(part: str, options: Sequence[str], path: Path, seconds: float, limit: float) -> None:
    """Runs a part in its own process, again if it died; the row in which it died has failed."""
    began = time.monotonic()
    for _ in range(ATTEMPTS):
        passed = time.monotonic() - began
        if limit - passed < LEAST:
            return
        command = [sys.executable, "-m", "benchmarks.gpu", *options, f"--part={part}"]
        command += [f"--seconds={seconds - passed}"]
        try:
            code = subprocess.run(command, timeout=limit - passed, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 0  # what was cut comes last the next time
        if code == 0:
            return
        results = Results(path, part)
        if not results.rows:
            raise SystemExit(f"{part}: its process ended with {code}")
        if "cut" in results.rows[died := [*results.rows][-1]]:
            results.save(died, {"failed": f"the process ended with {code}", "right": False})


def report(parts: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Prints the steps, and returns what is wrong."""
    speed = parts.get("device", {}).get("bandwidth", {}).get("bytes_per_second")
    for name, row in parts.get("steps", {}).items():
        floor = f"; floor {1e3 * row['bytes'] / speed:.3f}" if speed and "bytes" in row else ""
        for program, found in row.get("programs", {}).items():
            print(f"{name}, {program}: {found['milliseconds']['median']:.3f} ms{floor}")
    every = ((part, name, row) for part in parts for name, row in parts[part].items())
    return [f"{part}, {name}" for part, name, row in every if not row.get("right", True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all parts, prints what they found; exit code 1 if anything is wrong."""
    began = time.monotonic()
    options = common.read_options(common.parser_of(str(__doc__), OPTIONS, HELP), arguments)
    sizes, path = TINY if options.tiny else FULL, options.output / "gpu.json"
    if options.part:
        return work(options.part, sizes, path, options.seconds)
    # For the processes: jax would take most of the memory; compiling is most of a rehearsal.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.tiny:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    same = ["--output", str(options.output), *["--tiny"] * options.tiny]
    seconds, weights = dict[str, float](), [weight for _, weight in PARTS.values()]
    for i, name in enumerate(PARTS):
        left, start = began + 60 * options.minutes - time.monotonic(), time.monotonic()
        share = left * weights[i] / sum(weights[i:])
        run_part(name, same, path, share, min(LATEST * share + LEAST, left))
        seconds[name] = round(time.monotonic() - start, 1)
    wrong = report(json.loads(path.read_text())["parts"])
    common.conclude("gpu", passed=not wrong, wrong=wrong, seconds=seconds, results=str(path))


if __name__ == "__main__":
    main()
