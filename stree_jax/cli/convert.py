"""`stree-jax convert` and `stree-jax inspect`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pallas_kernels import dispatch
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.checkpoint.files import has_file
from stree_jax.checkpoint.load import matrix_dtype, open_native
from stree_jax.config import ModelConfig
from stree_jax.convert import convert, find, is_foreign, open_checkpoint
from stree_jax.heads import FOLDER, abstract_head, head_config
from stree_jax.models.lm import HybridLM
from stree_jax.models.mtp import MtpConfig


def run_convert(
    console: Console,
    source: str,
    destination: Path,
    *,
    dtype: str | None,
    to: str,
    quirks: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> None:
    """Converts a checkpoint with a progress bar, then prints what was converted and ignored.

    Raises:
        ValueError: as `stree_jax.convert.convert`.
    """
    path = find(source)  # once, because it may download
    with Progress(
        TextColumn("reading weights"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)
        left_out = convert(
            path,
            destination,
            dtype=dtype,
            to=to,
            quirks=quirks,
            ignore=ignore,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(_table(path, ignore))
    if left_out is not None:
        console.print(
            f"without the multi-token prediction head: {left_out}", markup=False, soft_wrap=True
        )
    console.print(f"wrote {destination} ({to})", markup=False, soft_wrap=True)


def run_inspect(console: Console, path: str, *, tensors: bool, ignore: Sequence[str] = ()) -> None:
    """Prints a summary of a checkpoint and, with `tensors`, the weight that each tensor becomes.

    Raises:
        ValueError: the checkpoint cannot be converted.
    """
    directory = find(path)
    console.print(_table(directory, ignore))
    if tensors:
        for line in _tensors(directory, ignore):
            console.print(line, markup=False, soft_wrap=True)
    console.print("names, shapes and files fit: can be loaded and converted")
    console.print(f"runs as {dispatch.explain()}", markup=False, soft_wrap=True)


def _table(path: Path, ignore: Sequence[str]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    ignored: list[str] = []
    head: MtpConfig | str | None
    if not is_foreign(path, ignore=ignore):
        config, stored = open_native(path)
        dtype = matrix_dtype(stored.values())
        table.add_row("family", "stree-jax (native)")
        table.add_row(
            "checksums", "yes" if has_file(path / CHECKSUMS) else "no, it is from an older version"
        )
        inside = path / FOLDER
        head = head_config(inside) if inside.is_dir() else None
    else:
        checkpoint = open_checkpoint(path, ignore=ignore)
        config, dtype, ignored = checkpoint.description.config, checkpoint.dtype, checkpoint.ignored
        table.add_row("family", checkpoint.description.family)
        table.add_row("weights", checkpoint.file)
        found = checkpoint.description.mtp
        head = None if found is None else found.config or found.problem
    for name, value in _facts(config, dtype):
        table.add_row(name, value)
    if head is not None:
        table.add_row("MTP head", _head_fact(head))
    for line in ignored:
        table.add_row("ignored", line)
    return table


def _tensors(path: Path, ignore: Sequence[str]) -> Iterator[str]:
    """One line per tensor: name, shape, dtype, and the weight that it becomes."""
    if not is_foreign(path, ignore=ignore):
        for name, array in open_native(path)[1].items():
            yield f"{name} {array.shape} {array.dtype.name}"
        return
    checkpoint = open_checkpoint(path, ignore=ignore)
    for rule in checkpoint.rules:
        for name in rule.sources:
            tensor = checkpoint.tensors[name]
            yield (
                f"{name} {tensor.shape} {tensor.dtype.name} -> {rule.target}"
                f" ({rule.transform.name})"
            )


def _different_parts(config: ModelConfig) -> list[tuple[str, Any]]:
    """The different configs of Mamba-2, attention and experts, in the order of the layers."""
    found = [part for layer in config.distinct_layers for part in layer.own_parts().items()]
    kinds = ("mamba2", "attention", "moe")
    return [part for part in dict.fromkeys(found) if part[0] in kinds and part[1] is not None]


def _fact(name: str, part: Any) -> tuple[str, str]:
    """A line about the config of a mixer."""
    if name == "mamba2":
        return (
            "mixer",
            f"{part.num_heads} heads of {part.head_dim}, state size {part.state_size},"
            f" {part.num_groups} groups, convolution width {part.conv_width}",
        )
    if name == "attention":
        rope = f"RoPE on {part.rotary_dim} dimensions" if part.rotary_dim else "no RoPE"
        window = "" if part.window is None else f", window of {part.window}"
        heads = f"{part.num_heads} heads of {part.head_dim}, {part.num_kv_heads} KV heads"
        return "attention", f"{heads}, {rope}{window}"
    experts = f"top {part.num_active} of {part.num_experts}, hidden size {part.hidden_size:,}"
    return "experts", experts


def _head_fact(head: MtpConfig | str) -> str:
    """A line about a multi-token prediction head, or why it cannot be read."""
    if isinstance(head, str):
        return f"multi-token prediction, which cannot be used: {head}"
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_head(head))))
    kinds = f"attention, {head.feed_forward.kind}"
    return f"multi-token prediction ({kinds}), {size:,} parameters; generate --mtp drafts with it"


def _facts(config: ModelConfig, dtype: jnp.dtype) -> list[tuple[str, str]]:
    size = sum(leaf.size for leaf in jax.tree.leaves(HybridLM.abstract(config)[1]))
    kinds = ", ".join(f"{config.kinds.count(kind)} {kind}" for kind in sorted(set(config.kinds)))
    padded = (
        ""
        if config.num_embeddings == config.vocab_size
        else f", padded to {config.num_embeddings:,}"
    )
    parts = [_fact(name, part) for name, part in _different_parts(config)]
    return [
        ("parameters", f"{size:,}"),
        ("layers", kinds),
        ("width", f"{config.d_model:,}"),
        *parts,
        ("vocabulary", f"{config.vocab_size:,}{padded}"),
        ("head", "tied to the embedding" if config.tie_embeddings else "untied"),
        ("stored as", dtype.name),
    ]
