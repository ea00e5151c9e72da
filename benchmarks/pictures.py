"""What do the results look like? Draws the pictures of the documentation from `benchmarks/results`.

Hand-written SVG: the same results give the same bytes, which a test compares with the committed
pictures. No background, and colours of middle lightness: they can be read on light and on dark.
`--decode` first decodes the README's prompt with the embedded models and writes `steps.json`, from
which the trees are drawn.

    python -m benchmarks.pictures [--decode]
        [--output DIR | --commit]                   default: benchmark-results; docs/pictures
"""

import argparse
import html
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import stree_jax as st
from benchmarks.common import conclude, read_options, write_json

MEASURED = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 480  # on a phone it shrinks to some 350, where the text can still be read
GREY, FAINT = "#7d7d7d", "#7d7d7d55"
COLOURS = ("#3b82c4", "#d9730d", "#2e9e6b", "#9a6dd7", "#d64f6a")
PROMPT = "Question: Ann has 3 pens."
README_STEP = 2  # of the text that begins with the prompt


class Drawing:
    """Shapes of an SVG, and their text."""

    def __init__(self, title: str):
        self.title, self.height = title, 0.0
        self.shapes: list[str] = []

    def add(self, shape: str, inside: str = "", **attributes: Any) -> None:
        """A shape; underscores in the names of attributes are hyphens."""
        pairs = "".join(
            f' {name.replace("_", "-")}="{value:g}"'
            if isinstance(value, int | float)
            else f' {name.replace("_", "-")}="{value}"'
            for name, value in attributes.items()
        )
        self.shapes.append(f"<{shape}{pairs}>{inside}</{shape}>")

    def text(self, x: float, y: float, words: str, **attributes: Any) -> None:
        """Text whose middle is at height `y`."""
        look = {"fill": GREY} | attributes
        self.add("text", html.escape(words), x=x, y=y, dominant_baseline="central", **look)

    def line(self, points: Iterable[tuple[float, float]], **attributes: Any) -> None:
        """A line through some points."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = {"fill": "none", "stroke": GREY, "stroke_width": 1.5} | attributes
        self.add("polyline", points=where, **look)

    def svg(self) -> str:
        """The file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}"'
            f' width="{WIDTH}" height="{self.height:.0f}" role="img" font-size="14"'
            ' font-family="system-ui, sans-serif">\n'
            f"<title>{html.escape(self.title)}</title>\n" + "\n".join(self.shapes) + "\n</svg>\n"
        )


def chart(
    drawing: Drawing,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
) -> None:
    """Lines with points, below what the drawing has already; a legend below them."""
    top, left, right, height = drawing.height + 34, 40.0, WIDTH - 12.0, 200.0
    span_x, span_y = x_ticks[-1] - x_ticks[0], y_ticks[-1] - y_ticks[0]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        across = (x - x_ticks[0]) / span_x * (right - left)
        return left + across, top + height - (y - y_ticks[0]) / span_y * height

    drawing.text(0, drawing.height + 12, title, font_weight="bold")
    for tick in y_ticks:
        y = place((x_ticks[0], tick))[1]
        drawing.line([(left, y), (right, y)], stroke=FAINT, stroke_width=1)
        drawing.text(left - 8, y, f"{tick:g}", text_anchor="end")
    for tick in x_ticks:
        drawing.text(place((tick, 0))[0], top + height + 16, f"{tick:g}", text_anchor="middle")
    drawing.text((left + right) / 2, top + height + 38, x_label, text_anchor="middle")
    for points, colour in zip(series.values(), itertools.cycle(COLOURS)):
        places = [place(point) for point in points]
        drawing.line(places, stroke=colour, stroke_width=2.5)
        for x, y in places:
            drawing.add("circle", cx=round(x, 1), cy=round(y, 1), r=3.5, fill=colour)
    drawing.height = top + height + 56
    legend(drawing, series)


def legend(drawing: Drawing, names: Iterable[str]) -> None:
    """Names in their colours, two in a row."""
    rows = 0
    for i, (name, colour) in enumerate(zip(names, itertools.cycle(COLOURS))):
        x, y = i % 2 * WIDTH / 2, drawing.height + 10 + i // 2 * 22
        drawing.add("rect", x=x, y=y - 6, width=12, height=12, rx=2, fill=colour)
        drawing.text(x + 20, y, name)
        rows = i // 2 + 1
    drawing.height += 22 * rows + 14


