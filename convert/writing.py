"""Writing a `HybridLM` as a checkpoint of another program."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax.convert import families
from stree_jax.convert.description import Description, Source
from stree_jax.convert.families import FAMILIES
from stree_jax.convert.fields import Fields
from stree_jax.convert.rules import Rule
from stree_jax.heads import FOLDER
from stree_jax.messages import first_line
from stree_jax.models import AttentionConfig, GatedDeltaConfig, LayerConfig, Mamba2Config
from stree_jax.models.config import ModelConfig
from stree_jax.models.draft_head import DraftHead
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.models.matrices import named_weights, quantized_kinds

_SHARD = 1 << 30  # bytes; one shard is in memory next to the model
_NO_PLACE = "has no place for this multi-token prediction head"
_SHOWN = 4  # differences between heads


def writable() -> tuple[str, ...]:
    """Targets of `write_as`; "hf": the first family of transformers that can hold the model."""
    return ("hf", *(name for name, family in FAMILIES.items() if family.write is not None))


def write_as(model: HybridLM, directory: Path, target: str, head: DraftHead | None = None) -> None:
    """Writes config files and safetensors into an existing directory.

    `A_log`, `D` and `dt_bias` are written as float32, as the model has them; transformers casts
    them when it loads.
    """
    check_on_one_device(model, "write_as")
    if quantized_kinds(model):
        raise ValueError(
            f"{directory}: matrices in few bits are stored natively only; convert the original"
        )
    of_head = None if head is None else head.config
    written = written_as(model.config, target, jnp.dtype(model.dtype).name, directory, of_head)
    weights = dict(named_weights(model))
    rules = [rule for rule in written.description.rules if rule.target in weights]
    if head is not None:
        assert written.description.mtp is not None
        head_weights = dict(named_weights(head))
        weights |= {f"{FOLDER}.{name}": weight for name, weight in head_weights.items()}
        rules += [
            rule._replace(target=f"{FOLDER}.{rule.target}")
            for rule in written.description.mtp.rules
            if rule.target in head_weights
        ]
    write_weights(directory, rules, weights)
    for name, values in written.files.items():
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")


def write_weights(directory: Path, rules: list[Rule], weights: dict[str, Any]) -> None:
    """Writes weights by their rules, as safetensors in shards."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    assert {rule.target for rule in rules} == set(weights)
    shards: list[list] = [[]]
    size = 0
    for rule in rules:
        is_part = shards[-1] and shards[-1][-1].source == rule.source  # of one tensor, in one file
        if size and size + weights[rule.target].nbytes > _SHARD and not is_part:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += weights[rule.target].nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        tensors: dict[str, np.ndarray] = {}
        for rule in shard:
            parts = rule.transform.invert(np.asarray(weights[rule.target]))
            for source, part in zip(rule.sources, parts, strict=True):
                whole = tensors[source] + part if source in tensors else part
                tensors[source] = np.ascontiguousarray(whole)
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:  # for example, a full disk
            raise OSError(f"cannot write {directory / name}: {first_line(error)}") from error
        # The package makes the file private.
        (directory / name).chmod(directory.stat().st_mode & 0o666)
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


class Written(NamedTuple):
    """The config files of a model in another program's format."""

    family: str
    files: dict[str, dict[str, Any]]  # by name
    description: Description  # read back from these files


def written_as(
    config: ModelConfig, target: str, dtype: str, directory: Path, head: Any = None
) -> Written:
    """Config files for a model, and for a head's config beside it, verified by reading them back.

    ValueError: the family cannot represent them; the message lists all that it lacks.
    """
    if target != "hf":
        return _written(config, target, dtype, directory, head)
    problems = []
    for name in families.transformers_families():
        if FAMILIES[name].write is not None:
            try:
                return _written(config, name, dtype, directory, head)
            except ValueError as error:
                problems.append(str(error))
    # If there is a head, a family that can hold the model without it.
    nearest = min(problems, key=lambda problem: (_NO_PLACE not in problem, len(problem)))
    what = "this model" if head is None else "this model with its multi-token prediction head"
    raise ValueError(f"no family of transformers can hold {what}; the nearest: {nearest}")


