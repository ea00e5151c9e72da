"""How does decoding compare with transformers and llama.cpp, on the same weights, in one run?

Exports the embedded pair to their formats, decodes the same prompts greedily with them and with
stree-jax, with and without drafts, interleaved prompt by prompt, and compares the tokens: in
float32 they must be the same. The time of a text includes its prompt, in all of them.
transformers does not support assisted decoding of these models, so it decodes without drafts;
llama.cpp drafts as its own tools do. Either may be missing: `benchmarks/llama_cpp.py` says how to
build llama.cpp.

    python -m benchmarks.peer [--prompts 16] [--tokens 96] [--rounds 3] [--threads 2]
"""

import argparse
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks import llama_cpp
from benchmarks.common import Found, Table, start, summary, timed
from benchmarks.llama_cpp import Decode
from benchmarks.methods import CHAIN_OF_4, CHAIN_OF_6, PLAIN, Method, trees
from benchmarks.models import Pair, embedded_pair

PEER = "transformers"


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The embedded target in the peers that are installed, and here with and without drafts."""
    pair = embedded_pair(options.prompts, None)
    ways, versions = {}, {}
    for name, decoders, install in (
        (PEER, transformers_decoders, "install stree-jax[peers] on Python 3.11"),
        (llama_cpp.NAME, llama_cpp.decoders, llama_cpp.INSTALL),
    ):
        try:
            found, used = decoders(pair, options.tokens, options.threads)
        except ImportError as error:
            print(f"Not compared with {name} ({error}): {install}")
        else:
            ways |= found
            versions |= used
    if not ways:
        raise SystemExit("there is nothing to compare with")
    peers = [name for name in (PEER, llama_cpp.NAME) if name in ways]
    ways |= our_decoders(pair, options.tokens)

    outputs, seconds = timed("decoding", ways, pair.prompts, options.rounds)
    tokens = {name: sum(map(len, texts)) for name, texts in outputs.items()}
    speeds = {name: tokens[name] / seconds[name].sum(axis=1) for name in ways}
    rows = [
        {
            "method": name,
            "tokens_per_second": summary(speeds[name]),
            "identical_prompts": sum(map(np.array_equal, outputs[name], outputs[PLAIN])),
        }
        | {f"times_{field(peer)}": summary(speeds[name] / speeds[peer]) for peer in peers}
        for name in ways
    ]
    medians = {row["method"]: row[f"times_{field(peers[0])}"]["median"] for row in rows}
    yield Found(
        pair.settings() | {"versions": versions, "methods": rows},
        [
            Table(
                f"{pair.source}, greedy, {len(pair.prompts)} prompts",
                rows,
                {"method": "{method}", "tokens/s": "{tokens_per_second[median]:,.0f}"}
                | {f"times {x}": f"{{times_{field(x)}[median]:.2f}}x" for x in peers}
                | {"identical prompts": "{identical_prompts}"},
            )
        ],
        wrong=[
            row["method"]
            for row in rows
            if row["identical_prompts"] < len(pair.prompts) and not is_rounded(row["method"])
        ],
        line={name: round(value, 2) for name, value in medians.items()},
    )


def field(peer: str) -> str:
    """The end of the name of its fields."""
    return peer.replace(".", "_")


def is_rounded(method: str) -> bool:
    """Whether its weights are not float32, so that its texts may differ."""
    return method.endswith(("bfloat16", "8 bits"))


def our_decoders(pair: Pair, tokens: int) -> dict[str, Decode]:
    """This library, without drafts and with the embedded draft, in float32 and bfloat16."""

    def decode(of: Pair, method: Method, prompt: list[int]) -> np.ndarray:
        out = method.decode(of, [prompt], tokens)
        return out.tokens[0, : out.lengths[0]]

    ways, topologies = {}, {"chain of 4": CHAIN_OF_4, "chain of 6": CHAIN_OF_6}
    for suffix, of in ("", pair), (", bfloat16", embedded_pair(0, dtype="bfloat16")):
        drafted = trees(st.ModelDrafter(of.draft), topologies)
        for method in (Method(PLAIN), *drafted):
            ways[method.name + suffix] = functools.partial(decode, of, method)
    return ways


def transformers_decoders(
    pair: Pair, tokens: int, threads: int
) -> tuple[dict[str, Decode], dict[str, Any]]:
    """Greedy decoding of the embedded target by transformers, and the versions.

    Raises:
        ImportError: a package is missing.
    """
    import torch
    import transformers

    from stree_jax.convert import convert

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "target"
        convert(st.demo_path("target"), path, dtype="float32", to="hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def decode(prompt: list[int]) -> np.ndarray:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens,
                do_sample=False,
            )
        return out[0, len(prompt) :].numpy()

    return {PEER: decode}, {"torch": torch.__version__, "transformers": transformers.__version__}


start(__name__, __doc__)