def ticks(highest: float, step: float, lowest: float = 0) -> list[float]:
    """From the lowest in equal steps, until one is no less than the highest."""
    found = [lowest]
    while found[-1] < highest:
        found.append(found[-1] + step)
    return found


def depth_picture(decode: Mapping[str, Any]) -> Drawing:
    """Tokens a call, if no more than so many drafts of a path counted."""
    drawing = Drawing("Tokens per target call by depth of the tree, at temperature 0 and 1")
    names = ("chain of 4", "tuned tree", "dynamic tree", "tree A", "prompt lookup, chain of 4")
    lines: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for temperature in (0.0, 1.0):
        for name in names:
            (row,) = (
                row
                for row in decode["decoding"]
                if (row["method"], row["temperature"]) == (name, temperature)
            )
            totals = itertools.accumulate(row["accepted_per_depth"], initial=1.0)
            lines.setdefault(temperature, {})[name] = list(enumerate(totals))
    deepest = max(len(line) for each in lines.values() for line in each.values()) - 1
    most = max(line[-1][1] for each in lines.values() for line in each.values())
    for temperature, each in lines.items():
        chart(
            drawing,
            f"Tokens per target call, temperature {temperature:g}",
            each,
            x_label="drafts of a path that count",
            x_ticks=range(deepest + 1),
            y_ticks=ticks(most, 1, 1),
        )
    return drawing


def cost_picture(decode: Mapping[str, Any]) -> Drawing:
    """Time of a target call by nodes."""
    drawing = Drawing("Relative time of a target call by number of nodes, for three models")
    series = {
        f"{each['model']}, {each['parameters'] / 1e6:.3g} M": [
            (float(nodes), ratio) for nodes, ratio in each["relative_to_one_node"].items()
        ]
        for each in decode["target_calls"]
    }
    most = max(y for line in series.values() for _, y in line)
    chart(
        drawing,
        "Time of a call, one node = 1",
        series,
        x_label="nodes of the tree",
        x_ticks=(1, 5, 13, 29),
        y_ticks=ticks(most, 2 if most > 5 else 1),
    )
    return drawing


def speed_picture(decode: Mapping[str, Any]) -> Drawing:
    """Bars: speed of each method at both temperatures, with quartiles; tau behind them."""
    drawing = Drawing("Speed relative to autoregressive decoding, by method and temperature")
    drawing.text(0, 12, "Tokens per second, autoregressive = 1", font_weight="bold")
    methods = [row["method"] for row in decode["decoding"] if row["temperature"] == 0]
    most = max(row["speed_up"]["high"] for row in decode["decoding"])
    left, top, room = 4.0, 40.0, WIDTH - 80.0
    scale = room / most
    for i, method in enumerate(methods):
        y = top + 62 * i
        drawing.text(left, y, method)
        for j, temperature in enumerate((0.0, 1.0)):
            (row,) = (
                row
                for row in decode["decoding"]
                if (row["method"], row["temperature"]) == (method, temperature)
            )
            speed, at = row["speed_up"], y + 18 + 17 * j
            wide = speed["median"] * scale
            drawing.add(
                *("rect",), x=left, y=at - 7, width=round(wide, 1), height=14, rx=2,
                fill=COLOURS[j],
            )  # fmt: skip
            ends = [(left + speed[end] * scale, at) for end in ("low", "high")]
            drawing.line(ends, stroke_width=2)
            said = f"{speed['median']:.2f}x, tau {row['tau']:.2f}"
            if method == "autoregressive":
                said = f"{row['tokens_per_second']['median']:.0f} tokens/s"
            # Inside a bar that leaves no room behind it, or only across the line at 1.
            inside = wide > room - 60 or wide < scale
            drawing.text(
                ends[0][0] - 8 if inside else ends[1][0] + 8, at, said, font_size=12,
                text_anchor="end" if inside else "start", fill="#ffffff" if inside else GREY,
            )  # fmt: skip
    bottom = top + 62 * len(methods) - 14
    drawing.line(
        [(left + scale, top + 10), (left + scale, bottom)], stroke_dasharray="4 4", stroke_width=1
    )
    drawing.height = bottom + 8
    legend(drawing, ("temperature 0", "temperature 1"))
    return drawing


