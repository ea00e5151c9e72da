"""`stree-jax train`, `distill` and those that train heads."""

from collections.abc import Iterator

from rich.console import Console

from stree_jax.cli.options import Distill, Train
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.measuring.report import progress_bar
from stree_jax.training import Progress, Recipe, distill, train, train_heads


def run_training(command: Train | Distill) -> None:
    """Trains, distills a target, or trains heads for one, with a progress bar."""
    console, recipe = Console(highlight=False), Recipe.load(command.recipe)
    enable_compilation_cache()
    with progress_bar(console) as show:
        show("reading text", 0, recipe.training.steps)
        for each in _trained(command, recipe):
            note = f", loss {each.loss:.3f}, {each.tokens_per_second:,.0f} tokens/s"
            show("training", each.step, recipe.training.steps, note)
    console.print(f"wrote {command.output}")


def _trained(command: Train | Distill, recipe: Recipe) -> Iterator[Progress]:
    if isinstance(command, Train):
        return train(recipe, command.output)
    if command.kind:
        return train_heads(command.kind, recipe, command.target, command.output)
    return distill(recipe, command.target, command.output)
