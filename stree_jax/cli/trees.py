"""Draft trees on the command line, and the command that draws one."""

from rich.console import Console

from stree_jax.cli.options import Tree
from stree_jax.loading import parse_tree


def run_tree(command: Tree) -> None:
    """Draws a tree."""
    topology = parse_tree(command.spec)
    if topology == "auto" or isinstance(topology, list):
        raise ValueError(
            f"{command.spec} has no shape: it takes one of several trees after the other"
        )
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
