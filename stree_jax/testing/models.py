"""Tiny models of every family, with random weights."""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from stree_jax import MtpConfig, MtpHead
from stree_jax.messages import shown
from stree_jax.models import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
    ShortConvConfig,
)
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM

_Module = TypeVar("_Module", bound=nnx.Module)

MOST_ARRAYS = 1024  # of a model

_SECTIONS = (1.1, 0.9, 1.2, 0.8, 1.3)
_FEW: Any = dict(head_dim=4, state_size=4, num_groups=4, num_x_heads=2, num_b_groups=2)
# One config for each group of options of Mamba-2. With tied embeddings a random model repeats
# itself; that of "plain", which most tests of decoding use, is untied.
CONFIGS: dict[str, ModelConfig] = {
    "plain": ModelConfig.tiny(num_layers=1, tie_embeddings=False),
    "groups": ModelConfig.tiny(
        num_groups=2,
        conv_width=3,
        norm="norm_then_gate",
        d_per_channel=True,
        in_proj_bias=True,
        out_proj_bias=True,
        conv_bias=False,
        tie_embeddings=False,
        padded_vocab_size=40,
    ),
    "mamba_in_llama": ModelConfig.tiny(expand=1, **_FEW),
    "repeated_first": ModelConfig.tiny(expand=1, **_FEW, repeat_before_conv=True, norm_groups=2),
    "branch": ModelConfig.tiny(
        mlp_dim=6,
        norm="none",
        dt_limit=(0.01, 0.5),
        input_multiplier=0.7,
        section_multipliers=_SECTIONS,
    ),
}


_MAMBA2 = Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)
_SMALL = dataclasses.replace(_MAMBA2, **_FEW)
_DELTA = GatedDeltaConfig(num_heads=4, head_dim=8, num_groups=2, state_size=12, chunk_size=8)
_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
_NORMED = dataclasses.replace(_ATTENTION, rotary_dim=8, qk_norm_eps=1e-5)
_UNROTATED = dataclasses.replace(_NORMED, rotary_dim=0)
_SPANNING = dataclasses.replace(_UNROTATED, qk_norm_spans=True, norm_after=True)
_LARA = dataclasses.replace(_DELTA, norm_eps=1e-5)
_KDA = GatedDeltaConfig(4, 8, 4, 8, chunk_size=16, by_channel=True, norm_eps=1e-5)
_LATENT = LatentAttentionConfig(4, latent_size=16, head_dim=8, value_dim=12, rotary_dim=16)
_SCALING = RopeScaling(8.0, 1.0, 4.0, 24)
_OLMO = dataclasses.replace(_LARA, beta_scale=2.0)


def _hybrid(layers: tuple[str, ...], **parts: Any) -> ModelConfig:
    """A small hybrid with untied embeddings; what is a table changes a part."""
    shape: dict[str, Any] = dict(
        vocab_size=37,
        d_model=16,
        layers=layers,
        mamba2=_MAMBA2,
        gated_delta=_DELTA,
        short_conv=ShortConvConfig(16),
        attention=_ATTENTION,
        mlp=MlpConfig(24),
        tie_embeddings=False,
        residual_float32=False,
    )
    for name, part in parts.items():
        shape[name] = dataclasses.replace(shape[name], **part) if isinstance(part, dict) else part
    return ModelConfig(**shape)


def _of_layers(*layers: Any) -> ModelConfig:
    """A small hybrid of these layers, some of which have one kind and differ."""
    return ModelConfig(37, 16, layers, tie_embeddings=False, residual_float32=False)


