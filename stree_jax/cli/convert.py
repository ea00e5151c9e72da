"""`stree-jax convert` and `stree-jax inspect`."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from pallas_kernels import dispatch
from pallas_kernels.matmul import KINDS
from stree_jax import LayerConfig
from stree_jax.checkpoint.load import quantized_in
from stree_jax.cli.options import Convert, Inspect
from stree_jax.convert import Checkpoint, HeadDescription, convert, find, open_checkpoint
from stree_jax.heads import FOLDER, HEADS, abstract_head
from stree_jax.measuring.report import progress_bar
from stree_jax.models.lm import HybridLM


def run_convert(command: Convert) -> None:
    """Converts a checkpoint with a progress bar, then prints what was converted and ignored."""
    console, path = Console(highlight=False), find(command.source)  # may download
    adapter = None if command.adapter is None else find(command.adapter, adapter=True)
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
    console.print(_table(open_checkpoint(path, ignore=command.ignore_field, adapter=adapter)))
    if left_out is not None:
        console.print(
            f"without the {HEADS[FOLDER].title} head: {left_out}", markup=False, soft_wrap=True
        )
    console.print(f"wrote {command.destination} ({command.to})", markup=False, soft_wrap=True)


def run_inspect(command: Inspect, console: Console | None = None) -> None:
    """Prints a summary of a checkpoint and, if asked, the weight that each tensor becomes."""
    console = console or Console(highlight=False)
    checkpoint = open_checkpoint(command.path, ignore=command.ignore_field, adapter=command.adapter)
    console.print(_table(checkpoint))
    for line in _tensors(checkpoint) if command.tensors else ():
        console.print(line, markup=False, soft_wrap=True)
    console.print("names, shapes and files fit: can be loaded and converted")
    console.print(f"runs as {dispatch.explain()}", markup=False, soft_wrap=True)


def _table(checkpoint: Checkpoint) -> Table:
    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, fact in _facts(checkpoint):
        table.add_row(name, fact)
    return table


def _facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """What there is to know about a checkpoint, by name."""
    config, head = checkpoint.config, checkpoint.head
    yield "family", checkpoint.description.family
    yield from checkpoint.facts()
    yield "parameters", f"{_size(HybridLM.abstract(config)[1]):,}"
    kinds = sorted(set(config.kinds))
    yield "layers", ", ".join(f"{config.kinds.count(kind)} {kind}" for kind in kinds)
    yield "width", f"{config.d_model:,}"
    layers = [layer for whole in config.distinct_layers for layer in (whole, *whole.parts.values())]
    for layer in dict.fromkeys(layers):
        yield layer.kind, _layer_fact(layer)
    is_padded = config.num_embeddings != config.vocab_size
    padded = f", padded to {config.num_embeddings:,}" if is_padded else ""
    yield "vocabulary", f"{config.vocab_size:,}{padded}"
    yield "head", "tied to the embedding" if config.tie_embeddings else "untied"
    stored = Counter(quantized_in(checkpoint.tensors).values())
    few = [f"{stored[kind]} matrices in {kind[3:]} bits" for kind in KINDS if stored[kind]]
    yield "stored as", ", ".join([checkpoint.dtype.name, *few])
    if not few:
        yield "in int4", _four_bits(checkpoint)
    if head is not None:
        yield f"{FOLDER.upper()} head", _head_fact(head)
    for line in checkpoint.assumed:
        yield "assumed", line
    for line in checkpoint.ignored:
        yield "ignored", line


def _four_bits(checkpoint: Checkpoint) -> str:
    """What `quantize="int4"` makes of its matrices."""
    kinds = checkpoint.kinds("int4")
    eight = [name for name, kind in kinds.items() if kind == "int8"]
    as_stored = [rule for rule in checkpoint.rules if kinds.get(rule.target) == "int4"]
    count = sum(map(checkpoint.has_four_bits, as_stored))
    of_file = f", {count} of them as in the file" if count else ""
    more = f" and {len(eight) - 3} others" if len(eight) > 3 else ""
    return f"{len(as_stored)} matrices{of_file}; in 8 bits {', '.join(eight[:3])}{more}"


def _layer_fact(layer: LayerConfig) -> str:
    """The fields of a layer's config, but for defaults and for parts that have a line."""
    values = {field: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return ", ".join(
        f"{field.name} {value}"
        for field, value in values.items()
        if value != field.default and not isinstance(value, LayerConfig)
    )


def _head_fact(head: HeadDescription) -> str:
    """A line about the head of a checkpoint."""
    title, config = HEADS[FOLDER].title, head.config
    if config is None:
        return f"{title}, which cannot be used: {head.problem}"
    size, kinds = _size(nnx.state(abstract_head(FOLDER, config))), config.feed_forward.kind
    return f"{title} (attention, {kinds}), {size:,} parameters; generate --{FOLDER} drafts with it"


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _tensors(checkpoint: Checkpoint) -> Iterator[str]:
    """One line per tensor: name, shape, dtype, and the weight that it becomes."""
    for rule in checkpoint.rules:
        for name in rule.sources:
            tensor = checkpoint.tensors[name]
            becomes = f" -> {rule.target} ({rule.transform.name})" if name != rule.target else ""
            yield f"{name} {tensor.shape} {tensor.dtype.name}{becomes}"
