"""Limits on launches, memory and spills of compiled programs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


# Options of a command line: numbers, and limits of kinds.
NUMBERS: dict[str, Any] = {"type": int, "nargs": "*", "default": []}


def limit(text: str) -> tuple[str, float]:
    """Parses `KIND=NUMBER`."""
    kind, _, number = text.partition("=")
    return kind, float(number)


LIMITS: dict[str, Any] = {"nargs": "+", "type": limit, "default": [], "metavar": "KIND=NUMBER"}


def conclude(failures: Sequence[str]) -> None:
    """Ends the process with what failed, if anything did."""
    if failures:
        raise SystemExit("\n".join(failures))


def most_launches(rows: Sequence[Row]) -> dict[str, float]:
    """The most launches of each kind, with our kernels and products whole.

    Kinds are those of layers, which in a prefill are called `prompt-KIND`, and `draft-KIND` in a
    draft model for all levels of a call; and "greedy" and
    "sampled" for a step of the loop outside of layers.
    """
    most: dict[str, float] = {}
    for row in _gated(rows):
        prefix = "prompt-" if "positions" in row else "draft-" if "draft" in row else ""
        layers = row.get("layers", {}).items()
        counts = {prefix + kind: layer["launches"] for kind, layer in layers}
        if "launches_a_step" in row:
            counts["sampled" if row["sampled"] else "greedy"] = row["launches_a_step"]
        for kind, count in counts.items():
            most[kind] = max(most.get(kind, 0.0), count)
    return most


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


def not_one_graph(rows: Sequence[Row]) -> list[str]:
    """Loops with our kernels whose body is more than one captured graph, or no rows of loops."""
    bodies = [(row, body) for row in _gated(rows) for body in row["bodies"]]
    found = [
        f"{row['preset']}, {row['gpu']}, {row['loop_nodes']} nodes: a loop's body is {body}"
        for row, body in bodies
        if body != "kCommandBuffer"
    ]
    return found if bodies else ["one graph: no loop was compiled, or XLA does not say"]


def _gated(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if (row["implementation"], row["products"]) == ("pallas", "whole"))


def failures(
    most: Mapping[str, float],
    limits: Sequence[tuple[str, float]],
    growth: Mapping[str, float],
    most_growth: float,
    spilled: int,
) -> list[str]:
    """Limits that are exceeded; a limit on something that was not compiled is exceeded, too.

    `limits` are for entries of `most`, `most_growth` for all of `growth`, infinite for none.
    """
    found = [
        f"{kind}: {most.get(kind, 'nothing of this kind was compiled')}, the limit is"
        f" {number:g}; all kinds: {most}"
        for kind, number in limits
        if most.get(kind, math.inf) > number
    ]
    if most_growth < math.inf and not growth:
        found.append("growth of memory: no whole model was compiled for two sizes of trees")
    found += [
        f"{program}: memory grows by {percent:.2f} %, the limit is {most_growth:g} %"
        for program, percent in growth.items()
        if percent > most_growth
    ]
    return found + [f"{spilled} programs spill registers"] * (spilled > 0)
