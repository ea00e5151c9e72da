"""How does decoding compare with transformers, on the same weights, in the same run?

Exports the embedded pair to transformers' format, decodes the same prompts greedily with
`transformers.generate` and with stree-jax, autoregressively and with drafts, interleaved prompt by
prompt, and checks that the tokens are the same. transformers does not support assisted decoding of
these models, so the baseline is its autoregressive decoding.

    python -m benchmarks.peer [--prompts 16] [--tokens 96] [--rounds 3] [--threads 2]
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import Found, Table, start, summary, timed
from benchmarks.methods import PLAIN, TWO_TREES, Method, trees
from benchmarks.models import embedded_pair

PEER = "transformers"


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The embedded target in transformers, and here with and without drafts."""
    pair = embedded_pair(options.prompts, None)
    drafter = st.ModelDrafter(pair.draft)

    def with_ours(method: Method, prompt: list[int]) -> np.ndarray:
        out = method.decode(pair, [prompt], options.tokens)
        return out.tokens[0, : out.lengths[0]]

    with_peer, versions = transformers_decoder(options.tokens, options.threads)
    ways = {PEER: with_peer} | {
        method.name: functools.partial(with_ours, method)
        for method in (Method(PLAIN), *trees(drafter, TWO_TREES))
    }
    outputs, seconds = timed("decoding", ways, pair.prompts, options.rounds)
    tokens = {name: sum(map(len, texts)) for name, texts in outputs.items()}
    speeds = {name: tokens[name] / seconds[name].sum(axis=1) for name in ways}
    rows = [
        {
            "method": name,
            "tokens_per_second": summary(speeds[name]),
            "times_transformers": summary(speeds[name] / speeds[PEER]),
            "identical_prompts": sum(map(np.array_equal, outputs[name], outputs[PEER])),
        }
        for name in ways
    ]
    medians = {row["method"]: row["times_transformers"]["median"] for row in rows}
    yield Found(
        pair.settings() | {"versions": versions, "methods": rows},
        [
            Table(
                f"{pair.source}, greedy, {len(pair.prompts)} prompts",
                rows,
                {"method": "{method}", "tokens/s": "{tokens_per_second[median]:,.0f}"}
                | {"times transformers": "{times_transformers[median]:.2f}x"}
                | {"identical prompts": "{identical_prompts}"},
            )
        ],
        wrong=[row["method"] for row in rows if row["identical_prompts"] < len(pair.prompts)],
        line={name: round(value, 2) for name, value in medians.items()},
    )


def transformers_decoder(
    tokens: int, threads: int
) -> tuple[Callable[[list[int]], np.ndarray], dict[str, Any]]:
    """Greedy decoding of the embedded target by transformers, and the versions."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SystemExit(f"{error}: install stree-jax[peers] on Python 3.11") from None
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

    return decode, {"torch": torch.__version__, "transformers": transformers.__version__}


start(__name__, __doc__)