def step_picture(step: Mapping[str, Any]) -> Drawing:
    """A draft tree from left to right: the accepted path filled, the target's own token framed."""
    drawing = Drawing("A draft tree, the accepted path and the token that the target added")
    parents, labels = [*step["parents"], step["path"][-1]], [*step["labels"], step["next"]]
    own = len(parents) - 1
    children = [
        [n for n, parent in enumerate(parents) if parent == node] for node in range(own + 1)
    ]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    gap, tall = WIDTH / (max(depths) + 1), 38.0
    wide, rows = gap - 20, itertools.count()
    height: dict[int, float] = {}

    def settle(node: int) -> float:
        below = [settle(child) for child in children[node]]
        height[node] = (below[0] + below[-1]) / 2 if below else next(rows) * tall + 18
        return height[node]

    settle(0)
    for node, parent in enumerate(parents):
        x, y = depths[node] * gap + 2, height[node]
        on_path = node == own or node in step["path"]
        if parent >= 0:
            start, middle = (x - gap + wide, height[parent]), x - 10
            bend = [start, (middle, start[1]), (middle, y), (x, y)]
            colour = COLOURS[2] if node == own else COLOURS[0] if on_path else GREY
            drawing.line(bend, stroke=colour, stroke_width=2.5 if on_path else 1)
    for node in range(own + 1):
        x, y = depths[node] * gap + 2, height[node]
        look: dict[str, Any] = {"fill": "none", "stroke": GREY}
        if node == own:
            look = {"fill": "none", "stroke": COLOURS[2], "stroke_width": 2.5}
        elif node in step["path"]:
            look = {"fill": COLOURS[0], "stroke": COLOURS[0]}
        drawing.add("rect", x=round(x, 1), y=y - 13, width=round(wide, 1), height=26, rx=6, **look)
        drawing.text(
            round(x + wide / 2, 1), y, labels[node].replace(" ", "\u00b7").replace("\n", "\u21b5"),
            text_anchor="middle",
            fill="#ffffff" if node in step["path"] else COLOURS[2] if node == own else GREY,
        )  # fmt: skip
    drawing.height = max(height.values()) + 20
    return drawing


def decoded_steps(count: int = 8) -> list[dict[str, Any]]:
    """The first steps of the embedded models on the README's prompt."""
    from stree_jax.decoding.options import plan

    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    request = plan(
        target,
        [tokenizer.encode(PROMPT).ids],
        max_new_tokens=48,
        drafter=st.ModelDrafter(draft),
    )
    decoder = request.decoder
    state = decoder.start(target, request.drafter, request.context, request.keys)
    steps = []
    for _ in range(count):
        state, draft_tree, verdict = decoder.step(
            target, request.drafter, state, request.limits, request.sampling
        )
        last, words = int(verdict.last[0]), [*map(int, draft_tree.tokens[0])]
        steps.append(
            {
                "parents": [*decoder.topology.parents],
                "labels": [tokenizer.decode([token]) for token in words],
                "path": decoder.topology.ancestor_mask[last].nonzero()[0].tolist(),
                "next": tokenizer.decode([int(verdict.next_token[0])]),
            }
        )
    return steps


def pictures(steps: Sequence[Mapping[str, Any]] | None = None) -> dict[str, str]:
    """All pictures by name; of the committed steps, unless others are given."""
    decode = json.loads((MEASURED / "decode-cpu.json").read_text())
    steps = steps or json.loads((MEASURED / "steps.json").read_text())["steps"]
    longest = max(reversed(steps), key=lambda step: len(step["path"]))
    drawings = {
        "step": step_picture(steps[README_STEP]),
        "long-step": step_picture(longest),
        "depth": depth_picture(decode),
        "cost": cost_picture(decode),
        "speed": speed_picture(decode),
    }
    return {name: drawing.svg() for name, drawing in drawings.items()}


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
    for name, svg in pictures(steps).items():
        (folder / f"{name}.svg").write_text(svg)
    conclude("pictures", folder=str(folder))


if __name__ == "__main__":
    main()
