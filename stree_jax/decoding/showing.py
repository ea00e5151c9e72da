"""A generation, call by call: which tokens were accepted drafts, on a terminal and as HTML."""

import html as markup
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

_STYLES = {"draft": "background:#2e9e6b55", "own": "font-weight:bold"}
_LEGEND = "accepted drafts", "the target's own token, the last of each call"


class Call(NamedTuple):
    """The text that a call of the target emitted."""

    number: int
    drafts: str
    own: str  # empty where the row ended at a draft


def calls_of(generation: Any, row: int) -> Iterator[Call]:
    """The calls that emitted a row's tokens; without a tokenizer these are their ids."""
    if generation.calls is None:
        raise ValueError("calls were not recorded: generate(..., record_calls=True)")
    size = generation.lengths[row]
    if generation.pieces is None:
        pieces = [f" {token}" for token in generation.tokens[row, :size]]
    else:
        pieces = generation.pieces[row]
    tokens = zip(generation.calls[row, :size], generation.drafted[row, :size], pieces, strict=True)
    for number, group in itertools.groupby(tokens, lambda token: token[0]):
        found = [*group]
        drafts, own = ("".join(p for _, d, p in found if d == kind) for kind in (True, False))
        yield Call(int(number), drafts, own)


def counts(generation: Any, row: int) -> str:
    """How many tokens, calls and accepted drafts a row has."""
    tokens, calls = generation.lengths[row], generation.stats.target_calls_per_row[row]
    drafts = int(generation.drafted[row].sum())
    return f"{tokens} tokens from {calls} calls of the target, {drafts} of them accepted drafts"


def show(generation: Any, console: Any = None) -> None:
    """Prints the rows: accepted drafts are green, or in brackets where there are no colours."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    for row in range(len(generation.tokens)):
        text = Text()
        for call in calls_of(generation, row):
            bracketed = call.drafts if console.color_system else f"[{call.drafts}]"
            text.append(bracketed if call.drafts else "", style="green")
            text.append(call.own, style="bold")
        console.print(text, soft_wrap=True)
        console.print(counts(generation, row), style="dim", highlight=False, soft_wrap=True)


def html(generation: Any) -> str:
    """The rows as HTML: a box for each call, in which accepted drafts have a colour."""
    parts = []
    for row in range(len(generation.tokens)):
        for number, drafts, own in calls_of(generation, row):
            spans = (
                f'<span style="{_STYLES[kind]}">{markup.escape(text)}</span>'
                for kind, text in (("draft", drafts), ("own", own))
                if text
            )
            parts.append(f'<span title="call {number}" style="border-left:1px solid #7d7d7d">')
            parts += [*spans, "</span>"]
        parts.append(f"<br><small>{counts(generation, row)}</small><br>")
    legend = "".join(
        f' <span style="{style}">{said}</span>'
        for style, said in zip(_STYLES.values(), _LEGEND, strict=True)
    )
    return f'<div style="white-space:pre-wrap">{"".join(parts)}<small>{legend}</small></div>'
