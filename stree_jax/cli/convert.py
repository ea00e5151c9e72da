"""`stree-jax convert` and `stree-jax inspect`."""

from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stree_jax.checkpoint import load_config, stored_dtype
from stree_jax.config import ModelConfig
from stree_jax.convert import convert, find, is_native, open_checkpoint


def run_convert(
    console: Console, source: str, destination: Path, *, dtype: str | None, to: str
) -> None:
    """Converts with a progress bar, then says what was converted and what was left out.

    Raises:
        ValueError: as `stree_jax.convert.convert`.
    """
    with Progress(
        TextColumn("reading weights"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)
        convert(
            source,
            destination,
            dtype=dtype,
            to=to,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(_table(find(source)))
    console.print(f"wrote {destination} ({to})", markup=False, soft_wrap=True)


def run_inspect(console: Console, path: str) -> None:
    """Says what a checkpoint is.

    Raises:
        ValueError: it cannot be converted, and why.
    """
    console.print(_table(find(path)))
    console.print("can be loaded and converted")


def _table(path: Path) -> Table:
    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    ignored: list[str] = []
    if is_native(path):
        config, dtype = load_config(path), stored_dtype(path)
        table.add_row("family", "stree-jax (native)")
    else:
        checkpoint = open_checkpoint(path)
        config, dtype, ignored = checkpoint.description.config, checkpoint.dtype, checkpoint.ignored
        table.add_row("family", checkpoint.description.family)
        table.add_row("weights", checkpoint.file)
        table.add_row("parameters", f"{checkpoint.num_parameters:,}")
    for name, value in _facts(config, dtype):
        table.add_row(name, value)
    for line in ignored:
        table.add_row("left out", line)
    return table


def _facts(config: ModelConfig, dtype: jnp.dtype) -> list[tuple[str, str]]:
    mixer = config.mamba2
    assert mixer is not None
    kinds = ", ".join(f"{config.layers.count(kind)} {kind}" for kind in sorted(set(config.layers)))
    padded = (
        ""
        if config.num_embeddings == config.vocab_size
        else f", padded to {config.num_embeddings:,}"
    )
    return [
        ("layers", kinds),
        ("width", f"{config.d_model:,}"),
        (
            "mixer",
            f"{mixer.num_heads} heads of {mixer.head_dim}, state {mixer.state_size},"
            f" {mixer.num_groups} groups, convolution {mixer.conv_width}",
        ),
        ("vocabulary", f"{config.vocab_size:,}{padded}"),
        ("head", "tied to the embedding" if config.tie_embeddings else "its own"),
        ("stored as", dtype.name),
    ]
