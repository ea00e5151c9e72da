"""The families of checkpoints: how each is recognised, read and written.

A config field is used, ignored for a stated reason, or refused; none is overlooked.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.checkpoint import read_json
from stree_jax.config import ModelConfig
from stree_jax.convert import bamba, granite, mamba_in_llama, nemotron_h, pure, zamba2
from stree_jax.convert.description import Description
from stree_jax.convert.fields import Fields
from stree_jax.convert.tensors import Tensor

# Ways in which other programs depart from a published config, for who must reproduce them.
QUIRKS = {
    "hf_dt_floor": "Nemotron-H and Zamba2: clamp the time step at time_step_min, as transformers'"
    " prefill does",
    "plain_rope": "MambaInLlama: leave out Llama 3's RoPE scaling, as the inference code of the"
    " paper does",
}


class Layout(NamedTuple):
    """Where a checkpoint keeps its config and its weights."""

    config: str
    weights: tuple[str, ...]


_HF_LAYOUT = Layout("config.json", ("model.safetensors", "pytorch_model.bin"))
_MISTRAL_LAYOUT = Layout("params.json", ("consolidated.safetensors",))
_MAMBA_CONFIG = "mamba_config.json"  # beside a config.json of Llama: MambaInLlama


def layout(directory: Path) -> Layout:
    """Which files belong together; Codestral's repository has both of its forms.

    Raises:
        ValueError: there is no config.
    """
    layouts = (_HF_LAYOUT, _MISTRAL_LAYOUT)
    found = [files for files in layouts if (directory / files.config).is_file()]
    if not found:
        raise ValueError(f"{directory} is not a checkpoint: it has no config.json or params.json")

    def has_weights(files: Layout) -> bool:
        names = [*files.weights, *(f"{name}.index.json" for name in files.weights)]
        return any((directory / name).is_file() for name in names)

    return next(filter(has_weights, found), found[0])


_REFUSED = {
    "Mamba-1 layers, whose state has no heads": ("mamba", "falcon_mamba", "jamba", "zamba"),
    "gated delta net layers, not Mamba-2": (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "olmo_hybrid",
    ),
    "delta attention, not Mamba-2": ("kimi_linear", "bailing_hybrid", "glm5_next"),
    "RG-LRU layers, not Mamba-2": ("recurrent_gemma",),
    "a multimodal wrapper; convert the language model inside it": (
        "nemotron_h_omni",
        "nemotron3_5_transcribe",
    ),
}


def describe(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quirks: Collection[str] = (),
) -> Description:
    """Recognises a checkpoint.

    Args:
        path: its config file.
        values: what is in it.
        tensors: by name.
        quirks: of `QUIRKS`, to reproduce.

    Raises:
        ValueError: it is of no known family, of one that is refused, or its config does not fit; or
            a quirk that the family does not have.
    """
    unknown = sorted(set(quirks) - set(QUIRKS))
    if unknown:
        raise ValueError(f"unknown quirks {unknown}; known: {sorted(QUIRKS)}")
    for field in ("quantization_config", "compression_config", "quantization"):
        if values.get(field):
            raise ValueError(
                f"{path} says {field}: quantised checkpoints are not supported, use the bfloat16"
                " original"
            )
    try:
        read, has = _reader(path, values, tensors, quirks)
        if not set(quirks) <= {has}:
            raise ValueError(f"this family has no quirk {sorted(set(quirks) - {has})}")
        return read()
    except ValueError as error:  # of `ModelConfig`, which does not know the file
        raise error if str(path.parent) in str(error) else ValueError(f"{path}: {error}") from None


def _reader(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quirks: Collection[str],
) -> tuple[Callable[[], Description], str | None]:
    """What describes a checkpoint, and the quirk that its family has."""
    fields = Fields(path, values)
    model_type = values.get("model_type")
    mamba_config = path.with_name(_MAMBA_CONFIG)
    if mamba_config.is_file():
        mamba = Fields(mamba_config, read_json(mamba_config))
        return (
            lambda: mamba_in_llama.read_mamba_in_llama(fields, mamba, tensors, quirks)
        ), "plain_rope"
    if "ssm_cfg" in values:
        return (lambda: pure.read_mamba_ssm(fields)), None
    if "dim" in values and "n_heads" not in values and model_type in (None, "mamba"):
        return (lambda: pure.read_codestral(fields)), None
    match model_type:
        case "mamba2":
            return (lambda: pure.read_mamba2(fields, tensors)), None
        case "bamba":
            return (lambda: bamba.read_bamba(fields)), None
        case "falcon_h1":
            return (lambda: bamba.read_falcon_h1(fields)), None
        case "granitemoehybrid":
            return (lambda: granite.read_granite(fields)), None
        case "nemotron_h":
            return (lambda: nemotron_h.read_nemotron_h(fields, tensors, quirks)), "hf_dt_floor"
        case "zamba2":
            return (lambda: zamba2.read_zamba2(fields, quirks)), "hf_dt_floor"
    for reason, names in _REFUSED.items():
        if model_type in names:
            raise ValueError(f"{path} says model_type = {model_type!r}: {reason}")
    if "d_model" in values and "n_layer" in values:  # mamba_ssm's first release had no ssm_cfg
        raise ValueError(f"{path} has no ssm_cfg: a Mamba-1 model of mamba_ssm, not supported")
    raise ValueError(
        f"{path} is of no known family (model_type = {model_type!r}); known: mamba_ssm (ssm_cfg),"
        f" Codestral (params.json), MambaInLlama ({_MAMBA_CONFIG}), and transformers'"
        f" {', '.join(_HF_WRITERS)}"
    )


# --- Writing.

_HF_WRITERS = {
    "mamba2": pure.write_mamba2,
    "bamba": bamba.write_bamba,
    "falcon_h1": bamba.write_falcon_h1,
    "granitemoehybrid": granite.write_granite,
    "nemotron_h": nemotron_h.write_nemotron_h,
    "zamba2": zamba2.write_zamba2,
}
_WRITERS = {
    **_HF_WRITERS,
    "mamba_ssm": pure.write_mamba_ssm,
    "mamba_in_llama": mamba_in_llama.write_mamba_in_llama,
}
# What a model can be written as; "hf" is the first family of transformers that can hold it.
WRITABLE = ("hf", *_WRITERS)


class Written(NamedTuple):
    """A model in the words of another program."""

    family: str
    files: dict[str, dict[str, Any]]  # config files, by name
    description: Description  # of what is written


def written_as(config: ModelConfig, target: str, dtype: str, directory: Path) -> Written:
    """The config files that say the same as `config`, proved by reading them back.

    Args:
        config: a model's.
        target: one of `WRITABLE`.
        dtype: of the weights.
        directory: where the files will be, for messages and for nothing else.

    Raises:
        ValueError: naming all that the family has no place for.
    """
    if target != "hf":
        return _written(config, target, dtype, directory)
    problems = []
    for name in _HF_WRITERS:
        try:
            return _written(config, name, dtype, directory)
        except ValueError as error:
            problems.append(str(error))
    shortest = min(problems, key=len)
    raise ValueError(f"no family of transformers can hold this model; the nearest: {shortest}")


def _written(config: ModelConfig, family: str, dtype: str, directory: Path) -> Written:
    title = f"transformers' {family}" if family in _HF_WRITERS else family
    try:
        values = _WRITERS[family](config)
        if values.get("max_position_embeddings", 0) is None:
            del values["max_position_embeddings"]
        if family != "mamba_ssm":
            values["dtype"] = dtype
        files = {"config.json": values}
        path = directory / "config.json"
        if family == "mamba_in_llama":
            files[_MAMBA_CONFIG] = mamba_in_llama.mamba_in_llama_values(config)
            mamba = Fields(directory / _MAMBA_CONFIG, files[_MAMBA_CONFIG])
            back = mamba_in_llama.read_mamba_in_llama(Fields(path, values), mamba, {}, ())
        else:
            back = describe(path, json.loads(json.dumps(values)), {})
    except ValueError as error:
        raise ValueError(f"{title} cannot hold this model: {error}") from None
    want = _canonical(config, padded=family == "mamba_ssm")
    have = _canonical(back.config, padded=family == "mamba_ssm")
    differences = [
        f"{name} = {want[name]!r}" + (f" (only {have[name]!r})" if name in have else "")
        for name in want
        if name not in have or have[name] != want[name]
    ]
    differences += [f"no {name}" for name in have if name not in want]
    if differences:
        raise ValueError(f"{title} has no place for {'; '.join(differences)}")
    return Written(family, files, back)


def _canonical(config: ModelConfig, *, padded: bool) -> dict[str, Any]:
    """What a config says, in one way of saying it. Without `padded`, padding is vocabulary."""
    values: dict[str, Any] = {}
    used = {
        "mamba2": {"mamba2", "parallel"},
        "attention": {"attention", "parallel", "shared"},
        "mlp": {"mlp", "shared"},
        "moe": {"moe"},
        "shared": {"shared"},
    }
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in used:
            values[field.name] = value
        elif value is not None and used[field.name] & set(config.layers):
            values |= {f"{field.name}.{key}": v for key, v in dataclasses.asdict(value).items()}
    values["padded_vocab_size"] = config.num_embeddings
    if not padded:
        values["vocab_size"] = config.num_embeddings
    if (m := config.mamba2) is not None and "mamba2.num_heads" in values:
        values["mamba2.num_x_heads"], values["mamba2.num_b_groups"] = m.x_heads, m.b_groups
        values["mamba2.norm_groups"] = None if m.norm == "none" else m.gate_groups
        values["mamba2.norm_eps"] = None if m.norm == "none" else m.norm_eps
    if (a := config.attention) is not None and "attention.num_heads" in values:
        values["attention.scale"] = a.score_scale
        if not a.rotary_dim:
            values["attention.rope_theta"] = values["attention.rope_scaling"] = None
    return values
