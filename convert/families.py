"""The table of checkpoint families, and matching a checkpoint to one.

A new family is one module and one entry of `FAMILIES`.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.checkpoint import is_native
from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import folder_of, has_file, read_json
from stree_jax.checks import check_names, require
from stree_jax.convert import (
    bamba,
    granite,
    kimi,
    lfm2,
    mamba_in_llama,
    nemotron_h,
    pure,
    qwen,
    zamba2,
)
from stree_jax.convert.adapter import ADAPTER
from stree_jax.convert.description import Description, Source
from stree_jax.convert.fields import Fields
from stree_jax.convert.quantised import MODELOPT
from stree_jax.convert.rules import Ignored, renamed
from stree_jax.heads import refuse_head
from stree_jax.models.config import ModelConfig

# Deviations of other programs from the published config, reproduced on request.
QUIRKS = {
    "hf_dt_floor": "Nemotron-H and Zamba2: clamp the time step at time_step_min, as transformers'"
    " prefill does",
    "plain_rope": "MambaInLlama: leave out Llama 3's RoPE scaling, as the inference code of the"
    " paper does",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints: recognising, reading and writing it.

    Attributes:
        read: function that describes a checkpoint. Every config field must be used, ignored for a
            stated reason, or refused; see `fields.Fields`.
        write: function from a model and the name of its weights' dtype to config.json; None if
            checkpoints of this family are only read.
        quirk: name in `QUIRKS` that `read` implements; None if there is none.
        recognise: predicate for checkpoints of this family. None for families of transformers,
            whose config.json has the family's name as its `model_type`.
        mark: the feature that `recognise` tests, for messages.
        beside: functions that write further config files, by file name.
        head: the fields that say that a multi-token prediction head is beside the model.
        padded_vocab: whether the config gives the real size of a padded vocabulary. If not, padding
            counts as vocabulary when a model is written.
    """

    read: Callable[[Source], Description]
    write: Callable[[ModelConfig, str], dict[str, Any]] | None = None
    quirk: str | None = None
    recognise: Callable[[Source], bool] | None = None
    mark: str = "model_type"
    beside: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    head: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    padded_vocab: bool = False


_MTP = {"mtp_num_hidden_layers": 1}  # Qwen's

