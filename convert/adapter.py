"""LoRA adapters in PEFT's format, merged into a checkpoint's tensors while they are read."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import has_file, read_json
from stree_jax.checks import require
from stree_jax.convert.fields import Fields
from stree_jax.convert.files import open_tensors
from stree_jax.messages import shown

ADAPTER = "adapter_config.json"

_MAX_PATTERN = 200  # letters
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MERGE = "merge it with peft, merge_and_unload(), and load what save_pretrained then writes"
# Fields that must say nothing: each changes the function, or which weights it is added to.
_OFF = (
    *("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "layer_replication"),
    *("target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)
# What the matrices began with. By the other ways, such as "pissa", the base changed too.
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_IGNORED = {
    "the names of its tensors say it": (
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "ensure_weight_tying"),
    ),
    "of its training": (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "megatron_config", "megatron_core", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size"),
    ),
}
_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.default)(?=\.\w+$)")
# What a text model's names begin with, in files, in memory and inside of wrappers.
_OUTER = re.compile(r"^(model\.|language_model\.|backbone\.)+")


class Adapted(NamedTuple):
    """A checkpoint's tensors with an adapter's merged into them."""

    tensors: dict[str, Tensor]  # changed ones are read in float32
    changed: set[str]
    about: str  # what the adapter is
    notes: list[str]  # ignored fields, with reasons


class _Settings(NamedTuple):
    """Ranks and scales of an adapter's matrices by module."""

    rank: Callable[[str], int]
    alpha: Callable[[str], float]
    by_root: bool  # rank-stabilised: divided by the root of the rank


class _Change(NamedTuple):
    """An adapter's tensors for one: "A" and "B", those of an embedding, or "", all of it."""

    base: Tensor
    parts: dict[str, Tensor]
    rank: int = 0
    scale: float = 0.0


def adapted(
    tensors: Mapping[str, Tensor], path: Path, ignore: dict[str, bool] | None = None
) -> Adapted:
    """Merges a LoRA adapter: a matrix W becomes W + alpha / r B A.

    The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Its names may be those
    of the text model or of a wrapper around it. Full weights (`modules_to_save`) replace the
    checkpoint's. `ignore` are names of unknown fields, see `Fields`. Reads no weights;
    ValueError: it is no LoRA adapter, computes something else, or does not fit.
    """
    if not has_file(path / ADAPTER):
        raise ValueError(f"{path} is not an adapter (PEFT): it has no {ADAPTER}")
    fields = Fields(path / ADAPTER, read_json(path / ADAPTER), asked=ignore)
    base, settings = fields.values.get("base_model_name_or_path"), _settings(fields)
    notes = fields.finish()
    file, adapter = open_tensors(path, _WEIGHTS)
    try:
        changes = _changes(adapter, tensors, settings)
    except ValueError as error:
        raise ValueError(f"{path / file}: {error}") from None
    merged = {
        name: Tensor(change.base.shape, change.base.dtype, functools.partial(_merge, change, file))
        for name, change in changes.items()
    }
    ranks = sorted({change.rank for change in changes.values() if change.rank})
    of_rank = f" of rank {' to '.join(map(str, {ranks[0]: 0, ranks[-1]: 0}))}" if ranks else ""
    return Adapted(
        {**tensors, **merged},
        {*merged},
        f"LoRA{of_rank}, {len(merged)} tensors" + (f"; made for {shown(base)}" if base else ""),
        notes,
    )


def _settings(fields: Fields) -> _Settings:
    kind = fields.take("peft_type")
    fields.check(kind == "LORA", f"peft_type = {kind!r:.80}, only 'LORA' can be merged here")
    start, bias = fields.take("init_lora_weights", True), fields.take("bias", "none")
    fields.check(
        start in _STARTS, f"init_lora_weights = {start!r:.80} changed the model too: {_MERGE}"
    )
    fields.check(bias == "none", f"bias = {bias!r:.80} is not supported, only 'none': {_MERGE}")
    fields.null(*_OFF, "rank_pattern", "alpha_pattern")
    for name in _OFF:
        value = fields.take(name, None)
        fields.check(not value, f"{name} = {value!r:.80} is not supported: {_MERGE}")
    for reason, names in _IGNORED.items():
        fields.ignore(reason, *names)
    return _Settings(
        _by_module(fields, "rank_pattern", fields.integer("r"), Fields.integer),
        _by_module(fields, "alpha_pattern", fields.number("lora_alpha"), Fields.number),
        fields.flag("use_rslora", False),
    )


