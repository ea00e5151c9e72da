"""Draft trees on the command line: `chain:4`, `complete:2,3`, `paper:A`, `@tree.json`, ..."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from stree_jax.cli.options import Tree
from stree_jax.tree import TreeTopology


def run_tree(command: Tree) -> None:
    """Draws a tree."""
    topology = parse_tree(command.spec)
    if topology == "auto" or isinstance(topology, list):
        raise ValueError(f"{command.spec} has no shape: it is one of several trees in each step")
    if topology is None:
        raise ValueError(f"{command.spec} says not to draft: there is no tree to print")
    console = Console(highlight=False)
    console.print(topology.draw(), markup=False, soft_wrap=True)  # a wrapped tree is unreadable
    console.print(
        f"{topology.num_nodes} nodes, depth {topology.depth}, width {topology.width}", style="dim"
    )
    if command.spec.startswith("budget:"):
        console.print(
            "This shape only holds the place: the draft model chooses another in every step.",
            style="dim",
        )


def kind_of(spec: str) -> str:
    """The word that begins the specification of a tree, such as "budget"."""
    return spec.partition(":")[0]


def parse_tree(spec: str) -> Any:
    """Parses the specification of a tree; None, not to draft, if it has its root alone.

    Of several trees, among which each step chooses, it is "auto" or a list.
    """
    if spec == "auto":
        return spec
    if spec.startswith("auto@"):
        return _read(Path(spec[5:]), "trees")
    topology = _read(Path(spec[1:]), "parents") if spec.startswith("@") else _parsed(spec)
    return None if topology is None or topology.num_nodes == 1 else topology


def _parsed(spec: str) -> TreeTopology:
    kind, _, rest = spec.partition(":")
    if kind == "paper":
        return TreeTopology.paper(rest)
    try:
        numbers = [int(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    match kind, numbers:
        case "chain", [num_drafts]:
            return TreeTopology.chain(num_drafts)
        case "complete", [branching, depth]:
            return TreeTopology.complete(branching, depth)
        case "beam", [num_beams, num_steps]:
            return TreeTopology.beam(num_beams, num_steps)
        case "budget", [num_nodes, depth]:
            return TreeTopology.budget(num_nodes, depth)
        case "branching", [_, *_]:
            return TreeTopology.from_branching(numbers)
        case "parents", [_, *_]:
            return TreeTopology.from_parents(numbers)
    raise ValueError(
        f"{spec!r} is not a tree:"
        " use auto, chain:4, complete:2,3, branching:3,2,1, beam:3,4, budget:32,6, paper:A,"
        " parents:-1,0,0, or @FILE or auto@FILE that tune-tree wrote"
    )


def _read(path: Path, field: str) -> Any:
    """The tree or the trees in a file of `stree-jax tune-tree`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))[field]
        if field == "trees":
            return [TreeTopology.from_parents(parents) for parents in content]
        return None if content is None else TreeTopology.from_parents(content)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a tree of tune-tree: {str(error)[:120]}") from None
