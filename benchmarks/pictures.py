"""Draws the pictures of the documentation from `benchmarks/results`.

The same results and the same version of matplotlib give the same bytes. The background is
transparent and all colours are of middle lightness, so the pictures are readable on light and dark
pages. `--decode` first decodes the README's prompt with the embedded models and writes
`steps.json`, from which the trees are drawn.

    python -m benchmarks.pictures [--decode]
        [--output DIR | --commit]                   default: benchmark-results; docs/pictures
"""

import argparse
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

import stree_jax as st
from benchmarks.common import conclude, read_options, write_json

MEASURED = FilePath(__file__).parent / "results"
PICTURES = FilePath(__file__).parents[1] / "docs" / "pictures"
PROMPT = "Question: Ann has 3 pens."
README_STEP = 2  # of the text that begins with the prompt
GREY = "#7d7d7d"
STYLE = FilePath(__file__).with_suffix(".mplstyle")


def canvas(height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of `height` by 480 pixels, which is readable on a phone, and its axes."""
    figure = Figure(figsize=(5, height / 96), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def depth_picture(decode: Mapping[str, Any]) -> Figure:
    """Tokens per target call if only the first drafts of a path counted."""
    figure, panels = canvas(320, 2, sharey=True)
    names = ("chain of 4", "tuned tree", "dynamic tree", "tree A", "prompt lookup, chain of 4")
    for temperature, axes in enumerate(panels):
        rows = [row for row in decode["decoding"] if row["temperature"] == temperature]
        accepted = {row["method"]: row["accepted_per_depth"] for row in rows}
        for name in names:
            axes.plot([*itertools.accumulate(accepted[name], initial=1.0)], label=name)
        axes.set(title=f"Tokens a target call, T = {temperature}", xticks=range(9))
        axes.set(xlabel="drafts of a path that count", yticks=range(1, 6))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def cost_picture(decode: Mapping[str, Any]) -> Figure:
    """Time of a target call by number of nodes."""
    figure, axes = canvas(320)
    for each in decode["target_calls"]:
        nodes, ratios = zip(*each["relative_to_one_node"].items(), strict=True)
        label = f"{each['model']}, {each['parameters'] / 1e6:.3g} M"
        axes.plot([*map(int, nodes)], ratios, label=label)
    axes.set(title="Time of a call, one node = 1", xlabel="nodes of the tree")
    axes.set(xticks=(1, 5, 13, 29), ylim=0)
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def speed_picture(decode: Mapping[str, Any]) -> Figure:
    """Bars of the speed of each method at both temperatures, with quartiles; tau beside them."""
    figure, axes = canvas(520)
    for temperature, colour in enumerate(("C0", "C1")):
        rows = [row for row in decode["decoding"] if row["temperature"] == temperature]
        places = [i + 0.36 * temperature for i in range(len(rows))]
        low, median, high = zip(*(sorted(row["speed_up"].values()) for row in rows), strict=True)
        label = f"temperature {temperature}"
        axes.barh(places, median, height=0.32, color=colour, label=label)
        axes.hlines(places, low, high, color=GREY)
        for place, row in zip(places, rows, strict=True):
            said = f"{row['speed_up']['median']:.2f}x, tau {row['tau']:.2f}"
            if row["method"] == "autoregressive":
                said = f"{row['tokens_per_second']['median']:.0f} tokens/s"
            axes.text(1.48, place, said, va="center", size=9)
    axes.set_yticks([i + 0.18 for i in range(len(rows))], [row["method"] for row in rows])
    axes.set(title="Tokens per second, autoregressive = 1", xticks=(0, 0.5, 1), xlim=(0, 2.05))
    axes.set_ylim(len(rows) - 0.3, -0.3)
    axes.grid(visible=False)
    axes.axvline(1, color=GREY, linewidth=1, linestyle="--", marker="")
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def step_picture(step: Mapping[str, Any]) -> Figure:
    """A draft tree from left to right: the accepted path filled, the target's own token framed."""
    parents, labels = [*step["parents"], step["path"][-1]], [*step["labels"], step["next"]]
    heights, leaves = dict[int, float](), itertools.count()

    def settle(node: int) -> float:
        below = [settle(child) for child, parent in enumerate(parents) if parent == node]
        heights[node] = (below[0] + below[-1]) / 2 if below else next(leaves) * 38 + 19
        return heights[node]

    settle(0)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    gap, tall = 480 / (max(depths) + 1), max(heights.values()) + 19
    figure = Figure(figsize=(5, tall / 96))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 480), ylim=(tall, 0))
    axes.set_axis_off()
    for node, parent in enumerate(parents):
        x, y, accepted = depths[node] * gap + 2, heights[node], node in step["path"]
        colour = "C2" if node == len(parents) - 1 else "C0" if accepted else GREY
        line = {"edgecolor": colour, "linewidth": 0.8 if colour == GREY else 1.9}
        if parent >= 0:
            above = heights[parent]
            bend = [(x - 20, above), (x - 10, above), (x - 10, y), (x, y)]
            curve = Path(bend, [Path.MOVETO, *[Path.CURVE4] * 3])
            axes.add_patch(PathPatch(curve, facecolor="none", **line))
        style = "round,pad=0,rounding_size=6"
        fill = colour if accepted else "none"
        axes.add_patch(FancyBboxPatch((x, y - 13), gap - 20, 26, style, facecolor=fill, **line))
        text = labels[node].replace(" ", "\u00b7").replace("\n", "\u21b5")
        ink = "white" if accepted else colour
        axes.text(x + gap / 2 - 10, y, text, color=ink, ha="center", va="center_baseline")
    return figure


