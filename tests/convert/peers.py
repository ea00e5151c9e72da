"""Checkpoints as other programs write them: transformers' own, and mamba_ssm's by its description.

The parity tests need torch and transformers, which CI installs for its first leg; there a missing
package is an error, elsewhere a skip.
"""

import json
import os

import numpy as np
import pytest

from tests.convert import numpy_mamba_ssm


def torch():
    """The torch package."""
    return _imported("torch")


def transformers():
    """The transformers package."""
    return _imported("transformers")


def _imported(name):
    if os.environ.get("STREE_JAX_PEERS") == "required":
        module = __import__(name)
    else:
        module = pytest.importorskip(name)
    if name == "torch":
        module.set_num_threads(1)
    return module


# Of transformers' Mamba2Config. Each makes something matter that the others leave alone.
HF_CONFIGS = {
    "plain": {},
    "groups, narrow convolution, biases": dict(
        n_groups=2, conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=True
    ),
    "clamped time steps, odd vocabulary": dict(
        time_step_limit=(0.01, 0.5), vocab_size=53, layer_norm_epsilon=1e-3
    ),
}


def hf_checkpoint(path, seed=0, **changes):
    """A random transformers mamba2 model, saved by transformers; returns the model."""
    config = transformers().Mamba2Config(
        **dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            state_size=16,
            n_groups=4,
            chunk_size=8,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        | changes
    )
    model = transformers().Mamba2ForCausalLM(config).eval()
    rng = np.random.default_rng(seed)
    with torch().no_grad():
        for name, parameter in model.named_parameters():
            value = random_weight(name, tuple(parameter.shape), rng)
            parameter.copy_(torch().from_numpy(value))
    model.save_pretrained(path)
    return model


def hf_logits(model, tokens):
    """Logits `[B, T, V]` of a full forward pass, without a cache."""
    with torch().no_grad():
        out = model(torch().tensor(np.asarray(tokens), dtype=torch().long), use_cache=False)
    return out.logits.float().numpy()


# Of mamba_ssm's MambaConfig and, under ssm_cfg, of its Mamba2.
MAMBA_SSM_CONFIGS = {
    "as released": {},
    "groups, D per channel, norm before gate": dict(
        ssm_cfg=dict(ngroups=2, D_has_hdim=True, norm_before_gate=True, d_conv=3),
        tie_embeddings=False,
    ),
    "d_ssm < d_inner, no norm, clamped": dict(
        ssm_cfg=dict(d_ssm=16, rmsnorm=False, dt_limit=[0.01, 0.5], conv_bias=False)
    ),
    "MLP, biases": dict(ssm_cfg=dict(bias=True, ngroups=2), d_intermediate=100),
}


def mamba_ssm_config(**changes):
    """A small config.json of mamba_ssm."""
    ssm = dict(layer="Mamba2", d_state=8, headdim=8) | changes.pop("ssm_cfg", {})
    return (
        dict(
            d_model=16,
            d_intermediate=0,
            n_layer=2,
            vocab_size=37,
            ssm_cfg=ssm,
            attn_layer_idx=[],
            attn_cfg={},
            rms_norm=True,
            residual_in_fp32=True,
            fused_add_norm=True,
            pad_vocab_size_multiple=16,
            tie_embeddings=True,
        )
        | changes
    )


def mamba_ssm_weights(config, seed=0):
    """Random weights by mamba_ssm's names, float32."""
    rng = np.random.default_rng(seed)
    weights = {
        name: random_weight(name, shape, rng)
        for name, shape in numpy_mamba_ssm.shapes(config).items()
    }
    if config["tie_embeddings"]:
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    return weights


def random_weight(name, shape, rng):
    """Weights that make every parameter matter."""
    noise = rng.normal(size=shape)
    if name.endswith("A_log"):
        value = rng.uniform(-1, 2, shape)
    elif name.endswith("dt_bias"):
        value = rng.uniform(-4, 1, shape)
    elif "norm" in name or name.endswith(".D"):
        value = 1 + 0.3 * noise
    elif "bias" in name:
        value = 0.2 * noise
    elif "conv1d" in name:
        value = 0.5 * noise
    elif "embedding" in name:
        value = noise
    else:
        value = noise * shape[-1] ** -0.5
    return value.astype(np.float32)


def write_safetensors(path, config, weights, name="model.safetensors"):
    """A checkpoint directory with these tensors."""
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in weights.items()}, path / name)
    config_name = "params.json" if "dim" in config else "config.json"
    (path / config_name).write_text(json.dumps(config))
    return path
