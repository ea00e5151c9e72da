"""Opening a checkpoint, and reading it into a model or a head, one weight at a time."""

import operator
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.matmul import GROUP, QuantizedMatrix
from stree_jax.checkpoint.arrays import CHECKSUMS, Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.checkpoint.load import (
    Place,
    matrix_dtype,
    native_header,
    open_native,
    placer,
    quantized_in,
    read_values,
)
from stree_jax.checks import check_names, require
from stree_jax.convert.adapter import Adapted, adapted
from stree_jax.convert.description import Description, HeadDescription
from stree_jax.convert.families import describe, layout, text_tables, wrapped
from stree_jax.convert.fields import Fields
from stree_jax.convert.files import open_tensors
from stree_jax.convert.finding import find
from stree_jax.convert.gguf import open_gguf
from stree_jax.convert.gguf_file import gguf_file
from stree_jax.convert.quantised import Plain, dequantised, read_scheme, without_scheme
from stree_jax.convert.rules import Rule, check_coverage
from stree_jax.heads import (
    FOLDER,
    HEADS,
    abstract_head,
    check_fits,
    load_native_head,
    open_head,
    part_of,
)
from stree_jax.mesh.partition import ONE_DEVICE, Partition
from stree_jax.messages import first_line
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM
from stree_jax.models.matrices import to_quantize
from stree_jax.names import flatten, unflatten

# A callback with the bytes read so far and the total.
ProgressCallback = Callable[[int, int], None]
# What may be read of a tensor.
WHOLE, FOUR_BITS = operator.methodcaller("read"), operator.methodcaller("four_bits")


_LISTED = 8  # tensors that are ignored for one reason; of more, their number is said


class Checkpoint(NamedTuple):
    """A checkpoint whose tensors match its config. Weights have not been read."""

    path: Path
    file: str  # name of the weights, of their index or of their folder
    description: Any  # a `Description`; of a head alone None
    tensors: dict[str, Tensor]
    rules: list[Rule]
    quantised: str = ""  # how many weights are, and how
    adapter: str | None = None  # what was merged into the tensors
    assumed: Sequence[str] = ()  # what no file says

    @property
    def sources(self) -> list[str]:
        """Names of the tensors that become weights."""
        return [name for rule in self.rules for name in rule.sources]

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16 if all matrices are bfloat16, else float32, which is lossless."""
        return matrix_dtype(self.tensors[name] for name in self.sources)

    @property
    def ignored(self) -> list[str]:
        """Ignored tensors and config fields, with reasons."""
        by_reason: dict[str, list[str]] = {}
        for entry in self.description.ignored:
            if entry.source in self.tensors:
                by_reason.setdefault(entry.reason, []).append(entry.source)
        tensors = []
        for reason, names in by_reason.items():
            few = names if len(names) <= _LISTED else [f"{names[0]} and {len(names) - 1} others"]
            tensors += [f"{name}: {reason}" for name in few]
        return tensors + self.description.notes

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.description.config

    @property
    def head(self) -> HeadDescription | None:
        """The multi-token prediction head beside the model; None: there is none."""
        return self.description.mtp

    def kinds(self, quantize: str, keep: Collection[str] = ()) -> dict[str, str]:
        """The kinds of the matrices of its model by name, see `from_pretrained`.

        What the file has in fewer than 8 bits and in other groups than "int4" becomes "int8".
        """
        kinds = to_quantize(nnx.merge(*HybridLM.abstract(self.config)), quantize, keep)
        for rule in self.rules:
            is_few = any(self.tensors[name].bits < 8 for name in rule.sources)
            if is_few and rule.target in kinds and not self.has_four_bits(rule):
                kinds[rule.target] = "int8"
        return kinds

    def has_four_bits(self, rule: Rule) -> bool:
        """Whether a matrix in "int4" has the numbers of the file."""
        readers = [self.tensors[name].four_bits for name in rule.sources]
        return rule.transform.keeps_groups and None not in readers

    def load_head(self, target: HybridLM) -> Any:
        """Reads this head for its model, in the model's dtype.

        Raises:
            ValueError: it cannot be read, or it is for another model.
        """
        return part_of(FOLDER, "conversion").of_checkpoint(self, target)

    def values(self, rule: Rule, wanted: Any) -> Any:
        """The values of an abstract weight by its rule, in the file's 4 bits if both have them."""
        in_four_bits = isinstance(wanted, QuantizedMatrix) and wanted.kind == "int4"
        if in_four_bits and self.has_four_bits(rule):
            tensors = [read_tensor(self, name, FOUR_BITS) for name in rule.sources]
            values, scales = (rule.transform.apply(*part) for part in zip(*tensors, strict=True))
            of_groups = np.moveaxis(np.moveaxis(scales, wanted.axis, 0)[::GROUP], 0, wanted.axis)
            return QuantizedMatrix(values.astype(jnp.int4), of_groups, wanted.axis)
        return rule.transform.apply(*(read_tensor(self, name) for name in rule.sources))

    def facts(self) -> Iterator[tuple[str, str]]:
        """What a user may want to know about its files, by name."""
        yield "weights", self.file
        if self.quantised:
            yield "quantised", f"{self.quantised}, whose values are computed in float32"
        if self.adapter is not None:
            yield "adapter", self.adapter


