"""The collectives of a compiled decode loop, and their limits."""

import math
import re
from collections import Counter
from typing import NamedTuple

import stree_jax as st

_COLLECTIVE = re.compile(
    r"= (?P<type>\(.*?\)|\S+)"
    r" (?P<name>all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


class Found(NamedTuple):
    """A collective of a program."""

    name: str
    where: str  # "body" and "condition" of the loop, or "outside"
    numbers: int  # of its largest array


def collectives(text: str) -> list[Found]:
    """The collectives in the text of a compiled program."""
    found = []
    for line in text.splitlines():
        if (match := _COLLECTIVE.search(line)) is None:
            continue
        scope = re.search(r'op_name="([^"]*)"', line)
        path = scope[1] if scope else ""
        where = "condition" if "/while/cond" in path else "outside"
        where = "body" if "/while/body" in path else where
        shapes = re.findall(r"\[([\d,]*)\]", match["type"])
        sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
        found.append(Found(match["name"], where, max(sizes)))
    return found


def problems(
    config: st.ModelConfig, found: list[Found], *, steps: int, nodes: int, rows: int
) -> list[str]:
    """Violations by the collectives of a loop with a drafter, at temperature 0.

    Its body has some `steps` on trees of `nodes`, for `rows` of a shard of the batch.
    """
    per_layer = sum(2 if kind == "shared" else 1 for kind in config.kinds)
    wanted = {"all-reduce": steps * (per_layer + 2), "all-gather": steps}
    body = Counter(each.name for each in found if each.where == "body")
    wrong = [] if body == wanted else [f"the loop's body has {dict(body)}, not {wanted}"]
    if any(each.where == "condition" for each in found):
        wrong.append("the loop's condition has a collective")
    # A layer's output with the mean square, or a draft tree; and the logits of all shards.
    most = {
        "all-reduce": rows * max(nodes * (config.d_model + 1), nodes * (nodes + 4) + 1),
        "all-gather": rows * nodes * config.num_embeddings,
    }
    large = [each for each in found if each.numbers > most.get(each.name, 0)]
    return wrong + [f"{each.name} of {each.numbers} numbers: a weight or a state" for each in large]
