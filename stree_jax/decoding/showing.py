"""A generation, call by call: which tokens were accepted drafts."""

import itertools
from typing import Any


def counts(generation: Any, row: int) -> str:
    """How many tokens, calls and accepted drafts a row has."""
    tokens, calls = generation.lengths[row], generation.stats.target_calls_per_row[row]
    drafts = int(generation.drafted[row].sum())
    return f"{tokens} tokens from {calls} calls of the target, {drafts} of them accepted drafts"


def show(generation: Any, console: Any = None) -> None:
    """Prints the rows: accepted drafts are green, or in brackets where there are no colours."""
    from rich.console import Console
    from rich.text import Text

    if generation.calls is None:
        raise ValueError("calls were not recorded: generate(..., record_calls=True)")
    console = console or Console()
    for row, size in enumerate(generation.lengths):
        pieces = [f" {token}" for token in generation.tokens[row, :size]]  # without a tokenizer
        pieces = pieces if generation.pieces is None else generation.pieces[row]
        parts = zip(generation.calls[row], generation.drafted[row], pieces, strict=False)
        text = Text()
        for (_, is_draft), group in itertools.groupby(parts, lambda part: part[:2]):
            piece = "".join(piece for *_, piece in group)
            bracketed = is_draft and not console.color_system
            text.append(f"[{piece}]" if bracketed else piece, "green" if is_draft else "bold")
        console.print(text, soft_wrap=True)
        console.print(counts(generation, row), style="dim", highlight=False, soft_wrap=True)
