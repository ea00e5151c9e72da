"""Do the kernels run on this GPU, are they right, and how fast is a step? In fifteen minutes.

    python -m benchmarks.gpu --output DIR [--minutes 8] [--tiny]

Parts, each with its own process and a share of the time; time that one leaves goes to the next:

- device: the bandwidth of its memory, from which the floors of steps follow;
- bits: how many log-probabilities with drafts equal those without to the bit, asked for or not;
- steps: a call of the target on trees of 1 to 16 nodes, in batches of 1 and 8 rows, in bfloat16 and
  8 bits; with the kernels, also where equal bits are asked for or no kernel begins with the op
  before it, and by XLA;
- models: logits of real widths, few layers, by XLA and by the kernels against XLA in float32;
- loops: whole texts without drafts and with trees.

The most important rows of a part come first. Programs of a row are compiled side by side, XLA's
take most of the time. `gpu.json` is written after every row, so that a cut loses nothing; the same
command with the same folder does what is missing. A row in which its process dies has failed; one
that is cut comes last the next time. `--tiny` rehearses all of it on any device. Exit code 1 if
anything is wrong.
"""

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import stree_jax as st
from benchmarks import common, steps
from benchmarks.methods import TWO_TREES
from benchmarks.models import Pair, embedded_pair, on_gpu
from benchmarks.tree_size import tree_of
from pallas_kernels import dispatch, triton
from stree_jax.measuring.clock import num_bytes, summary
from stree_jax.measuring.report import write_json
from stree_jax.models.cache import path_to
from stree_jax.testing import bits_obstacle, perturbed

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
    nodes: tuple[int, ...] = (1, 5, 16)
    batches: tuple[int, ...] = (1, 8)
    weights: tuple[str, ...] = ("bfloat16", "int8")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    layers: int = 8  # of models whose numbers are compared; Qwen3.5 repeats every eight
    positions: int = 512  # of their prompts
    calls: int = 20  # in a timed program
    rounds: int = 7  # of timed programs
    tokens: int = 64  # of a text
    copied: int = 1 << 30  # bytes


SHAPES = ("mamba2-2.7b", "Qwen3.5-0.8B", "mamba2-130m")
FULL = Sizes({name: st.ModelConfig.preset(name) for name in SHAPES})
_ONE = {"one layer": st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16)}
_LESS: dict[str, Any] = dict(nodes=(5,), batches=(2,), weights=("int8",), temperatures=(1.0,))
_LESS |= dict(layers=1, positions=20, calls=2, rounds=2, tokens=4, copied=1 << 20)
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


