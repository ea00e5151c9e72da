"""`stree-jax train`, `distill` and those that train heads: a training loop with a progress bar."""

import statistics
from collections.abc import Iterator

from rich import progress as bars
from rich.console import Console

from stree_jax.cli.options import Distill, Train
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.training import Progress, Recipe, distill, train, train_heads


def run_training(command: Train | Distill) -> None:
    """Trains, distills a target, or trains heads for one, with a progress bar."""
    console, recipe = Console(), Recipe.load(command.recipe)
    enable_compilation_cache()
    reports = _trained(command, recipe)
    columns = bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()
    what, left = bars.TextColumn("{task.description}"), bars.TimeRemainingColumn()
    report = bars.TextColumn("{task.fields[report]}")
    with bars.Progress(what, *columns, left, report, console=console) as progress:
        task = progress.add_task("reading text", total=recipe.training.steps, report="")
        losses: list[float] = []
        speeds: list[float] = []
        for step in reports:
            progress.update(
                task,
                description="training",
                completed=step.step,
                report=f"loss {step.loss:.3f}  {step.tokens_per_second:,.0f} tokens/s",
            )
            losses.append(step.loss)
            speeds.append(step.tokens_per_second)
            # A bar cannot be drawn into a log file.
            if not console.is_terminal and step.step % recipe.training.save_every == 0:
                console.print(
                    f"step {step.step} of {recipe.training.steps}: loss"
                    f" {statistics.fmean(losses):.3f} over {len(losses)} steps, "
                    f" {statistics.harmonic_mean(speeds):,.0f} tokens/s",
                    highlight=False,
                )
                losses.clear()
                speeds.clear()
    console.print(f"wrote {command.output}", highlight=False)


def _trained(command: Train | Distill, recipe: Recipe) -> Iterator[Progress]:
    if isinstance(command, Train):
        return train(recipe, command.output)
    if command.kind:
        return train_heads(command.kind, recipe, command.target, command.output)
    return distill(recipe, command.target, command.output)
