"""Profiles the embedded models on this CPU, and draws one step for `docs/howto.md`.

The trace has the names of XLA's operations; their scopes are in the text of the program.

    python -m docs.draw_profile          writes docs/pictures/profile.svg
"""

import collections
import gzip
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.style
from matplotlib.patches import Rectangle

import stree_jax as st
from benchmarks.pictures import PICTURES, PROMPT, STYLE, blank, svg
from stree_jax.decoding.plan import plan

# Rows of the picture: a part, and a scope inside it, by the beginning of its name; the colour.
ROWS = {
    ("draft", ""): "C0",
    ("draft", "layer_"): "C0",
    ("draft", "head"): "C0",
    ("verify", ""): "C1",
    ("verify", "layer_"): "C1",
    ("verify", "replay"): "C2",
    ("verify", "head"): "C1",
    ("", "sampling"): "C4",
}
LEFT, WIDTH, HEIGHT = 116, 320, 18  # of the bars; of a row
_INSIDE = r"jit\(.*\)|while|body|cond|closed_call|branch_.*"  # parts of names that say nothing


class Span(NamedTuple):
    """An operation: microseconds, and the scopes around it."""

    start: float
    end: float
    scopes: tuple[str, ...]


def profiled() -> list[list[Span]]:
    """The operations of each step."""
    target, draft = (st.from_pretrained(st.demo_path(name)) for name in ("target", "draft"))
    prompt = st.load_tokenizer(st.demo_path("target")).encode(PROMPT).ids
    ways: Any = {"drafter": st.ModelDrafter(draft), "max_new_tokens": 48, "temperature": 1.0}
    decoder, drafter, context, keys, limits, sampling, *_ = plan(target, [prompt], key=0, **ways)

    def arguments() -> tuple[Any, ...]:
        state = decoder.start(target, drafter, context, keys, sampling)
        return decoder, target, drafter, state, limits, sampling

    run: Any = st.SpeculativeDecoder.run
    program = run.lower(*arguments()).compile().as_text()
    jax.block_until_ready(run(*arguments()))
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*given))
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = dict(re.findall(r'^ *(?:ROOT )?%?([\w.-]+) = .*?op_name="([^"]*)"', program, re.M))
    spans = collections.defaultdict[str, list[Span]](list)
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        name = event.get("args", {}).get("hlo_op", "while")
        if name in names and not name.startswith(("while", "call", "conditional")):
            parts = names[name].split("/")[:-1]  # the last is the operation's own
            scopes = tuple(part for part in parts if not re.fullmatch(_INSIDE, part))
            spans[name].append(Span(event["ts"], event["ts"] + event["dur"], scopes))
    # A step begins with the first of the operations that run once in each, as the head does.
    (head,) = {len(own) for own in spans.values() if own[0].scopes[:2] == ("verify", "head")}
    begins = min((own for own in spans.values() if len(own) == head), key=lambda own: own[0].start)
    steps = itertools.pairwise(span.start for span in begins)
    everything = [*itertools.chain(*spans.values())]
    return [[span for span in everything if one <= span.start < two] for one, two in steps]


def is_in(span: Span, part: str, scope: str) -> bool:
    """True if an operation belongs to a row of the picture."""
    return part in ("", *span.scopes[:1]) and any(each.startswith(scope) for each in span.scopes)


def main() -> None:
    """Draws the quickest step, with the shares of its parts."""
    step = min(profiled(), key=lambda step: max(step).end - min(step).start)
    first, last = min(step).start, max(span.end for span in step)
    scale, total = WIDTH / (last - first), sum(span.end - span.start for span in step)
    with matplotlib.style.context(STYLE):
        figure, axes = blank(34 + len(ROWS) * HEIGHT)
        axes.text(2, 12, "A step, on 2 cores of a CPU", weight="bold", va="center_baseline")
        for row, ((part, scope), colour) in enumerate(ROWS.items()):
            y = 28 + row * HEIGHT
            own = [span for span in step if is_in(span, part, scope)]
            share = sum(span.end - span.start for span in own) / total
            name = {"layer_": "layers", "replay": "replay, scan"}.get(scope, scope or part)
            label = f"in it: {name}" if part and scope else name
            axes.text(2, y + 7, label, size=9, va="center_baseline")
            axes.text(478, y + 7, f"{share:.0%}", size=9, ha="right", va="center_baseline")
            bars: list[list[float]] = []  # those that touch are one
            for start, end, _ in sorted(own):
                left, right = (LEFT + scale * (time - first) for time in (start, end))
                if not bars or left > bars[-1][1] + 0.3:
                    bars.append([left, right])
                bars[-1][1] = max(bars[-1][1], right)
            for left, right in bars:
                size = max(right - left, 0.4), HEIGHT - 4
                axes.add_patch(Rectangle((left, y), *size, facecolor=colour))
        (PICTURES / "profile.svg").write_text(svg(figure))


if __name__ == "__main__":
    main()