def stored(model: st.HybridLM, weights: str) -> st.HybridLM:
    """The model with its matrices in a type of `Sizes.weights`: 8 bits are drawn on the device.

    To round the model's own on the host would take a minute.
    """
    if weights != "int8":
        return model
    options: dict[str, Any] = {"dtype": model.dtype, "implementation": model.implementation}
    abstract = nnx.merge(*st.HybridLM.abstract(model.config, **options)).quantized()
    kept = dict(jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))))

    def drawn(path: Any, leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.int8:
            return jax.random.randint(jax.random.key(leaf.size), leaf.shape, -127, 128, jnp.int8)
        return kept[path] if path in kept else jnp.full(leaf.shape, 3e-4, leaf.dtype)

    structure, like = nnx.split(abstract)
    return nnx.merge(structure, jax.tree.map_with_path(drawn, nnx.to_pure_dict(like)))


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
        truth, errors = calls.pop("truth")(), dict[str, float]()
        for implementation, call in calls.items():
            difference = jnp.linalg.norm(call() - truth) / jnp.linalg.norm(truth)
            errors[implementation] = float(jnp.nan_to_num(difference, nan=1e9))
        right = errors[sizes.kernel] <= max(1.5 * errors["xla"], 1e-3)  # of 8 layers in bfloat16
        return {"errors": errors, "right": right}

    yield from ((name, functools.partial(measure, each)) for name, each in sizes.models.items())


def of_bits(sizes: Sizes) -> Rows:
    """Texts of a batch with drafts against those without, of the same request.

    The draft is the target with noise on its weights, or the one that ships.
    """

    def of_shape(config: st.ModelConfig, weights: str) -> Pair:
        target = random_model(config.with_layers(config.kinds[: sizes.layers]))
        prompts = np.random.default_rng(0).integers(config.vocab_size, size=(4, 16)).tolist()
        target = stored(target, weights)
        target = target if on_gpu() else target.packed()
        return Pair("", target, perturbed(target, 0.02), prompts, "")

    def embedded(weights: str) -> Pair:
        return embedded_pair(4, 16, "bfloat16", quantize="int8" if weights == "int8" else None)

    def measure(pair: Callable[[str], Pair], weights: str, heat: float, wanted: bool) -> Row:
        _, target, draft, prompts, _ = pair(weights)
        options: Row = dict(max_new_tokens=sizes.tokens, temperature=heat, key=0, eos_token=())
        options |= dict(log_probs=True, to_the_bit=wanted)
        obstacle = bits_obstacle(target, PAPER.num_nodes, len(prompts), to_the_bit=wanted)
        if wanted and obstacle:
            return {"refused": obstacle}
        drafts = dict(drafter=st.ModelDrafter(draft))
        ways: dict[str, Row] = {way: drafts | {"topology": TWO_TREES[way]} for way in TWO_TREES}
        texts = side_by_side(
            {
                way: functools.partial(st.generate, target, prompts, **arguments, **options)
                for way, arguments in ({"no drafts": {}} | ways).items()
            }
        )
        programs, plain = Row(), texts["no drafts"]
        for way in ways:
            both = (np.asarray(text.log_probs).view(np.int32) for text in (texts[way], plain))
            programs[way] = {
                "equal": int(np.equal(*both).sum()),
                "numbers": plain.tokens.size,
                "texts": int((texts[way].tokens == plain.tokens).all(axis=1).sum()),
                "tau": texts[way].stats.tau,
            }
        right = all(program["equal"] == program["numbers"] for program in programs.values())
        return {"programs": programs, "right": right or obstacle is not None}

    pairs: dict[str, Callable[[str], Pair]] = {"embedded pair": embedded}
    pairs |= {name: functools.partial(of_shape, sizes.models[name]) for name in sizes.models}
    every = (True, False), pairs, sizes.weights, sizes.temperatures
    for wanted, name, weights, heat in itertools.product(*every):
        title = f"{name}, {weights}, T = {heat:g}" + ", to the bit" * wanted
        yield title, functools.partial(measure, pairs[name], weights, heat, wanted)


def of_steps(sizes: Sizes) -> Rows:
    """Milliseconds of a call, and the least that it moves: weights once, states there and back."""

    def measure(config: st.ModelConfig, weights: str, batch: int, implementation: str) -> Row:
        model = stored(running(random_model(config), implementation), weights)

        def program(nodes: int, to_the_bit: bool) -> Callable[[], Any]:
            shapes = tree_of(nodes), sizes.calls, batch, to_the_bit
            return functools.partial(steps.run_steps.lower(model, *shapes).compile(), model)

        bits = (False, True) if implementation == sizes.kernel else (False,)
        makers = {
            f"{nodes} nodes" + ", to the bit" * wanted: functools.partial(program, nodes, wanted)
            for nodes, wanted in itertools.product(sizes.nodes, bits)
        }
        taken = common.timed_calls("steps", side_by_side(makers), sizes.rounds, 1e3 / sizes.calls)
        states = num_bytes(jax.eval_shape(functools.partial(model.init_cache, batch, 0)))
        programs = {name: {"milliseconds": summary(times)} for name, times in taken.items()}
        return {"bytes": num_bytes(nnx.state(model)) + 2 * states, "programs": programs}

    def alone(measured: Callable[[], Row]) -> Row:
        """Without kernels that begin with the op before; the caches know nothing of the limit."""
        with mock.patch.object(triton, "MOST_REPEATED_BYTES", 0):
            jax.clear_caches()
            row = measured()
        jax.clear_caches()
        return row

    every = (sizes.kernel, "xla"), sizes.batches, sizes.weights, sizes.models
    for implementation, batch, weights, name in itertools.product(*every):
        measured = functools.partial(measure, sizes.models[name], weights, batch, implementation)
        row = f"{name}, {weights}, rows: {batch}, {implementation}"
        yield row, measured
        if (implementation, batch, weights) == (sizes.kernel, 1, "bfloat16"):
            yield f"{row}, each op alone", functools.partial(alone, measured)


def of_loops(sizes: Sizes) -> Rows:
    """Whole texts of the first model, drafted by the last one; the weights are random."""
    (large, config), (small, of_draft) = (([*sizes.models.items()][place]) for place in (0, -1))

    def measure() -> Row:
        target = random_model(config)
        draft = st.ModelDrafter(st.HybridLM(of_draft, dtype="bfloat16", rngs=nnx.Rngs(1)))
        prompt = [1] * 16

        def program(tree: st.TreeTopology | None) -> steps.Program:
            drafts = {"drafter": draft, "topology": tree} if tree else {}
            return steps.Program(target, prompt, max_new_tokens=sizes.tokens, **drafts)

        trees = {"no drafts": None} | TWO_TREES
        calls = side_by_side({way: functools.partial(program, trees[way]) for way in trees})
        ends, seconds = common.timed("loops", calls, [prompt], sizes.rounds // 2 + 1)
        programs = Row()
        for way, (end,) in ends.items():
            num_calls = int(end.statistics.target_calls[0])
            programs[way] = {
                "tau": int(end.statistics.emitted[0]) / num_calls,
                "milliseconds": summary(1e3 * seconds[way][:, 0] / num_calls),
                "temporary_bytes": calls[way].temporary,
            }
        return {"programs": programs}

    yield f"{large}, drafts of {small}", measure


# And the share of the time of each, relative to those after it.
PARTS: dict[str, tuple[Callable[[Sizes], Rows], float]] = {
    "device": (of_device, 0.5),
    "bits": (of_bits, 4.0),
    "steps": (of_steps, 5.0),
    "models": (of_models, 1.5),
    "loops": (of_loops, 1.5),
}
# What a row says, and each of its programs.
TOLD = {
    "device": "{bytes_per_second:.3g} bytes a second",
    "bits": "{equal} of {numbers} log-probabilities and {texts} texts are those without drafts",
    "steps": "{milliseconds[median]:.3f} ms, floor {floor:.3f}",
    "models": "errors {errors}",
    "loops": "{milliseconds[median]:.3f} ms of a call, tau {tau:.2f}",
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
    """Prints a line for each number, and returns what is wrong."""
    speed, wrong = (
        parts.get("device", {}).get("bandwidth", {}).get("bytes_per_second", math.nan),
        [],
    )
    for part, rows in parts.items():
        for name, row in rows.items():
            for program, numbers in row.get("programs", {"": row}).items():
                try:
                    numbers = {"floor": 1e3 * row.get("bytes", 0) / speed} | numbers
                    says = TOLD[part].format(**numbers)
                except KeyError:  # there are no numbers
                    says = " ".join(f"{key}: {value}" for key, value in row.items())
                print(", ".join(filter(None, (part, name, program))), says, sep=": ")
            wrong += [f"{part}, {name}"] * (not row.get("right", True))
    return wrong


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
