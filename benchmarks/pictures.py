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
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path

import stree_jax as st
from benchmarks.common import conclude, read_options
from benchmarks.steps import Program
from stree_jax.measuring.report import draw_speeds, write_json

MEASURED = FilePath(__file__).parent / "results"
PICTURES = FilePath(__file__).parents[1] / "docs" / "pictures"
PROMPT = "Question: Ann has 3 pens."
README_STEP = 5  # of the text that begins with the prompt
GREY = "#7d7d7d"
STYLE = FilePath(__file__).with_suffix(".mplstyle")


def canvas(height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of `height` by 480 pixels, which is readable on a phone, and its axes."""
    figure = Figure(figsize=(5, height / 96), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def depth_picture(decode: Mapping[str, Any]) -> Figure:
    """Tokens per target call if only the first drafts of a path counted."""
    figure, panels = canvas(320, 2, sharey=True)
    names = ("chain of 4", "deep tree", "dynamic tree", "tree A", "prompt lookup, chain of 4")
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
    """Time of a call of a target, not of the draft, by number of nodes."""
    figure, axes = canvas(320)
    for each in decode["target_calls"]:
        if each["model"].endswith("draft"):
            continue
        nodes, ratios = zip(*each["relative_to_one_node"].items(), strict=True)
        label = f"{each['model']}, {each['parameters'] / 1e6:.3g} M"
        axes.plot([*map(int, nodes)], ratios, label=label)
    axes.set(title="Time of a call, one node = 1", xlabel="nodes of the tree")
    axes.set(xticks=(1, 5, 13, 29), ylim=0)
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def speed_picture(decode: Mapping[str, Any]) -> Figure:
    """Bars of the speed of each method at both temperatures, with quartiles; tau beside them."""
    figure, axes = canvas(560)
    draw_speeds(axes, decode["decoding"])
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def blank(height: float) -> tuple[Figure, Any]:
    """A figure of `height` by 480 pixels whose axes count pixels from its upper left corner."""
    figure = Figure(figsize=(5, height / 96))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 480), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def shown(label: str) -> str:
    """A token with its spaces and line breaks visible."""
    return label.replace(" ", "\u00b7").replace("\n", "\u21b5")


def draw_box(
    axes: Any, left: float, middle: float, text: str, colour: str, *, filled: bool, **options: float
) -> None:
    """A box with rounded corners; its text is white if it is filled."""
    width, height = options.get("width", 60), options.get("height", 26)
    axes.add_patch(
        FancyBboxPatch(
            (left, middle - height / 2),
            width,
            height,
            f"round,pad=0,rounding_size={height / 4}",
            facecolor=colour if filled else "none",
            edgecolor=colour,
            linewidth=0.8 if colour == GREY else 1.9,
        )
    )
    ink, size = "white" if filled else colour, options.get("size", 10)
    place = (left + width / 2, middle)
    axes.text(*place, text, color=ink, size=size, ha="center", va="center_baseline")


def draw_tree(
    axes: Any, parents: Sequence[int], labels: Sequence[str], top: float, pitch: float, **which: Any
) -> None:
    """A tree from left to right: `accepted` nodes filled, `own` framed, the others grey."""
    heights, leaves = dict[int, float](), itertools.count()
    tree = st.TreeTopology.from_parents(parents)

    def settle(node: int) -> float:
        below = [*map(settle, tree.children[node])]
        middle = (below[0] + below[-1]) / 2 if below else top + (next(leaves) + 0.5) * pitch
        heights[node] = middle
        return middle

    settle(0)
    gap = 480 / (tree.depth + 1)
    for node, parent in enumerate(parents):
        x, y, accepted = tree.depths[node] * gap + 2, heights[node], node in which["accepted"]
        colour = "C2" if node == which["own"] else "C0" if accepted else GREY
        if parent >= 0:
            above, width = heights[parent], 0.8 if colour == GREY else 1.9
            bend = [(x - 20, above), (x - 10, above), (x - 10, y), (x, y)]
            curve = Path(bend, [Path.MOVETO, *[Path.CURVE4] * 3])
            axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=width))
        sizes = {"width": gap - 20, "height": round(0.68 * pitch), "size": 10 if pitch > 30 else 9}
        draw_box(axes, x, y, shown(labels[node]), colour, filled=accepted, **sizes)


def step_picture(step: Mapping[str, Any]) -> Figure:
    """A draft tree: the accepted path filled, the target's own token framed."""
    parents, labels = [*step["parents"], step["path"][-1]], [*step["labels"], step["next"]]
    figure, axes = blank(38 * len(set(range(len(parents))) - set(parents)))
    draw_tree(axes, parents, labels, 0, 38, accepted=step["path"], own=len(parents) - 1)
    return figure


def how_picture(step: Mapping[str, Any]) -> Figure:
    """The four parts of a step: draft, one packed pass, verify, replay."""
    parents, labels, path = step["parents"], step["labels"], step["path"]
    pitch, cell, nodes = 25, 16, len(parents)
    grown, said = [*parents, path[-1]], [*labels, step["next"]]
    drawn, verified = (pitch * len({*range(len(tree))} - {*tree}) for tree in (parents, grown))
    read = 26 + drawn + 28  # where the second part begins, and then the third and the fourth
    agreed = read + 14 + nodes * cell + 30
    replayed = agreed + 14 + verified + 28
    figure, axes = blank(replayed + 60)

    def title(y: float, text: str) -> None:
        axes.text(2, y, text, weight="bold", va="center_baseline")

    def arrow(left: float, right: float, y: float) -> None:
        line = {"arrowstyle": "->", "color": GREY, "linewidth": 1.2}
        axes.annotate("", (right, y), (left, y), arrowprops=line)

    title(12, f"1. Draft: a small model guesses what follows {shown(labels[0])}")
    draw_tree(axes, parents, labels, 26, pitch, accepted=(), own=None)

    title(read, f"2. One pass: the target reads all {nodes} nodes, packed")
    top, left = read + 16, 258
    state = {"width": 104, "height": 40, "size": 9}
    middle = top + nodes * cell / 2
    draw_box(axes, 2, middle, "state of the\ntext so far", "C1", filled=False, **state)
    arrow(110, 196, middle)
    axes.text(153, middle - 10, "one copy", size=9, ha="center")
    for node in range(nodes):
        y, ancestor = top + node * cell, node
        axes.text(left - 8, y + cell / 2, shown(labels[node]), size=8, ha="right", va="center")
        axes.add_patch(Rectangle((left, y), nodes * cell, cell, fill=False, ec=GREY, lw=0.3))
        while ancestor >= 0:
            corner = (left + ancestor * cell + 1, y + 1)
            axes.add_patch(Rectangle(corner, cell - 2, cell - 2, facecolor=GREY))
            ancestor = parents[ancestor]
    for row, text in enumerate(("a row:", "what a", "node", "sees")):
        axes.text(left + nodes * cell + 8, middle - 21 + 14 * row, text, size=9, va="center")

    title(agreed, "3. Verify: the longest path that the target agrees with")
    draw_tree(axes, grown, said, agreed + 14, pitch, accepted=path, own=nodes)

    title(replayed, "4. Replay: the accepted tokens go into the state")
    y, each = replayed + 34, min(72, 248 // len(path))
    draw_box(axes, 2, y, "state of the\ntext so far", "C1", filled=False, **state)
    for i, node in enumerate(path):
        x = 108 + each * i
        arrow(x, x + 18, y)
        sizes = {"width": each - 20, "height": 20, "size": 9}
        draw_box(axes, x + 20, y, shown(labels[node]), "C0", filled=True, **sizes)
    end = 108 + each * len(path)
    arrow(end, end + 18, y)
    draw_box(axes, end + 20, y, "state of the\nlonger text", "C1", filled=False, **state)
    return figure


def decoded_steps() -> list[dict[str, Any]]:
    """The first eight steps of the embedded models on the README's prompt."""
    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    drafter, tokenizer = st.ModelDrafter(draft), st.load_tokenizer(st.demo_path("target"))
    prompt, topology = tokenizer.encode(PROMPT).ids, drafter.default_topology()
    options: dict[str, Any] = {"drafter": drafter, "topology": topology, "max_new_tokens": 48}
    steps = Program(target, prompt, **options).steps(prompt)
    return [
        {
            "parents": [*topology.parents],
            "labels": [tokenizer.decode([int(token)]) for token in drafts.tokens[0]],
            "path": topology.ancestor_mask[int(verdict.last[0])].nonzero()[0].tolist(),
            "next": tokenizer.decode([int(verdict.next_token[0])]),
        }
        for drafts, verdict in itertools.islice(steps, 8)
    ]


def figures(steps: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Figure]:
    """All pictures by name; of the committed steps, unless others are given."""
    decode = json.loads((MEASURED / "decode-cpu.json").read_text())
    steps = steps or json.loads((MEASURED / "steps.json").read_text())["steps"]
    with matplotlib.style.context(STYLE):
        return {
            "how": how_picture(steps[README_STEP]),
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
        write_json(options.output / "steps.json", {"prompt": PROMPT, "steps": steps})
    folder = PICTURES if options.commit else options.output
    for name, figure in figures(steps).items():
        (folder / f"{name}.svg").write_text(svg(figure))
    conclude("pictures", folder=str(folder))


if __name__ == "__main__":
    main()