_EXPERTS = MoeConfig(num_experts=4, num_active=2, hidden_size=12, shared_size=10)
_NEMOTRON_EXPERTS = MoeConfig(
    num_experts=6,
    num_active=2,
    hidden_size=12,
    router="sigmoid",
    num_router_groups=3,
    num_active_groups=2,
    scale=2.5,
    latent_size=8,
    shared_size=10,
    activation="relu2",
    gated=False,
)
_DEEPSEEK = MoeConfig(4, 2, 12, router="sigmoid", scale=2.5, shared_size=12)
# One for each family of hybrids, with the options that it uses.
HYBRIDS: dict[str, ModelConfig] = {
    "bamba": _hybrid(
        ("mamba2", "mlp", "attention", "mlp"),
        attention=dict(rotary_dim=4, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(24, bias=True),
    ),
    "mamba_in_llama": _hybrid(
        ("mamba2", "mlp", "attention", "mlp"),
        mamba2=_SMALL,
        attention=dict(head_dim=4, rotary_dim=4, rope_theta=100.0, rope_scaling=_SCALING),
    ),
    "mamba2attn": _hybrid(
        ("mamba2", "attention", "mamba2"),
        attention=AttentionConfig(
            num_heads=3, num_kv_heads=1, head_dim=8, rotary_dim=4, conv_width=3, mlp_dim=6
        ),
        residual_float32=True,
        padded_vocab_size=40,
    ),
    "falcon_h1": _hybrid(
        ("parallel", "mlp"),
        mamba2=dict(
            norm="none", input_multiplier=1.25, output_multiplier=0.8, section_multipliers=_SECTIONS
        ),
        attention=dict(head_dim=6, rotary_dim=6, input_multiplier=1.1)
        | dict(key_multiplier=0.7, output_multiplier=0.9),
        mlp=MlpConfig(24, gate_multiplier=0.9, output_multiplier=0.7),
        embedding_multiplier=2.0,
        logits_multiplier=0.5,
    ),
    "granite_moe": _hybrid(
        ("mamba2", "moe", "attention", "moe"),
        attention=dict(scale=0.2),
        moe=_EXPERTS,
        mlp=None,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_multiplier=0.4,
    ),
    "nemotron_h": _hybrid(
        ("mamba2", "mlp", "attention", "moe"),
        mlp=MlpConfig(24, activation="relu2", gated=False),
        moe=_NEMOTRON_EXPERTS,
    ),
    "zamba2": _hybrid(
        ("shared", "mamba2") * 3,
        attention=dict(num_kv_heads=4, input_multiple=2, scale=0.5, rotary_dim=8),
        mlp=MlpConfig(24, activation="gelu"),
        shared=SharedConfig(num_blocks=2, adapter_rank=3, attention_adapters=True),
    ),
    # In sizes that native code takes.
    "qwen3_5": _hybrid(
        ("gated_delta", "mlp", "attention", "mlp"),
        gated_delta=dict(head_dim=16, state_size=16),
        attention=dict(head_dim=16, rotary_dim=4, qk_norm_eps=1e-6, output_gate=True),
        norm_eps=1e-6,
        norm_float32=True,
    ),
    "qwen3_next": _hybrid(
        ("gated_delta", "moe", "attention", "moe"),
        attention=dict(num_kv_heads=1, rotary_dim=2, qk_norm_eps=1e-6, output_gate=True),
        moe=dataclasses.replace(_EXPERTS, shared_gate=True),
        norm_eps=1e-6,
        norm_float32=True,
    ),
    "olmo_hybrid": _of_layers(_OLMO, MlpConfig(24), _SPANNING, MlpConfig(24, norm_after=True)),
    "lara": _of_layers(
        *(_LARA, _EXPERTS, dataclasses.replace(_NORMED, window=3), _EXPERTS, _UNROTATED, _EXPERTS)
    ),
    "lfm2": _hybrid(("short_conv", "mlp", "attention", "mlp"), attention=_NORMED),
    "lfm2_moe": _hybrid(
        ("short_conv", "mlp", "attention", "moe"),
        short_conv=ShortConvConfig(16, conv_width=4, bias=True),
        attention=_NORMED,
        moe=MoeConfig(4, 2, 12, router="sigmoid", norm_eps=1e-6, scale=1.5),
    ),
    "kimi_linear": _of_layers(
        dataclasses.replace(_KDA, gate_rank=8, conv_width=3), MlpConfig(24), _LATENT, _DEEPSEEK
    ),
    "bailing_hybrid": _of_layers(
        *(dataclasses.replace(_KDA, lower_bound=-5.0), MlpConfig(24)),
        dataclasses.replace(_LATENT, rope_theta=100.0, query_rank=32, output_gate=True),
        dataclasses.replace(_DEEPSEEK, num_router_groups=2, limit=0.5, shared_limit=0.7),
    ),
}
_FULL = dataclasses.replace(_NORMED, rotary_pairs=2, output_gate=True, gate_per_head=True)
_LOCAL = dataclasses.replace(_FULL, rotary_pairs=None, rope_theta=100.0, window=3)
HYBRIDS["lfm3"] = dataclasses.replace(
    _of_layers(
        *(ShortConvConfig(16, conv_width=7), MlpConfig(24), _FULL, MlpConfig(24)),
        *(_LOCAL, MlpConfig(24)),
    ),
    sandwich_norms=True,
)
# Layers of one kind that differ in size: windows of attention, heads, states and experts.
HYBRIDS["mixed"] = _of_layers(
    _MAMBA2,
    dataclasses.replace(_ATTENTION, rotary_dim=4, window=3),
    MoeConfig(num_experts=4, num_active=2, hidden_size=12),
    Mamba2Config(num_heads=2, head_dim=8, state_size=4, conv_width=3, chunk_size=8),
    AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, window=2, conv_width=2),
    MoeConfig(num_experts=3, num_active=2, hidden_size=8, shared_size=6),
)
CONFIGS |= {f"{name} hybrid": config for name, config in HYBRIDS.items()}


