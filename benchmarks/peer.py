"""How does decoding compare with transformers and llama.cpp, on the same weights, in one run?

Exports the embedded pair to their formats, decodes the same prompts with them and with stree-jax,
with and without drafts, interleaved prompt by prompt, and compares the tokens: in float32 at
temperature 0 they must be the same, and above it ours with drafts and without. The time of a text
includes its prompt, in all of them. transformers does not support assisted decoding of these
models, so it decodes without drafts; llama.cpp drafts as its own tools do, at temperature 0.
Either may be missing: `benchmarks/llama_cpp.py` says how to build llama.cpp.

    python -m benchmarks.peer [--prompts 16] [--tokens 96] [--rounds 3] [--temperatures 0 1]
        [--threads 2] [--calls 8]
"""

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks import llama_cpp
from benchmarks.common import Found, main, timed, timed_calls
from benchmarks.llama_cpp import Decode
from benchmarks.methods import COMPARED, TUNED_TREES, trees
from benchmarks.models import Pair, embedded_pair, random_model
from benchmarks.steps import run_steps
from stree_jax.measuring.clock import speeds, summary
from stree_jax.measuring.methods import PLAIN, Batch, Method
from stree_jax.measuring.report import Table

OPTIONS = COMPARED | {"--threads": 2, "--calls": 8}

PEER = "transformers"
ROUNDED = ("bfloat16", "8 bits", "4 bits")  # weights: texts may differ
SHAPES = ("mamba2-370m", "Granite-4-H-350M")  # whose calls are timed
CALL_COLUMNS = {
    "model": "{model}",
    "dtype": "{dtype}",
    "tokens": "{nodes}",
    "here": "{here[median]:.1f}",
    llama_cpp.NAME: "{there[median]:.1f}",
    "ratio": "{times[median]:.2f}",
}
RATIO_COLUMNS = {
    "type": "{type}",
    "temperature": "{temperature:g}",
    "no drafts": "{plain:.2f}x",
    "drafts": "{drafted:.2f}x",
    "with": "{tree}",
}
CALLED = {tree.num_nodes: tree for tree in map(st.TreeTopology.chain, (0, 4, 12))}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The embedded target in the peers that are installed, and here with and without drafts."""
    pair = embedded_pair(options.prompts, None)
    ways = our_decoders(pair, options.temperatures, options.tokens)
    peers, versions = [], {}
    for name, decoders, install in (
        (PEER, transformers_decoders, "in the clone, on Python 3.11: pip install '.[peers]'"),
        (llama_cpp.NAME, llama_cpp.decoders, llama_cpp.INSTALL),
    ):
        try:
            theirs, used = decoders(pair, options.temperatures, options.tokens, options.threads)
        except ImportError as error:
            print(f"Not compared with {name} ({error}): {install}")
        else:
            if all(name in named for named in theirs.values()):
                peers.append(name)
            ways = {at: theirs[at] | ours for at, ours in ways.items()}
            versions |= used
    if not peers:
        raise SystemExit("there is nothing to compare with")
    rows = []
    for temperature, these in ways.items():
        rows += compared(pair, these, peers, temperature, options.rounds)
    sizes = real_sizes(options) if llama_cpp.NAME in peers and options.calls else []
    ratios = best_ratios(rows)
    yield Found(
        pair.settings() | {"versions": versions, "methods": rows, "sizes": sizes},
        [
            *(
                Table(
                    f"{pair.source}, {len(pair.prompts)} prompts, temperature {temperature:g}",
                    [row for row in rows if row["temperature"] == temperature],
                    {"method": "{method}", "tokens/s": "{tokens_per_second[median]:,.0f}"}
                    | {f"times {peer}": f"{{{_times(peer)}[median]:.2f}}x" for peer in peers}
                    | {"identical prompts": "{identical_prompts}"},
                )
                for temperature in ways
            ),
            *([Table("A call of the target, ms", sizes, CALL_COLUMNS)] if sizes else []),
            *([Table("Over llama.cpp in the same type", ratios, RATIO_COLUMNS)] if ratios else []),
        ],
        wrong=[
            f"{row['method']}, temperature {row['temperature']:g}"
            for row in rows
            if row["must_be_identical"] and row["identical_prompts"] < len(pair.prompts)
        ],
        line={
            f"{row['type']}, {row['temperature']:g}": [row["plain"], row["drafted"]]
            for row in ratios
        },
    )


def _times(peer: str) -> str:
    """The field of a speed over a peer's; braces of formats take no dots."""
    return f"times_{peer.replace('.', '_')}"


