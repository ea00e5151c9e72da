"""Which way to decode, from the records of `compare` at one temperature."""

from collections.abc import Mapping, Sequence
from typing import Any


def spread(row: Mapping[str, Any]) -> float:
    """Half the range between the quartiles of the rounds, in tokens a second."""
    return (row["tokens_per_second"]["high"] - row["tokens_per_second"]["low"]) / 2


def is_beaten(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if another way is faster by more than the spread of both."""
    mine, theirs = (each["tokens_per_second"]["median"] for each in (row, other))
    return theirs - mine > max(spread(row), spread(other))


def choice(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The simplest way that none beats: no drafts, else a chain, else the fastest."""
    ranked = _ranked(rows)
    chains = [row for row in ranked if row["nodes"] == 1 + len(row["accepted_per_depth"])]
    none = [row for row in chains if row["nodes"] == 1]
    simplest = *none, *chains, ranked[0]
    return next(row for row in simplest if not is_beaten(row, ranked[0]))


def advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """What to draft with and why, in a sentence."""
    best, ranked = choice(rows), _ranked(rows)
    if best["nodes"] > 1:
        said = f"Draft with {best['method']}: {_gain(best)} without (tau {best['tau']:.2f})."
        if best is ranked[0]:
            return said
        return f"{said} {ranked[0]['method']} is no faster beyond the spread."
    tree = next((row for row in ranked if row["nodes"] > 1), None)
    if tree is None:
        return "Do not draft: no way with drafts gives the text."
    if not is_beaten(tree, best):
        return f"Do not draft: {tree['method']} is {_gain(tree)} without, within the spread."
    speed, slower = (row["tokens_per_second"]["median"] for row in (best, tree))
    needed, tau = tree["tau"] * speed / slower, tree["tau"]
    return f"Do not draft: {tree['method']} needs tau {needed:.1f} here, and reaches {tau:.1f}."


def _ranked(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fastest first, without those whose texts are wrong."""
    right = [row for row in rows if row["identical"] is not False]
    return sorted(right, key=lambda row: -row["tokens_per_second"]["median"])


def _gain(row: Mapping[str, Any]) -> str:
    return f"{row['speed_up']['median']:.2f} times as fast as"
