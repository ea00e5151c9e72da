"""Draft trees on the command line: `chain:4`, `complete:2,3`, `branching:3,2,1`, `paper:A`, ..."""

from stree_jax.tree import TreeTopology


def parse_tree(spec: str) -> TreeTopology:
    """Parses the specification of a tree.

    Raises:
        ValueError: the specification is malformed.
    """
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
        " use chain:4, complete:2,3, branching:3,2,1, beam:3,4, budget:32,6, paper:A"
        " or parents:-1,0,0"
    )
