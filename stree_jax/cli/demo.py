"""`stree-jax demo`: the embedded pair decodes built-in prompts with several draft trees."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax.cli.loading import Chosen, load_models
from stree_jax.cli.options import Demo
from stree_jax.cli.trees import parse_tree
from stree_jax.convert import find
from stree_jax.decoding.plan import plan
from stree_jax.tuning.measure import interleaved

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


def run_demo(command: Demo) -> int:
    """Decodes with each method; returns 1 if their outputs differ."""
    if (command.target is None) != (command.draft is None):
        raise ValueError(
            "--target and --draft must be given together: a draft model is trained for one target"
        )
    console = Console()
    names = [
        st.demo_path(name) if given is None else given
        for name, given in (("target", command.target), ("draft", command.draft))
    ]
    folder, draft = map(find, names)
    target, drafter = load_models(folder, Chosen("draft", str(draft), command.ignore_field))
    tokenizer = st.load_tokenizer(folder)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    console.print(f"runs as {dispatch.explain()}", style="dim", markup=False, soft_wrap=True)
    tree = st.TreeTopology.paper("A")
    trees = {
        "autoregressive": st.TreeTopology.chain(0),
        "chain of 4": st.TreeTopology.chain(4),
        f"tree of {tree.num_nodes}": tree,
    }
    if command.target is None:  # what `stree-jax tune-tree` found; None: drafting did not pay
        tuned = parse_tree(f"@{st.demo_path('target').with_name('tree.json')}")
        if tuned is not None and tuned not in trees.values():
            trees[f"tuned tree of {tuned.num_nodes}"] = tuned

    def decode(tree: st.TreeTopology) -> list[st.Generation]:
        options: dict[str, Any] = dict(drafter=drafter, max_new_tokens=command.max_new_tokens)
        return [st.generate(target, [prompt], topology=tree, **options) for prompt in prompts]

    calls = [functools.partial(decode, each) for each in trees.values()]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling, then decoding", total=len(calls) * (1 + NUM_REPEATS))
        outputs, seconds = interleaved(calls, NUM_REPEATS, lambda: progress.advance(task))
    report = _report([*trees], outputs, seconds)
    title = f"{len(prompts)} prompts, up to {command.max_new_tokens} new tokens each, temperature 0"
    console.print(_table(title, report))
    if note := busy(seconds):
        console.print(note, style="yellow", soft_wrap=True)
    first = outputs[0][0]
    console.print("\nThe first output:", style="bold")
    text = tokenizer.decode(first.tokens[0, : first.lengths[0]].tolist())
    console.print(Text(PROMPTS[0], style="dim") + Text(text))
    console.print("\nOne of its steps, with the accepted path marked:", style="bold")
    console.print(_one_step(target, drafter, tree, prompts[0], tokenizer))
    fastest = max(report, key=lambda name: report[name]["speed_up"])
    best = {"method": fastest, "speed_up": report[fastest]["speed_up"]}
    line = json.dumps({"demo": report, "best": best})
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0 if all(each["identical"] for each in report.values()) else 1


def _report(
    names: Sequence[str], outputs: list[list[st.Generation]], seconds: np.ndarray
) -> dict[str, dict[str, Any]]:
    """The speeds of each method, and whether its texts are those of the first."""
    num_tokens = sum(out.stats.num_tokens for out in outputs[0])
    report = dict(zip(names, speeds_of(seconds, num_tokens), strict=True))
    for row, of_method in zip(report.values(), outputs, strict=True):
        calls = sum(out.stats.num_target_calls for out in of_method)
        pairs = zip(outputs[0], of_method, strict=True)
        row["tau"] = round(sum(out.stats.num_tokens for out in of_method) / calls, 3)
        row["identical"] = all(np.array_equal(a.tokens, b.tokens) for a, b in pairs)
    return report


def speeds_of(seconds: np.ndarray, num_tokens: int) -> list[dict[str, Any]]:
    """The speed of each method from the seconds `[rounds, methods]` that it took for all prompts.

    It is that of the median round, and the speed-up its ratio to that of the first method; with the
    lowest and the highest ratio within a round.
    """
    speeds = num_tokens / np.median(seconds, axis=0)
    ratios = seconds[:, :1] / seconds
    return [
        {
            "tokens_per_second": round(float(speed), 1),
            "speed_up": round(float(speed / speeds[0]), 3),
            "speed_up_range": [round(float(of_round), 3) for of_round in (min(own), max(own))],
        }
        for speed, own in zip(speeds, ratios.T, strict=True)
    ]


def _table(title: str, report: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("method", "tokens/s", "speedup", "slowest to fastest", "tau", "identical"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in report.items():
        slowest, fastest = row["speed_up_range"]
        table.add_row(
            name,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speed_up']:.2f}x",
            f"{slowest:.2f}x to {fastest:.2f}x",
            f"{row['tau']:.2f}",
            "yes" if row["identical"] else "no",
        )
    return table


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
    drafter: st.Drafter | None,
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