class NativeCheckpoint(Checkpoint):
    """A checkpoint of this library: tensors have the names of weights, and a head has a folder."""

    @property
    def head(self) -> HeadDescription | None:
        folder = self.path / FOLDER
        return HeadDescription(open_head(FOLDER, folder)[1], []) if folder.is_dir() else None

    def load_head(self, target: HybridLM) -> Any:
        return load_native_head(FOLDER, self.path / FOLDER, target)

    def values(self, rule: Rule, wanted: Any) -> Any:
        return read_values(self.path, rule.target, self.tensors[rule.target], wanted)

    def facts(self) -> Iterator[tuple[str, str]]:
        has_sums = has_file(self.path / CHECKSUMS)
        yield "checksums", "yes" if has_sums else "no, it is from an older version"


def is_foreign(
    path: Path,
    quirks: Collection[str] = (),
    ignore: Collection[str] | Any = (),
    adapter: Path | None = None,
) -> bool:
    """True if a checkpoint is another program's, for `open_checkpoint` with these options.

    Raises:
        ValueError: it is native, which these options are not for.
    """
    return _native_header(path, quirks, ignore, adapter) is None


def _native_header(
    path: Path, quirks: Collection[str], ignore: Collection[str] | Any, adapter: Path | None
) -> dict[str, Any] | None:
    names_of = {
        "quirks": check_names("quirks", quirks),
        "ignored fields": check_names("ignore", ignore),
    }
    header = native_header(path)
    if header is None:
        return None
    for what, names in names_of.items():
        if names:
            raise ValueError(f"{path} is native; {what} are for checkpoints of other programs")
    if adapter is not None:
        raise ValueError(
            f"{path} is native, and {adapter} has the names of other programs: merge it while"
            " converting their checkpoint, stree-jax convert SRC DST --adapter ADAPTER"
        )
    return header


def open_checkpoint(
    path: str | os.PathLike[str],
    quirks: Collection[str] = (),
    ignore: Collection[str] | Any = (),
    adapter: str | os.PathLike[str] | Any = None,
) -> Checkpoint:
    """Finds and recognises a checkpoint, and checks all names and shapes. Reads no weights.

    Args:
        path: a directory in any format that `from_pretrained` reads, a GGUF file, or the name of a
            model on the hub.
        quirks: names from `families.QUIRKS` to reproduce.
        ignore: names of unknown config fields to ignore.
        adapter: directory or name of a LoRA adapter to merge into the tensors, see
            `adapter.adapted`.

    Raises:
        ValueError: the checkpoint or the adapter is missing, damaged or unsupported, its tensors do
            not match its config or the adapter, or no such field is left over.
    """
    location = find(path)
    changes = None if adapter is None else find(adapter, adapter=True)
    header = _native_header(location, quirks, ignore, changes)
    if header is not None:
        config, arrays = open_native(location, header)
        rules = [Rule(name, name) for name in arrays]
        description = Description("stree-jax (native)", config, rules, [], [])
        return NativeCheckpoint(location, "params", description, arrays, rules)
    file, values, weights, (tensors, notes, quantised), assumed = _open(location)
    merged, to_ignore = None, dict.fromkeys(ignore, False)
    if changes is not None:
        merged = adapted(tensors, changes, to_ignore)
        tensors, notes = merged.tensors, [*notes, *merged.notes]
    description = describe(file, values, tensors, quirks, to_ignore)
    description = description._replace(notes=[*description.notes, *notes])
    num_layers = len(description.config.layers)
    if num_layers > len(tensors):  # each layer has at least one tensor
        raise ValueError(
            f"{file} says {num_layers} layers, but {weights} has {len(tensors)} tensors"
        )
    _, abstract = HybridLM.abstract(description.config)
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten(abstract).items()}
    try:
        rules = check_coverage(description.rules, description.ignored, tensors, shapes)
    except ValueError as error:
        raise ValueError(f"{location} ({description.family}): {error}") from None
    if merged is not None:
        _check_changes(merged, changes, description, rules)
    about = None if merged is None else merged.about
    return Checkpoint(location, weights, description, tensors, rules, quantised, about, assumed)