def compared(
    pair: Pair, ways: Mapping[str, Decode], peers: Sequence[str], temperature: float, rounds: int
) -> list[dict[str, Any]]:
    """A record of each way at one temperature, all interleaved."""
    title = f"decoding, temperature {temperature:g}"
    outputs, seconds = timed(title, ways, pair.prompts, rounds)
    tokens = {name: sum(map(len, texts)) for name, texts in outputs.items()}
    relative = {_times(peer): speeds(tokens, seconds, peer) for peer in peers}
    in_type = {
        kind: speeds(tokens, seconds, there)
        for kind in llama_cpp.PRECISIONS
        if (there := llama_cpp.name_of(kind)) in ways
    }

    def over_llama_cpp(name: str) -> dict[str, Any]:
        found = in_type.get(type_of(name))
        is_ours = not name.startswith((PEER, llama_cpp.NAME))
        return {"over_llama_cpp": found[name]["speed_up"]} if found and is_ours else {}

    return [
        {
            "method": name,
            "temperature": temperature,
            "tokens_per_second": speed["tokens_per_second"],
            "identical_prompts": sum(map(np.array_equal, outputs[name], outputs[PLAIN])),
            "must_be_identical": not name.endswith(ROUNDED)
            and not (temperature and name.startswith(tuple(peers))),
        }
        | {field: found[name]["speed_up"] for field, found in relative.items()}
        | over_llama_cpp(name)
        for name, speed in speeds(tokens, seconds, PLAIN).items()
    ]


def type_of(name: str) -> str:
    """The type of the weights, from the name of a way."""
    return next((kind for kind in ROUNDED if name.endswith(kind)), "float32")


def best_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our speed over llama.cpp's in each type: without drafts, and with the best tree."""
    records = []
    for (kind, temperature), group in itertools.groupby(
        (row for row in rows if "over_llama_cpp" in row),
        lambda row: (type_of(row["method"]), row["temperature"]),
    ):
        plain, *drafted = ((row["over_llama_cpp"]["median"], row["method"]) for row in group)
        best, name = max(drafted)
        record = {"type": kind, "temperature": temperature, "plain": plain[0], "drafted": best}
        records.append(record | {"tree": name.removesuffix(f", {kind}")})
    return records


def our_decoders(
    pair: Pair, temperatures: Sequence[float], tokens: int
) -> dict[float, dict[str, Decode]]:
    """This library by temperature, without drafts and with the embedded draft, in four types."""

    def decode(of: Pair, method: Method, temperature: float, prompt: list[int]) -> np.ndarray:
        own = st.Options(max_new_tokens=tokens, temperature=temperature, key=0)
        out = method.decode(of.target, Batch([prompt], own))
        return out.tokens[0, : out.lengths[0]]

    types = {
        "": pair,
        ", bfloat16": embedded_pair(0, dtype="bfloat16"),
        ", 8 bits": embedded_pair(0, quantize="int8", draft_quantize="int8"),
        ", 4 bits": embedded_pair(0, quantize="int4", draft_quantize="int4"),
    }
    ways: dict[float, dict[str, Decode]] = {temperature: {} for temperature in temperatures}
    for suffix, of in types.items():
        methods = Method(PLAIN), *trees(st.ModelDrafter(of.draft), TUNED_TREES)
        for temperature, method in itertools.product(temperatures, methods):
            ways[temperature][method.name + suffix] = functools.partial(
                decode, of, method, temperature
            )
    return ways


def transformers_decoders(
    pair: Pair, temperatures: Sequence[float], tokens: int, threads: int
) -> tuple[dict[float, dict[str, Decode]], dict[str, Any]]:
    """Decoding of the embedded target by transformers, by temperature, and the versions."""
    import torch
    import transformers

    from stree_jax.convert import convert

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "target"
        convert(st.demo_path("target"), path, dtype="float32", to="hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def decode(options: dict[str, Any], prompt: list[int]) -> np.ndarray:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens,
                **options,
            )
        return out[0, len(prompt) :].numpy()

    def options(temperature: float) -> dict[str, Any]:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return sampled if temperature else {"do_sample": False}

    ways = {each: {PEER: functools.partial(decode, options(each))} for each in temperatures}
    return ways, {"torch": torch.__version__, "transformers": transformers.__version__}


def real_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a target call of 1, 5 and 13 tokens, here and in llama.cpp.

    Random weights in the shape of a published model: only time means anything.
    """
    records, count = [], options.calls
    for size, dtype in itertools.product(SHAPES, llama_cpp.PRECISIONS):
        kind = {"8 bits": "int8", "4 bits": "int4"}.get(dtype)
        model = random_model(st.ModelConfig.preset(size), "float32" if kind else dtype)
        try:
            theirs = llama_cpp.calls(model, dtype, options.threads, count, [*CALLED])
        except RuntimeError as error:
            print(f"calls of {size}, {dtype}: left out, {error}")
            continue
        model = model.quantized(kind) if kind else model
        calls: dict[tuple[str, int], Callable[[], Any]] = {}
        for nodes, tree in CALLED.items():
            calls["here", nodes] = functools.partial(run_steps, model, tree, count)
            calls["there", nodes] = theirs[nodes]
        taken = timed_calls(f"calls of {size}, {dtype}", calls, options.rounds, 1e3 / count)
        for nodes in CALLED:
            sides = {side: taken[side, nodes] for side in ("here", "there")}
            sides["times"] = sides["here"] / sides["there"]
            record = {"model": size, "dtype": dtype, "nodes": nodes}
            records.append(record | {name: summary(each) for name, each in sides.items()})
        del model, theirs, calls
        jax.clear_caches()
    return records


if __name__ == "__main__":
    main(run, OPTIONS)