@jax.transfer_guard("allow")
def tiny_model(
    name: str = "plain", seed: int = 0, *, dtype: str = "float32", implementation: str | None = None
) -> HybridLM:
    """The random model of a config in `CONFIGS`; the same object for the same arguments."""
    if name not in CONFIGS:
        raise ValueError(f"no tiny model {shown(name)}; known: {sorted(CONFIGS)}")
    model = _cached_model(CONFIGS[name], seed, dtype=dtype, implementation=implementation)
    assert model.config is CONFIGS[name], "a test changed the shared model; clone it first"
    return model


@jax.transfer_guard("allow")
def random_model(
    config: ModelConfig, seed: int = 0, *, dtype: str = "float32", implementation: str | None = None
) -> HybridLM:
    """A model of this config with random weights that make every parameter matter."""
    structure, weights = HybridLM.abstract(config, dtype=dtype, implementation=implementation)
    return randomised(nnx.merge(structure, weights), seed)


_cached_model = functools.cache(random_model)


@jax.transfer_guard("allow")
def randomised(model: _Module, seed: int) -> _Module:
    """A copy of a model, or of a part of one, with all weights drawn again.

    Its logits are far from uniform.
    """
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten_with_path(state)
    key, new = jax.random.key(seed, impl="threefry2x32"), []
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        if "A_log" in name:
            value = 3 * _drawn("uniform", key, i, leaf.shape) - 1
        elif "dt_bias" in name:
            value = 5 * _drawn("uniform", key, i, leaf.shape) - 4
        else:
            value = _drawn("normal", key, i, leaf.shape)
            if "scale" in name or "'D'" in name:
                value = 1 + 0.3 * value
            elif "bias" in name:
                value = 0.2 * value
            elif "conv_weight" in name:
                value = 0.5 * value
            elif "correction" in name:
                value = 0.3 * value
            elif "embedding" not in name and value.ndim > 1:  # matrices
                value = value * leaf.shape[-2] ** -0.5
        new.append(jnp.asarray(value, leaf.dtype))
    return nnx.merge(graphdef, jax.tree.unflatten(structure, new))


def random_mtp_head(model: HybridLM, *, latent: int | None = None) -> MtpHead:
    """A multi-token-prediction head for a model, in Nemotron's layout, with random weights.

    With `latent` its experts have a latent space of this width.
    """
    experts = dataclasses.replace(_NEMOTRON_EXPERTS, latent_size=latent)
    config = MtpConfig(model.config.d_model, _ATTENTION, experts, norm_eps=1e-3)
    head = nnx.eval_shape(lambda: MtpHead(config, dtype=model.dtype, rngs=nnx.Rngs(0)))
    return randomised(head, 0)


def _drawn(kind: str, key: Array, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """The i-th array of random numbers of a key.

    Programs draw a rounded number of them, so that there are few to compile.
    """
    size = math.prod(shape)
    most = 4 ** max(4, math.ceil(math.log(size, 4)))
    return np.asarray(_draw(kind, key, i, most))[:size].reshape(shape)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _draw(kind: str, key: Array, i: int | Array, size: int) -> Array:
    array_key = jax.random.split(key, MOST_ARRAYS)[i]
    draw = {"normal": jax.random.normal, "uniform": jax.random.uniform}[kind]
    return draw(array_key, (size,), jnp.float32)


@jax.transfer_guard("allow")
def perturbed(model: HybridLM, amount: float, seed: int = 0) -> HybridLM:
    """A copy of the model with relative noise on its weights: a draft model that often agrees.

    With an `amount` of 0.1 a tiny model's draft is right about every second time.
    """
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    key, new = jax.random.key(seed, impl="threefry2x32"), []
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.integer):  # the scales of such a matrix get noise
            new.append(leaf)
            continue
        factor = (1 + amount * _drawn("normal", key, i, leaf.shape)).astype(leaf.dtype)
        place = leaf.sharding if getattr(leaf, "committed", False) else None
        new.append(jax.device_put(np.asarray(leaf) * factor, place))
    return nnx.merge(graphdef, jax.tree.unflatten(structure, new))