def _check_changes(
    merged: Adapted, adapter: Path | None, description: Any, rules: Sequence[Rule]
) -> None:
    """An adapter changes something that is read, and not a head through the embedding."""
    changed = {rule.target for rule in rules if merged.changed.intersection(rule.sources)}
    require(bool(changed), f"{adapter} changes nothing of the text model that is read")
    if "embedding" in changed and description.config.tie_embeddings:
        raise ValueError(
            f"{adapter} changes the embedding, and with it the head that is tied to it: save the"
            " model with tie_word_embeddings = false and merge the adapter into that"
        )


def _open(path: Path) -> tuple[Path, dict[str, Any], str, Plain, list[str]]:
    """The config file and its content, the weights' name, the tensors, and what is assumed."""
    if (gguf := gguf_file(path)) is not None:
        config, values, tensors, quantised, assumed = open_gguf(gguf)
        # The file has numbers of its own, however those of the model are stored.
        values, _ = without_scheme(values, text_tables())
        plain = Plain(wrapped(values, tensors), [], quantised)
        return config, values, gguf.name, plain, assumed
    files = layout(path)
    config = path / files.config
    scheme = read_scheme(config, read_json(config), text_tables())
    file, tensors = open_tensors(path, files.weights)
    return config, scheme.values, file, dequantised(path, scheme, tensors), []


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike | None,
    implementation: str | None = None,
    progress: ProgressCallback = lambda done, total: None,
    partition: Partition = ONE_DEVICE,
    quantize: str | None = None,
    keep: Collection[str] = (),
) -> HybridLM:
    """Reads the weights. Peak memory is the model plus the tensors of about one weight.

    Args:
        checkpoint: a checkpoint from `open_checkpoint`.
        dtype: dtype of the weights, float32 or bfloat16; None: `checkpoint.dtype`.
        implementation: kernel implementation, see `pallas_kernels.dispatch`.
        progress: callback after each weight.
        partition: partition of the model.
        quantize: "int8" or "int4" for matrices in few bits, see `from_pretrained`; None: none.
        keep: names of matrices that stay, see `from_pretrained`.

    Raises:
        ValueError: a weight is not finite, a tied head differs from the embedding, or the model
            does not fit the partition.
    """
    for line in checkpoint.assumed:
        warnings.warn(f"{checkpoint.path}: {line}", stacklevel=3)
    config, kinds = checkpoint.config, quantized_in(checkpoint.tensors)
    if quantize is not None:  # tracing takes time
        wanted_kinds = checkpoint.kinds(quantize, keep)
        if late := sorted(name for name in kinds if kinds[name] != wanted_kinds.get(name)):
            raise ValueError(
                f"{checkpoint.path} has {late[0]} in {kinds[late[0]][3:]} bits already; keep it, or"
                " choose its bits, where they are made"
            )
        kinds = wanted_kinds
    structure, wanted = HybridLM.abstract(
        config,
        dtype=checkpoint.dtype if dtype is None else dtype,
        implementation=implementation,
        partition=partition,
        quantized=kinds,
    )
    place = placer(checkpoint.path, config.cuts(partition.shards), partition)
    targets = flatten(wanted)
    total = sum(_num_bytes(checkpoint.tensors[name]) for name in checkpoint.sources)
    loaded: dict[str, jax.Array] = {}
    done = 0
    for rule in checkpoint.rules:
        loaded[rule.target] = _convert(checkpoint, rule, targets[rule.target], place)
        done += sum(_num_bytes(checkpoint.tensors[name]) for name in rule.sources)
        progress(done, total)
    for entry in checkpoint.description.ignored:
        if entry.is_embedding and entry.source in checkpoint.tensors:
            _check_tied(checkpoint, entry.source, loaded["embedding"])
    return nnx.merge(structure, unflatten(loaded, wanted))


