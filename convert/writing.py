"""From a `HybridLM` back to transformers' mamba2 format."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax.checkpoint import flatten
from stree_jax.config import ModelConfig
from stree_jax.convert.families import backbone_rules
from stree_jax.layer_config import Mamba2Config
from stree_jax.models.lm import HybridLM

_SHARD = 1 << 30  # bytes; what is in memory beside the model is one shard


def write_hf(model: HybridLM, directory: Path) -> None:
    """Writes config.json and safetensors into an existing directory.

    `A_log`, `D` and `dt_bias` are written in float32, as the model has them; transformers casts
    them when it loads.

    Raises:
        ValueError: transformers' mamba2 has no place for something that the model does.
    """
    from safetensors.numpy import save_file

    config = hf_config(model.config, model.dtype)
    weights = flatten(nnx.to_pure_dict(nnx.state(model)))
    rules = [
        rule
        for rule in backbone_rules(model.config.layers, embedding="embeddings")
        if rule.target in weights
    ]
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
            rule.source: np.ascontiguousarray(
                rule.transform.invert(np.asarray(weights[rule.target]))
            )
            for rule in shard
        }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def hf_config(config: ModelConfig, dtype: jnp.dtype) -> dict:
    """The config.json of transformers' mamba2 for a model.

    Raises:
        ValueError: naming all that transformers' mamba2 cannot do.
    """
    mixer = config.mamba2
    assert mixer is not None
    default = Mamba2Config(mixer.num_heads, mixer.head_dim, mixer.state_size)
    problems = [
        f"{name} = {have!r}"
        for name, have, can in (
            ("layers other than mamba2", sorted(set(config.layers) - {"mamba2"}), []),
            ("embedding_multiplier", config.embedding_multiplier, 1.0),
            ("residual_multiplier", config.residual_multiplier, 1.0),
            ("logits_multiplier", config.logits_multiplier, 1.0),
            ("mlp_dim", mixer.mlp_dim, 0),
            ("d_per_channel", mixer.d_per_channel, False),
            ("norm", mixer.norm, default.norm),
            ("norm_groups", mixer.gate_groups, mixer.num_groups),
            ("num_x_heads", mixer.x_heads, mixer.num_heads),
            ("num_b_groups", mixer.b_groups, mixer.num_groups),
            ("input_multiplier", mixer.input_multiplier, default.input_multiplier),
            ("section_multipliers", mixer.section_multipliers, default.section_multipliers),
            ("out_proj_bias without in_proj_bias", mixer.out_proj_bias, mixer.in_proj_bias),
            ("norm_eps of the mixer", mixer.norm_eps, config.norm_eps),
            ("channels that d_model does not divide", mixer.inner_size % config.d_model, 0),
        )
        if have != can
    ]
    if problems:
        raise ValueError(
            f"transformers' mamba2 has no place for {'; '.join(problems)}; keep the model native"
        )
    low, high = mixer.dt_limit
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "dtype": jnp.dtype(dtype).name,
        # transformers has no unpadded size; it may then sample an id that means nothing.
        "vocab_size": config.num_embeddings,
        "hidden_size": config.d_model,
        "num_hidden_layers": len(config.layers),
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_dim,
        "expand": mixer.inner_size // config.d_model,
        "state_size": mixer.state_size,
        "n_groups": mixer.num_groups,
        "conv_kernel": mixer.conv_width,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.in_proj_bias,
        "hidden_act": mixer.activation,
        "layer_norm_epsilon": config.norm_eps,
        "time_step_limit": [low, high if np.isfinite(high) else {"__float__": "Infinity"}],
        "residual_in_fp32": config.residual_float32,
        "tie_word_embeddings": config.tie_embeddings,
        "chunk_size": mixer.chunk_size,
        "eos_token_id": config.eos_token,
        "bos_token_id": None,
        "pad_token_id": None,
    }
