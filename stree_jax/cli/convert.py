"""`stree-jax convert` and `stree-jax inspect`."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from pallas_kernels import dispatch
from stree_jax import LayerConfig
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.checkpoint.files import has_file
from stree_jax.checkpoint.load import matrix_dtype, open_native, quantized_in
from stree_jax.cli.options import Convert, Inspect
from stree_jax.convert import convert, find, is_foreign, open_checkpoint
from stree_jax.heads import FOLDER, ROOMS, abstract_head, open_head
from stree_jax.measuring.report import progress_bar
from stree_jax.models.lm import HybridLM


def run_convert(command: Convert) -> None:
    """Converts a checkpoint with a progress bar, then prints what was converted and ignored."""
    console, path = Console(highlight=False), find(command.source)  # may download
    adapter = _adapter_of(command.adapter)
    with progress_bar(console) as show:
        left_out = convert(
            path,
            command.destination,
            dtype=command.dtype,
            to=command.to,
            quirks=command.quirk,
            ignore=command.ignore_field,
            quantize=command.quantize,
            keep=command.keep,
            adapter=adapter,
            progress=functools.partial(show, "reading bytes of weights"),
        )
    console.print(_table(path, command.ignore_field, adapter))
    if left_out is not None:
        console.print(
            f"without the {ROOMS[FOLDER].title} head: {left_out}", markup=False, soft_wrap=True
        )
    console.print(f"wrote {command.destination} ({command.to})", markup=False, soft_wrap=True)


def run_inspect(command: Inspect, console: Console | None = None) -> None:
    """Prints a summary of a checkpoint and, if asked, the weight that each tensor becomes."""
    console = console or Console(highlight=False)
    path, ignore, adapter = find(command.path), command.ignore_field, _adapter_of(command.adapter)
    console.print(_table(path, ignore, adapter))
    if command.tensors:
        for line in _tensors(path, ignore, adapter):
            console.print(line, markup=False, soft_wrap=True)
    console.print("names, shapes and files fit: can be loaded and converted")
    console.print(f"runs as {dispatch.explain()}", markup=False, soft_wrap=True)


def _adapter_of(adapter: str | None) -> Path | None:
    return None if adapter is None else find(adapter, adapter=True)


def _table(path: Path, ignore: Sequence[str], adapter: Path | None) -> Table:
    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, fact in _facts(path, ignore, adapter):
        table.add_row(name, fact)
    return table


def _facts(path: Path, ignore: Sequence[str], adapter: Path | None) -> Iterator[tuple[str, str]]:
    """What there is to know about a checkpoint, by name."""
    ignored: list[str] = []
    assumed: Sequence[str] = ()
    in_8_bits = ""
    head: Any
    if not is_foreign(path, ignore=ignore, adapter=adapter):
        config, stored = open_native(path)
        dtype, count = matrix_dtype(stored.values()), len(quantized_in(stored))
        in_8_bits = f", {count} matrices in 8 bits" if count else ""
        yield "family", "stree-jax (native)"
        has_sums = has_file(path / CHECKSUMS)
        yield "checksums", "yes" if has_sums else "no, it is from an older version"
        inside = path / FOLDER
        head = open_head(FOLDER, inside)[1] if inside.is_dir() else None
    else:
        checkpoint = open_checkpoint(path, ignore=ignore, adapter=adapter)
        config, dtype, ignored = checkpoint.description.config, checkpoint.dtype, checkpoint.ignored
        assumed = checkpoint.assumed
        yield "family", checkpoint.description.family
        yield "weights", checkpoint.file
        if checkpoint.quantised:
            yield "quantised", f"{checkpoint.quantised}, whose values are computed in float32"
        if checkpoint.adapter is not None:
            yield "adapter", checkpoint.adapter
        mtp = checkpoint.description.mtp
        head = None if mtp is None else mtp.config or mtp.problem
    yield "parameters", f"{_size(HybridLM.abstract(config)[1]):,}"
    kinds = sorted(set(config.kinds))
    yield "layers", ", ".join(f"{config.kinds.count(kind)} {kind}" for kind in kinds)
    yield "width", f"{config.d_model:,}"
    layers = config.distinct_layers
    parts = (part for layer in layers for part in (layer, *layer.parts.values()))
    for part in dict.fromkeys(parts):
        yield part.kind, _layer_fact(part)
    is_padded = config.num_embeddings != config.vocab_size
    padded = f", padded to {config.num_embeddings:,}" if is_padded else ""
    yield "vocabulary", f"{config.vocab_size:,}{padded}"
    yield "head", "tied to the embedding" if config.tie_embeddings else "untied"
    yield "stored as", dtype.name + in_8_bits
    if head is not None:
        yield f"{FOLDER.upper()} head", _head_fact(head)
    for line in assumed:
        yield "assumed", line
    for line in ignored:
        yield "ignored", line


def _layer_fact(layer: LayerConfig) -> str:
    """The fields of a layer's config, but for defaults and for parts that have a line."""
    values = {field: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return ", ".join(
        f"{field.name} {value}"
        for field, value in values.items()
        if value != field.default and not isinstance(value, LayerConfig)
    )


def _head_fact(head: Any) -> str:
    """A line about the head of a checkpoint, a config or why it cannot be read."""
    title = ROOMS[FOLDER].title
    if isinstance(head, str):
        return f"{title}, which cannot be used: {head}"
    size, kinds = _size(nnx.state(abstract_head(FOLDER, head))), head.feed_forward.kind
    return f"{title} (attention, {kinds}), {size:,} parameters; generate --{FOLDER} drafts with it"


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _tensors(path: Path, ignore: Sequence[str], adapter: Path | None) -> Iterator[str]:
    """One line per tensor: name, shape, dtype, and the weight that it becomes."""
    if not is_foreign(path, ignore=ignore):
        for name, array in open_native(path)[1].items():
            yield f"{name} {array.shape} {array.dtype.name}"
        return
    checkpoint = open_checkpoint(path, ignore=ignore, adapter=adapter)
    for rule in checkpoint.rules:
        for name in rule.sources:
            tensor = checkpoint.tensors[name]
            becomes = f"{rule.target} ({rule.transform.name})"
            yield f"{name} {tensor.shape} {tensor.dtype.name} -> {becomes}"