def _by_module(
    fields: Fields, name: str, default: Any, take: Callable[[Fields, str], Any]
) -> Callable[[str], Any]:
    """The value for a module: of the first pattern with which its name ends.

    PEFT's patterns are regular expressions, and those of others could be slow. In use are names.
    """
    table = fields.table(name)
    ends = {}
    for pattern in table.values:
        plain = pattern.replace("\\.", ".")
        fields.check(
            re.fullmatch(rf"\^?[\w.-]{{1,{_MAX_PATTERN}}}", plain) is not None,
            f"{name} has {pattern!r:.80}; only names of modules are read, no regular expressions:"
            f" {_MERGE}",
        )
        end = f"^.{plain[1:]}" if plain[0] == "^" else f".{plain}"
        ends[end] = take(table, pattern)
    order = {end: i for i, end in enumerate(ends)}

    def value(module: str) -> Any:
        last = f"^.{module}"[-_MAX_PATTERN - 2 :]  # as far as a pattern reaches
        matches = [last[at:] for at in range(len(last)) if last[at:] in ends]
        return ends[min(matches, key=order.__getitem__)] if matches else default

    return value


def _changes(
    adapter: Mapping[str, Tensor], tensors: Mapping[str, Tensor], settings: _Settings
) -> dict[str, _Change]:
    """The changes of an adapter's tensors by the names of a checkpoint's."""
    names = {_OUTER.sub("", name): name for name in tensors} | {name: name for name in tensors}
    changes: dict[str, _Change] = {}
    for key, tensor in adapter.items():
        place = key.removeprefix("base_model.model.")
        lora = _LORA.fullmatch(place)
        name = f"{lora[1]}.weight" if lora else _WRAPPED.sub("", place)
        target = names.get(name, names.get(_OUTER.sub("", name)))
        if target is None:
            raise ValueError(
                f"{key!r:.120} changes {name!r:.120}, which is not in the checkpoint of the model"
            )
        change = changes.setdefault(target, _Change(tensors[target], {}))
        part = f"{lora[2] or ''}{lora[3]}" if lora else ""
        require(part not in change.parts, f"{key!r:.120} changes {target!r:.120} again")
        require(tensor.dtype.kind in "fV", f"{key!r:.120} holds {tensor.dtype}, no real numbers")
        change.parts[part] = tensor
        if lora:
            rank, alpha = settings.rank(lora[1]), settings.alpha(lora[1])
            scale = alpha / (rank**0.5 if settings.by_root else rank)
            changes[target] = change._replace(rank=rank, scale=scale)
    for target, change in changes.items():
        try:
            _check_shapes(change)
        except ValueError as error:
            raise ValueError(f"{target!r:.120} {error}") from None
    return changes


def _check_shapes(change: _Change) -> None:
    """Refuses a tensor of another shape, and a pair that is none of a matrix."""
    shape, rank = change.base.shape, change.rank
    parts = {part: tensor.shape for part, tensor in change.parts.items()}
    whole = parts.pop("", shape)
    require(whole == shape, f"has shape {whole!s:.80} here, in the checkpoint {shape!s:.80}")
    if not parts:
        return
    require(
        {*parts} in ({"A", "B"}, {"embedding_A", "embedding_B"}),
        f"has only lora_{' and lora_'.join(sorted(parts))} here, of a pair A and B",
    )
    require(
        len(shape) == 2, f"has shape {shape!s:.80}, and only matrices can be changed here: {_MERGE}"
    )
    sides = shape if "A" in parts else shape[::-1]
    a, b = (parts[part] for part in sorted(parts))
    require(
        (b, a) == ((sides[0], rank), (rank, sides[1])),
        f"{shape} has A {a!s:.80} and B {b!s:.80} here, which do not fit with rank {rank}",
    )


def _merge(change: _Change, file: str) -> np.ndarray:
    """The changed tensor, in float32."""
    arrays = {part: tensor.read().astype(np.float32) for part, tensor in change.parts.items()}
    for values in arrays.values():
        require(bool(np.isfinite(values).all()), f"{file} holds NaN or infinity for it")
    weight = arrays.pop("") if "" in arrays else change.base.read().astype(np.float32)
    if not arrays:
        return weight
    a, b = (arrays[part] for part in sorted(arrays))
    delta = np.float32(change.scale) * (b @ a)
    return weight + (delta if "A" in arrays else delta.T)