def _written(config: ModelConfig, name: str, dtype: str, directory: Path, head: Any) -> Written:
    family = FAMILIES[name]
    assert family.write is not None
    title = name if family.recognise else f"transformers' {name}"
    try:
        files = {"config.json": family.write(config, dtype)}
        if head is not None:
            files["config.json"] |= family.head
        files |= {file: write(config) for file, write in family.beside.items()}
        # Read back after JSON, which turns tuples into lists.
        tables = {
            file: Fields(directory / file, values)
            for file, values in json.loads(json.dumps(files)).items()
        }
        source = Source(tables.pop("config.json"), tables)
        back = families.read(source)
        assert families.recognise(source) == name
    except ValueError as error:
        raise ValueError(f"{title} cannot hold this model: {error}") from None
    differences = _differences(
        *(_canonical(model, padded=family.padded_vocab) for model in (config, back.config))
    )
    if differences:
        raise ValueError(f"{title} has no place for {'; '.join(differences)}")
    if head is not None:
        problem = "it has no such heads" if back.mtp is None else back.mtp.problem
        if problem is None:
            differences = _differences(_of_head(head), _of_head(back.mtp.config))
            problem = "; ".join(differences[:_SHOWN])
            problem += ", and more" * (len(differences) > _SHOWN)
        if problem:
            raise ValueError(f"{title} {_NO_PLACE}: {problem}")
    return Written(name, files, back)


def _differences(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """The differences between two flat tables."""
    differences = [
        f"{name} = {want[name]!r}" + (f" (only {have[name]!r})" if name in have else "")
        for name in want
        if name not in have or have[name] != want[name]
    ]
    return differences + [f"no {name}" for name in have if name not in want]


def _of_head(config: Any) -> dict[str, Any]:
    """A flat table of a head's config."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, LayerConfig):
            values[f"{name}.kind"] = value.kind
            values |= {f"{name}.{field}": content for field, content in vars(value).items()}
        else:
            values[name] = value
    return values


def _canonical(config: ModelConfig, *, padded: bool) -> dict[str, Any]:
    """A flat table that is equal for equivalent configs; `padded`: padding is no vocabulary."""
    values: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config)
    }
    names: dict[LayerConfig, str] = {}
    for layer in config.distinct_layers:
        for part in (layer, *layer.parts.values()):
            same = sum(named.kind == part.kind for named in names if named != part)
            if part not in names:
                names[part] = f"{part.kind}.{same + 1}" if same else part.kind
                values |= {f"{names[part]}.{key}": value for key, value in _fields_of(part).items()}
    values["layers"] = tuple(names[layer] for layer in config.layers)
    values["padded_vocab_size"] = config.num_embeddings
    if not padded:
        values["vocab_size"] = config.num_embeddings
    return values


def _fields_of(layer: LayerConfig) -> dict[str, Any]:
    """The fields of a layer, equal for equivalent ones."""
    fields = dataclasses.asdict(layer)
    values = {name: value for name, value in fields.items() if name not in layer.parts}
    match layer:
        case Mamba2Config():
            values |= {"num_x_heads": layer.x_heads, "num_b_groups": layer.b_groups}
            has_norm = layer.norm != "none"
            values["norm_groups"] = layer.gate_groups if has_norm else None
            values["norm_eps"] = layer.norm_eps if has_norm else None
        case GatedDeltaConfig():
            del values["chunk_size"]  # changes no result, and no format has it
        case AttentionConfig():
            values["scale"] = layer.score_scale
            if not layer.rotary_dim:
                values["rope_theta"] = values["rope_scaling"] = None
    return values