def read_head(
    kind: str,
    path: Path,
    target: HybridLM,
    ignore: Collection[str],
    read: Callable[[Fields, HybridLM, bool], Any],
    rules_of: Callable[[Any], list[Rule]],
    left_out: Collection[str] = (),
    others: Callable[[Checkpoint, Any], dict[str, jax.Array]] = lambda *_: {},
) -> Any:
    """Reads a head that is a checkpoint of its own, in its target's dtype.

    `read` makes its config, told whether it has an embedding, and `rules_of` the rules; tensors
    that begin with one of `left_out` have none, and `others` makes the weights without one.
    """
    file, values, weights, plain, _ = _open(path)
    architectures, head = values.get("architectures"), HEADS[kind]
    named = architectures if isinstance(architectures, list) else []
    if not named or not all(map(head.is_named, named)):
        raise ValueError(
            f"{path} is no {head.title} head: its architectures are {architectures!r:.80}; a head"
            " of a target's own checkpoint is for load_mtp"
        )
    fields = Fields(file, values, asked=dict.fromkeys(check_names("ignore", ignore), False))
    checkpoint = Checkpoint(path, weights, None, plain.tensors, [], plain.quantised)
    config = read(fields, target, "embed_tokens.weight" in checkpoint.tensors)
    fields.finish()
    fields.refuse_asked()
    width, tokens = zip(*((x.d_model, x.vocab_size) for x in (config, target.config)), strict=True)
    what, way_out = f"the head in {path}", "load the target that it was trained for"
    check_fits(what, way_out, width=width, tokens=tokens)
    abstract, computed = abstract_head(kind, config, target), others(checkpoint, config)
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith((*left_out,))
    }
    try:
        rules = head_rules(rules_of(config), tensors, abstract, [*computed])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return load_head_weights(checkpoint._replace(rules=rules), abstract, **computed)


def head_rules(
    rules: Sequence[Rule],
    tensors: Mapping[str, Tensor],
    head: nnx.Module,
    others: Collection[str] = (),
) -> list[Rule]:
    """The rules that apply to a head, see `check_coverage`; its weights `others` have none."""
    weights = flatten(nnx.to_pure_dict(nnx.state(head)))
    shapes = {name: tuple(leaf.shape) for name, leaf in weights.items() if name not in others}
    return check_coverage(rules, [], tensors, shapes)


def load_head_weights(checkpoint: Checkpoint, head: nnx.Module, **others: jax.Array) -> Any:
    """The head with the weights of a checkpoint and `others`, in its own structure and dtypes.

    Raises:
        ValueError: a weight cannot be read or is not finite.
    """
    structure, state = nnx.split(head)
    wanted = nnx.to_pure_dict(state)
    targets, place = flatten(wanted), placer(checkpoint.path, {})
    loaded = {
        rule.target: _convert(checkpoint, rule, targets[rule.target], place)
        for rule in checkpoint.rules
    }
    return nnx.merge(structure, unflatten(loaded | others, wanted))


@np.errstate(all="ignore")  # what is not finite is refused by name
def _convert(checkpoint: Checkpoint, rule: Rule, wanted: Any, place: Place) -> Any:
    values = checkpoint.values(rule, wanted)
    return place(rule.target, values, wanted, " or ".join(rule.sources))


@np.errstate(all="ignore")
def _check_tied(checkpoint: Checkpoint, name: str, embedding: Any) -> None:
    (rule,) = (rule for rule in checkpoint.rules if rule.target == "embedding")
    head, stored = read_tensor(checkpoint, name), checkpoint.values(rule, None)
    blocks = range(0, len(head), 1024)  # to save memory
    if head.shape != stored.shape or not all(
        np.array_equal(*(rows[i : i + 1024].astype(embedding.dtype) for rows in (head, stored)))
        for i in blocks
    ):
        raise ValueError(
            f"{checkpoint.path}: the config ties the head to the embedding, but {name} is different"
        )


def read_tensor(checkpoint: Checkpoint, name: str, read: Callable[[Tensor], Any] = WHOLE) -> Any:
    """What a tensor of a file holds; ValueError: it cannot be read."""
    try:
        return read(checkpoint.tensors[name])
    except Exception as error:  # for example, a file truncated since it was opened
        raise ValueError(f"{checkpoint.path}: cannot read {name}: {first_line(error)}") from error


def _num_bytes(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape)) * tensor.dtype.itemsize