# By name, which is the `model_type` of transformers' families. Families with a `recognise` are
# asked first, in this order.
FAMILIES = {
    "mamba2": Family(pure.read_mamba2, pure.write_mamba2),
    "bamba": Family(bamba.read_bamba, bamba.write_bamba),
    "falcon_h1": Family(bamba.read_falcon_h1, bamba.write_falcon_h1),
    "granitemoehybrid": Family(granite.read_granite, granite.write_granite),
    "kimi_linear": Family(kimi.read_kimi_linear, kimi.write_kimi_linear),
    "bailing_hybrid": Family(
        kimi.read_bailing_hybrid,
        kimi.write_bailing_hybrid,
        head={"num_nextn_predict_layers": 1},
    ),
    "lfm2": Family(lfm2.read_lfm2, lfm2.write_lfm2),
    "lfm2_moe": Family(lfm2.read_lfm2_moe, lfm2.write_lfm2_moe),
    "lfm3": Family(lfm2.read_lfm3, lfm2.write_lfm3),
    "nemotron_h": Family(
        nemotron_h.read_nemotron_h,
        nemotron_h.write_nemotron_h,
        quirk="hf_dt_floor",
        head={"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
    ),
    "nemotron_h_puzzle": Family(nemotron_h.read_nemotron_h_puzzle, quirk="hf_dt_floor"),
    "qwen3_next": Family(qwen.read_qwen3_next, qwen.write_qwen3_next, head=_MTP),
    "qwen3_5_text": Family(qwen.read_qwen3_5, qwen.write_qwen3_5, head=_MTP),
    "qwen3_5_moe_text": Family(qwen.read_qwen3_5_moe, qwen.write_qwen3_5_moe, head=_MTP),
    "olmo_hybrid": Family(qwen.read_olmo_hybrid, qwen.write_olmo_hybrid),
    "lara_mini": Family(qwen.read_lara_mini, qwen.write_lara_mini),
    "zamba2": Family(zamba2.read_zamba2, zamba2.write_zamba2, quirk="hf_dt_floor"),
    "mamba_in_llama": Family(
        mamba_in_llama.read_mamba_in_llama,
        mamba_in_llama.write_mamba_in_llama,
        quirk="plain_rope",
        recognise=lambda source: mamba_in_llama.MAMBA_CONFIG in source.beside,
        mark=mamba_in_llama.MAMBA_CONFIG,
        beside={mamba_in_llama.MAMBA_CONFIG: mamba_in_llama.write_mamba_config},
    ),
    "mamba_ssm": Family(
        pure.read_mamba_ssm,
        pure.write_mamba_ssm,
        recognise=lambda source: "ssm_cfg" in source.fields.values,
        mark="ssm_cfg",
        padded_vocab=True,
    ),
    "codestral": Family(pure.read_codestral, recognise=pure.is_codestral, mark="params.json"),
}

# `model_type`s that are known and not supported.
_REFUSED = {
    "Mamba-1 layers, whose state has no heads": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "gated delta layers between hyper-connections and sparse attention": ("qwen4_exp",),
    "streams between its layers and sparse attention": ("glm5_next", "glm5_next_text"),
    "residual attention and latent experts": ("kimi_k3",),
    "lightning attention, whose residual is the normed input, with a sigmoid gate": ("minimax",),
    "lightning attention beside latent attention": ("bailing_moe_linear",),
    "RG-LRU layers, not Mamba-2": ("recurrent_gemma",),
    "a speech model; its text model alone has no use": ("nemotron3_5_transcribe", "nemo_speechlm"),
}


class _Wrapper(NamedTuple):
    """A multimodal checkpoint whose text model is of a family above."""

    tables: tuple[str, ...]  # one has the text model's config
    model_type: str  # of a text model that does not say it
    names: dict[str, str]  # beginnings of its tensors' names, there and in its own checkpoint
    outer: tuple[str, ...] = ()  # fields that the outer config says


def _qwen(model_type: str) -> _Wrapper:
    names = {"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."}
    return _Wrapper(("text_config",), model_type, names, ("tie_word_embeddings",))


_WRAPPERS = {
    "nemotron_h_omni": _Wrapper(
        ("text_config", "llm_config"), "nemotron_h", {"language_model.": ""}
    ),
    "qwen3_5": _qwen("qwen3_5_text"),
    "qwen3_5_moe": _qwen("qwen3_5_moe_text"),
}


class FileNames(NamedTuple):
    """The config file of a checkpoint and the names that its weights may have."""

    config: str
    weights: tuple[str, ...]


_LAYOUTS = (
    FileNames("config.json", ("model.safetensors", "pytorch_model.bin")),
    FileNames("params.json", ("consolidated.safetensors",)),  # Mistral
)


def layout(directory: Path) -> FileNames:
    """The layout of a directory. If it has several (Codestral's has), one with weights."""
    if has_file(directory / ADAPTER):
        raise ValueError(
            f"{directory} has an adapter (PEFT): load its model with adapter={str(directory)!r}, or"
            f" with --adapter; if the weights here are merged already, remove {ADAPTER}"
        )
    found = [files for files in _LAYOUTS if has_file(directory / files.config)]
    if not found:
        configs = " or ".join(files.config for files in _LAYOUTS)
        raise ValueError(f"{directory} is not a checkpoint: it has no {configs}")

    def has_weights(files: FileNames) -> bool:
        names = [*files.weights, *(f"{name}.index.json" for name in files.weights)]
        return any((directory / name).is_file() for name in names)

    return next(filter(has_weights, found), found[0])


def config_files() -> list[str]:
    """Names of all files that may describe a checkpoint."""
    return [files.config for files in _LAYOUTS] + [MODELOPT, ADAPTER, *_files_beside()]


def has_field(directory: Path, name: str) -> bool:
    """True if the config of another program's checkpoint has a field, in any table."""
    if is_native(directory):
        return False
    files = [folder_of(directory) / file for file in config_files()]
    key = f"{json.dumps(name.rpartition('.')[2])}: "  # quotes inside of values have a backslash
    return any(key in json.dumps(read_json(file)) for file in files if has_file(file))


def _files_beside() -> list[str]:
    return [name for family in FAMILIES.values() for name in family.beside]


def describe(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quirks: Collection[str] = (),
    asked: dict[str, bool] | None = None,
) -> Description:
    """Recognises a checkpoint by its config; `asked` are names of unknown fields, see `Fields`."""
    unknown = sorted(check_names("quirks", quirks) - QUIRKS.keys())
    require(not unknown, f"unknown quirks {unknown!s:.200}; known: {sorted(QUIRKS)}")
    asked = {} if asked is None else asked
    others = [path.with_name(name) for name in _files_beside()]
    beside = {
        file.name: Fields(file, read_json(file), asked=asked) for file in others if has_file(file)
    }
    fields = Fields(path, values, asked=asked)
    found = read(Source(fields, beside, tensors, quirks))
    fields.refuse_asked()
    return found


def text_tables() -> list[str]:
    """Names of the tables in which multimodal checkpoints have a text model's config."""
    return sorted({name for wrapper in _WRAPPERS.values() for name in wrapper.tables})


def read(source: Source) -> Description:
    """Describes a checkpoint through its family."""
    path = source.fields.path
    wrapper = source.fields.values.get("model_type")
    if isinstance(wrapper, str) and wrapper in _WRAPPERS:
        return _read_wrapped(source, wrapper)
    try:
        family = FAMILIES[recognise(source)]
        if not set(source.quirks) <= {family.quirk}:
            raise ValueError(
                f"this family has no quirk {sorted(set(source.quirks) - {family.quirk})}"
            )
        return family.read(source)
    except ValueError as error:  # `ModelConfig` cannot name the file
        raise error if str(path.parent) in str(error) else ValueError(f"{path}: {error}") from None


def _read_wrapped(source: Source, name: str) -> Description:
    """Describes the text model inside a multimodal checkpoint; its other tensors are ignored."""
    wrapper, path = _WRAPPERS[name], source.fields.path
    source.fields.null(*wrapper.tables)
    tables = [table for table in wrapper.tables if source.fields.has(table)]
    if not tables:
        raise ValueError(
            f"{path}: model_type = {name!r} needs a table {' or '.join(wrapper.tables)}"
        )
    for table in tables[1:]:
        source.fields.alias(**{tables[0]: table})
    inside, others = {}, []
    for tensor in source.tensors:
        found = [begin for begin in wrapper.names if tensor.startswith(begin)]
        if found:
            own = wrapper.names[found[0]] + tensor.removeprefix(found[0])
            inside[own] = source.tensors[tensor]
        else:
            others.append(tensor)

    outside = functools.partial(_outside, wrapper)
    fields = source.fields.table(tables[0])
    fields.values.setdefault("model_type", wrapper.model_type)  # transformers' default
    outer = {field: source.fields.values.get(field) for field in wrapper.outer}
    fields.values |= {field: value for field, value in outer.items() if value is not None}
    found_inside = read(source._replace(fields=fields, tensors=inside))
    mtp = found_inside.mtp
    return found_inside._replace(
        family=f"{found_inside.family} inside {name}",
        rules=renamed(found_inside.rules, outside),
        ignored=[entry._replace(source=outside(entry.source)) for entry in found_inside.ignored]
        + [Ignored(tensor, f"not of the text model of {name}") for tensor in others],
        mtp=mtp and mtp._replace(rules=renamed(mtp.rules, outside)),
    )


def _outside(wrapper: _Wrapper, own: str) -> str:
    begin = next(begin for begin, inner in wrapper.names.items() if own.startswith(inner))
    return begin + own.removeprefix(wrapper.names[begin])


def wrapped(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a text model by their names in a checkpoint of this config."""
    wrapper = _WRAPPERS.get(str(values.get("model_type")))
    return {
        own if wrapper is None else _outside(wrapper, own): tensor
        for own, tensor in tensors.items()
    }


def recognise(source: Source) -> str:
    """The name of a checkpoint's family in `FAMILIES`; ValueError: there is none."""
    path, values = source.fields.path, source.fields.values
    for name, family in FAMILIES.items():
        if family.recognise is not None and family.recognise(source):
            return name
    model_type = values.get("model_type")
    if model_type in transformers_families():
        return model_type
    for reason, names in _REFUSED.items():
        if model_type in names:
            raise ValueError(f"{path} says model_type = {model_type!r:.80}: {reason}")
    if "d_model" in values and "n_layer" in values:  # mamba_ssm's first release had no ssm_cfg
        raise ValueError(f"{path} has no ssm_cfg: a Mamba-1 model of mamba_ssm, not supported")
    refuse_head(path, values)
    others = [f"{name} ({family.mark})" for name, family in FAMILIES.items() if family.recognise]
    raise ValueError(
        f"{path} is of no known family (model_type = {model_type!r:.80}); known:"
        f" {', '.join(others)}, and transformers' {', '.join(transformers_families())}"
    )


def transformers_families() -> list[str]:
    """Names of the families that are recognised by their `model_type`."""
    return [name for name, family in FAMILIES.items() if family.recognise is None]
