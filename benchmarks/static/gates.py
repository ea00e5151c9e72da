"""Limits on launches, memory and spills of what was compiled."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def limit(text: str) -> tuple[str, float]:
    """Parses `KIND=NUMBER`."""
    kind, _, number = text.partition("=")
    return kind, float(number)


def most_launches(rows: Sequence[Row]) -> dict[str, float]:
    """Launches of a layer of each kind, at most, with our kernels and products whole.

    Layers that read a prompt are called `prompt-KIND`. Steps on one node do not count: XLA splits
    the product of one row and a matrix into two launches.
    """
    most: dict[str, float] = {}
    for row in _gated(rows):
        if row.get("nodes") == 1:
            continue
        for kind, layer in row["layers"].items():
            name = f"prompt-{kind}" if "positions" in row else kind
            most[name] = max(most.get(name, 0.0), layer["launches"])
    return most


def most_outside(rows: Sequence[Row]) -> dict[str, float]:
    """Launches of a step of the loop outside of layers, at most; as `most_launches`."""
    most: dict[str, float] = {}
    for row in _gated(rows):
        name = "sampled" if row["sampled"] else "greedy"
        most[name] = max(most.get(name, 0.0), row["launches_a_step"])
    return most


def exceeded(most: Mapping[str, float], limits: Sequence[tuple[str, float]]) -> list[str]:
    """What exceeds its limit, or was not compiled at all."""
    return [
        f"{kind}: {most.get(kind, 'nothing of this kind was compiled;')} launches, the limit is"
        f" {number:g}; all kinds: {most}"
        for kind, number in limits
        if most.get(kind, math.inf) > number
    ]


def growth_of_memory(rows: Sequence[Row]) -> dict[str, float]:
    """Growth of all memory of a whole step, in percent, from the smallest tree to the largest."""
    sizes: dict[str, dict[int, int]] = {}
    for row in _gated(rows):
        if "whole" in row and "nodes" in row:
            program = f"{row['preset']}, {row['gpu']}"
            sizes.setdefault(program, {})[row["nodes"]] = row["whole"]["all_bytes"]
    return {
        program: 100 * (of[max(of)] / of[min(of)] - 1)
        for program, of in sizes.items()
        if len(of) > 1
    }


def _gated(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if (row["implementation"], row["products"]) == ("pallas", "whole"))


def failures(
    rows: Sequence[Row],
    *,
    launches: Sequence[tuple[str, float]],
    growth: float,
    spilled: int,
) -> list[str]:
    """What exceeds its limit; a limit on something that was not compiled is exceeded, too.

    Args:
        rows: of steps and prompts.
        launches: limits of `most_launches`.
        growth: limit of `growth_of_memory`, infinite for none.
        spilled: number of programs that spill registers.
    """
    grown = growth_of_memory(rows)
    found = exceeded(most_launches(rows), launches)
    if growth < math.inf and not grown:
        found.append("growth of memory: no whole model was compiled for two sizes of trees")
    found += [
        f"{program}: memory grows by {percent:.2f} %, the limit is {growth:g} %"
        for program, percent in grown.items()
        if percent > growth
    ]
    if spilled:
        found.append(f"{spilled} programs spill registers")
    return found
