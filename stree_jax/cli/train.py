"""`stree-jax train`, `distill` and those that train heads."""

from rich.console import Console

from stree_jax.cli.options import Distill, Train
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.measuring.report import progress_bar
from stree_jax.training import Recipe, distill, train, train_heads


def run_training(command: Train | Distill) -> None:
    """Trains, distills a target, or trains heads for one, with a progress bar."""
    console, recipe = Console(highlight=False), Recipe.load(command.recipe)
    enable_compilation_cache()
    if isinstance(command, Train):
        steps = train(recipe, command.output)
    elif command.kind:
        steps = train_heads(command.kind, recipe, command.target, command.output)
    else:
        steps = distill(recipe, command.target, command.output)
    with progress_bar(console) as show:
        show("reading text", 0, recipe.training.steps)
        for trained in steps:
            note = f", loss {trained.loss:.3f}, {trained.tokens_per_second:,.0f} tokens/s"
            show("training steps", trained.step, recipe.training.steps, note)
    console.print(f"wrote {command.output}")
