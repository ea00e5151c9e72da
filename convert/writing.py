"""From a `HybridLM` to the files of another program."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax.checkpoint import flatten
from stree_jax.convert.families import written_as
from stree_jax.models.lm import HybridLM

_SHARD = 1 << 30  # bytes; what is in memory beside the model is one shard


def write_as(model: HybridLM, directory: Path, target: str) -> None:
    """Writes config files and safetensors into an existing directory.

    `A_log`, `D` and `dt_bias` are written in float32, as the model has them; transformers casts
    them when it loads.

    Args:
        model: what to write.
        directory: where.
        target: one of `families.WRITABLE`.

    Raises:
        ValueError: the family has no place for something that the model does.
    """
    from safetensors.numpy import save_file

    written = written_as(model.config, target, jnp.dtype(model.dtype).name, directory)
    weights = flatten(nnx.to_pure_dict(nnx.state(model)))
    rules = [rule for rule in written.description.rules if rule.target in weights]
    assert {rule.target for rule in rules} == set(weights)
    shards: list[list] = [[]]
    size = 0
    for rule in rules:
        if size and size + weights[rule.target].nbytes > _SHARD:
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
        tensors = {
            source: np.ascontiguousarray(part)
            for rule in shard
            for source, part in zip(
                rule.sources,
                rule.transform.invert(np.asarray(weights[rule.target])),
                strict=True,
            )
        }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, values in written.files.items():
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")