def decoded_steps(count: int = 8) -> list[dict[str, Any]]:
    """The first steps of the embedded models on the README's prompt."""
    from stree_jax.decoding.options import plan

    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompts = [tokenizer.encode(PROMPT).ids]
    request = plan(target, prompts, max_new_tokens=48, drafter=st.ModelDrafter(draft))
    decoder = request.decoder
    state = decoder.start(target, request.drafter, request.context, request.keys)
    steps = []
    for _ in range(count):
        state, draft_tree, verdict = decoder.step(
            target, request.drafter, state, request.limits, request.sampling
        )
        last, tokens = int(verdict.last[0]), [*map(int, draft_tree.tokens[0])]
        steps.append(
            {
                "parents": [*decoder.topology.parents],
                "labels": [tokenizer.decode([token]) for token in tokens],
                "path": decoder.topology.ancestor_mask[last].nonzero()[0].tolist(),
                "next": tokenizer.decode([int(verdict.next_token[0])]),
            }
        )
    return steps


def figures(steps: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Figure]:
    """All pictures by name; of the committed steps, unless others are given."""
    decode = json.loads((MEASURED / "decode-cpu.json").read_text())
    steps = steps or json.loads((MEASURED / "steps.json").read_text())["steps"]
    with matplotlib.style.context(STYLE):
        return {
            "step": step_picture(steps[README_STEP]),
            "long-step": step_picture(max(reversed(steps), key=lambda step: len(step["path"]))),
            "depth": depth_picture(decode),
            "cost": cost_picture(decode),
            "speed": speed_picture(decode),
        }


def svg(figure: Figure) -> str:
    """The picture as SVG, without a date, in the reader's own font."""
    file = io.StringIO()
    with matplotlib.style.context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return re.sub("'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", file.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws, and writes one file for each picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", action="store_true", help="decode the steps again")
    options = read_options(parser, arguments)
    steps = None
    if options.decode:
        steps = decoded_steps()
        write_json("steps", {"prompt": PROMPT, "steps": steps}, options.output)
    folder = PICTURES if options.commit else options.output
    for name, figure in figures(steps).items():
        (folder / f"{name}.svg").write_text(svg(figure))
    conclude("pictures", folder=str(folder))


if __name__ == "__main__":
    main()
