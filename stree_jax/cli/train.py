"""`stree-jax train`, `distill`, `medusa` and `train-mtp`: the training loop with a progress bar."""

import importlib
import shlex
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.training import Recipe, distill, train


def run_training(
    console: Console,
    recipe_path: Path,
    output: Path,
    target: Path | None,
    *,
    heads: str | None = None,
) -> None:
    """Trains, distills a target, or trains heads for one, with a progress bar.

    `heads` is None or the name of an extension, "medusa" or "mtp".

    Raises:
        ValueError: the recipe, the target or the output is invalid.
    """
    recipe = Recipe.load(recipe_path)
    enable_compilation_cache()
    command = shlex.join(["stree-jax", *sys.argv[1:]])
    if target is None:
        reports = train(recipe, output, command=command)
    elif heads is not None:
        module = importlib.import_module(f"stree_jax.extensions.{heads}.training")
        train_heads = getattr(module, f"train_{heads}")
        reports = train_heads(recipe, target, output, command=command)
    else:
        reports = distill(recipe, target, output, command=command)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[report]}"),
        console=console,
    ) as progress:
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
    console.print(f"wrote {output}", highlight=False)
