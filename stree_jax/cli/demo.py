"""`stree-jax demo`: the embedded pair decodes built-in prompts with several draft trees."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax.cli.drafters import ignored_fields
from stree_jax.cli.trees import parse_tree
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find
from stree_jax.decoding.generate import plan

# Written for this demo: similar to the training text but not part of it.
PROMPTS = (
    "Question: Rosa has 12 jars with 8 beads in each. She gives away 30 beads. How many beads does"
    " she have left?\nAnswer:",
    'def count_lines(path):\n    """Return the number of lines in a text file."""\n    with open(',
    "The old house stood at the end of the lane, and nobody in the village",
    "Question: A bus ticket costs $3. Omar buys 4 tickets every week. How much does he spend in 5"
    " weeks?\nAnswer:",
)
NUM_REPEATS = 3
MAX_SPREAD = 1.3  # rounds of a quiet machine differ by a few per cent


class Method(NamedTuple):
    """A drafter and its tree."""

    name: str
    drafter: st.Drafter | None
    topology: st.TreeTopology | None


def run_demo(
    console: Console,
    *,
    max_new_tokens: int,
    target: str | None = None,
    draft: str | None = None,
    ignore: Sequence[str] = (),
) -> int:
    """Runs the demo, with the embedded pair by default; returns the exit status.

    The status is 1 if the methods' outputs differ.

    Raises:
        ValueError: only one of `target` and `draft` is given, or one of them cannot be loaded.
    """
    if (target is None) != (draft is None):
        raise ValueError(
            "--target and --draft must be given together: a draft model is trained for one target"
        )
    return _run(
        console,
        find(st.demo_path("target") if target is None else target),
        find(st.demo_path("draft") if draft is None else draft),
        # The result of `stree-jax tune-tree` for the embedded pair; None: drafting did not pay.
        parse_tree(f"@{st.demo_path('target').with_name('tree.json')}") if target is None else None,
        max_new_tokens,
        ignore,
    )


def _run(
    console: Console,
    target_path: Path,
    draft_path: Path,
    tuned: st.TreeTopology | None,
    max_new_tokens: int,
    ignore: Sequence[str],
) -> int:
    of_target, of_draft = ignored_fields(ignore, target_path, draft_path)
    enable_compilation_cache()
    target = st.from_pretrained(target_path, ignore=of_target)
    drafter = st.ModelDrafter(st.load_draft(draft_path, target, ignore=of_draft))
    tokenizer = st.load_tokenizer(target_path)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    tree = st.TreeTopology.paper("A")
    console.print(f"runs as {dispatch.explain()}", style="dim", markup=False, soft_wrap=True)
    methods = [
        Method("autoregressive", None, None),
        Method("chain of 4", drafter, st.TreeTopology.chain(4)),
        Method(f"tree of {tree.num_nodes}", drafter, tree),
    ]
    if tuned is not None and tuned not in [method.topology for method in methods]:
        methods.append(Method(f"tuned tree of {tuned.num_nodes}", drafter, tuned))

    def decode(method: Method, prompt: list[int]) -> st.Generation:
        return st.generate(
            target,
            [prompt],
            max_new_tokens=max_new_tokens,
            drafter=method.drafter,
            topology=method.topology,
        )

    seconds = np.zeros((NUM_REPEATS, len(methods)))
    outputs: list[list[st.Generation]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=(1 + NUM_REPEATS) * len(methods))
        for method in methods:
            outputs.append([decode(method, prompt) for prompt in prompts])
            progress.advance(task)
        progress.update(task, description="decoding")
        for i in range(NUM_REPEATS):  # interleaved, so that noise affects all methods alike
            for j, method in enumerate(methods):
                began = time.perf_counter()
                for prompt in prompts:
                    decode(method, prompt)
                seconds[i, j] = time.perf_counter() - began
                progress.advance(task)

    identical = [
        all(np.array_equal(a.tokens, b.tokens) for a, b in zip(outputs[0], output, strict=True))
        for output in outputs
    ]
    report: dict[str, Any] = {}
    table = Table(
        title=f"{len(prompts)} prompts, up to {max_new_tokens} new tokens each, temperature 0"
    )
    for column in ("method", "tokens/s", "speedup", "slowest to fastest", "tau", "identical"):
        table.add_column(column, justify="left" if column == "method" else "right")
    num_tokens = sum(out.stats.num_tokens for out in outputs[0])
    timings = timings_of(seconds, num_tokens)
    for method, timing, output, same in zip(methods, timings, outputs, identical, strict=True):
        calls = sum(out.stats.num_target_calls for out in output)
        tau = sum(out.stats.num_tokens for out in output) / calls
        table.add_row(
            method.name,
            f"{timing.speed:,.0f}",
            f"{timing.speed_up:.2f}x",
            f"{timing.slowest:.2f}x to {timing.fastest:.2f}x",
            f"{tau:.2f}",
            "yes" if same else "no",
        )
        report[method.name] = {
            "tokens_per_second": round(timing.speed, 1),
            "speed_up": round(timing.speed_up, 3),
            "speed_up_range": [round(timing.slowest, 3), round(timing.fastest, 3)],
            "tau": round(tau, 3),
            "identical": same,
        }
    console.print(table)
    if note := busy(seconds):
        console.print(note, style="yellow", soft_wrap=True)
    console.print("\nThe first output:", style="bold")
    text = tokenizer.decode(outputs[0][0].tokens[0, : outputs[0][0].lengths[0]].tolist())
    console.print(Text(PROMPTS[0], style="dim") + Text(text))
    console.print("\nOne of its steps, with the accepted path marked:", style="bold")
    console.print(_one_step(target, drafter, tree, prompts[0], tokenizer))
    fastest = max(report, key=lambda name: report[name]["speed_up"])
    best = {"method": fastest, "speed_up": report[fastest]["speed_up"]}
    line = json.dumps({"demo": report, "best": best})
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0 if all(identical) else 1


class Timing(NamedTuple):
    """Speeds of a method over the rounds, each of which decodes all prompts with every method.

    Attributes:
        speed: tokens a second, in the median round.
        speed_up: `speed` over that of the first method.
        slowest, fastest: the lowest and the highest ratio to the first method within a round.
    """

    speed: float
    speed_up: float
    slowest: float
    fastest: float


def timings_of(seconds: np.ndarray, num_tokens: int) -> list[Timing]:
    """The timing of each method from the seconds `[rounds, methods]` that it took."""
    speeds = num_tokens / np.median(seconds, axis=0)
    ratios = seconds[:, :1] / seconds
    rows = speeds, speeds / speeds[0], ratios.min(axis=0), ratios.max(axis=0)
    return [Timing(*map(float, row)) for row in zip(*rows, strict=True)]


def busy(seconds: np.ndarray) -> str:
    """A warning if rounds of a method took so different times that their speeds mean little."""
    spread = float((seconds.max(axis=0) / seconds.min(axis=0)).max())
    if spread < MAX_SPREAD:
        return ""
    return (
        f"This machine is busy: equal rounds took {spread:.1f} times as long as others. Speeds are"
        " for a quiet one; run again."
    )


def _one_step(
    target: st.HybridLM,
    drafter: st.ModelDrafter,
    tree: st.TreeTopology,
    prompt: list[int],
    tokenizer: Tokenizer,
) -> Text:
    """A drawing of the first draft tree with at least two accepted drafts."""
    request = plan(target, [prompt], max_new_tokens=32, drafter=drafter, topology=tree)
    state = request.decoder.start(target, drafter, request.context, request.keys)
    while True:
        state, draft, verdict = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        if int(verdict.num_accepted[0]) >= 2 or bool(jnp.all(state.done | (state.failed > 0))):
            break
    topology = request.decoder.topology
    labels = [json.dumps(tokenizer.decode([token])) for token in np.asarray(draft.tokens[0])]
    path = [n for n in range(topology.num_nodes) if topology.ancestor_mask[int(verdict.last[0]), n]]
    drawing = Text()
    for line in topology.draw(labels, path).splitlines():
        drawing.append(line + "\n", style="bold green" if line.endswith(" *") else "")
    drawing.append(f"next token: {json.dumps(tokenizer.decode([int(verdict.next_token[0])]))}")
    return drawing
