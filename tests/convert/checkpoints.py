"""Random checkpoints of mamba_ssm and MambaInLlama, written from their descriptions."""

import json

import numpy as np

from tests.convert import numpy_mamba_in_llama, numpy_mamba_ssm

# Fields of mamba_ssm's MambaConfig and, under ssm_cfg, of its Mamba2.
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
# With attention. RoPE on all channels makes every key bias matter.
MAMBA_SSM_HYBRID_CONFIGS = {
    "as mamba2attn-2.7b": dict(
        d_model=32,
        n_layer=3,
        attn_layer_idx=[1],
        attn_cfg=dict(
            causal=True,
            d_conv=4,
            head_dim=16,
            num_heads=3,
            out_proj_bias=False,
            qkv_proj_bias=False,
            rotary_emb_dim=8,
        ),
    ),
    "grouped queries, biases, MLP in every layer": dict(
        n_layer=3,
        d_intermediate=100,
        attn_layer_idx=[1],
        attn_cfg=dict(
            causal=True, num_heads=4, num_heads_kv=2, rotary_emb_dim=4, rotary_emb_base=100.0
        ),
        tie_embeddings=False,
    ),
    "MLP inside the attention": dict(
        attn_layer_idx=[0],
        attn_cfg=dict(
            causal=True,
            num_heads=2,
            mlp_dim=200,
            d_conv=3,
            softmax_scale=0.5,
            rotary_emb_dim=8,
        ),
    ),
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
    """Random float32 weights under mamba_ssm's names."""
    rng = np.random.default_rng(seed)
    weights = {
        name: random_weight(name, shape, rng)
        for name, shape in numpy_mamba_ssm.shapes(config).items()
    }
    if config["tie_embeddings"]:
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    return weights


# Changes to config.json and mamba_config.json. The sizes are tiny, yet all three cases of llama3's
# frequency scaling occur.
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
MAMBA_IN_LLAMA_CONFIGS = {
    "untied, llama3 rope": (dict(rope_scaling=_LLAMA3), {}),
    # The mixer's width and number of heads differ from the attention's.
    "tied, plain rope, d_xb < d_inner": (
        dict(tie_word_embeddings=True, num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-3),
        dict(d_inner=64, ssm_cfg=dict(expand=1, ngroups=8, d_state=8), attn_layers=[0]),
    ),
    # As STree's draft model, whose config.json has the attention settings of another model.
    "no attention, tied": (
        dict(tie_word_embeddings=True, num_attention_heads=6, head_dim=16, rope_scaling=_LLAMA3),
        dict(d_xb=8, attn_layers=[]),
    ),
}


def mamba_in_llama_configs(config=None, mamba_config=None):
    """A small config.json and mamba_config.json with these changes."""
    llama = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=[2, 3],
        torch_dtype="float32",
    ) | (config or {})
    mamba = dict(
        d_model=llama["hidden_size"],
        ssm_cfg=dict(expand=1, ngroups=4, d_state=8),
        rms_norm_eps=llama["rms_norm_eps"],
        vocab_size=None,
        d_inner=32,
        d_xb=16,
        intermediate_size=llama["intermediate_size"],
        hidden_act="silu",
        n_layer=llama["num_hidden_layers"],
        attn_layers=[1],
    ) | (mamba_config or {})
    return llama, mamba


def mamba_in_llama_weights(config, mamba_config, seed=0):
    """Random float32 weights under MambaInLlama's names, without a tied head."""
    rng = np.random.default_rng(seed)
    return {
        name: random_weight(name, shape, rng)
        for name, shape in numpy_mamba_in_llama.shapes(config, mamba_config).items()
    }


def mamba_in_llama_checkpoint(path, config, mamba_config, seed=0):
    """Writes a random checkpoint in the released layout; returns its weights by name."""
    weights = mamba_in_llama_weights(config, mamba_config, seed)
    write_safetensors(path, config, weights)
    (path / "mamba_config.json").write_text(json.dumps(mamba_config))
    return weights


def random_weight(name, shape, rng):
    """Random float32 weights, scaled so that every parameter changes the logits."""
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
    elif "embed" in name:
        value = noise
    elif "adapter" in name or name.endswith(".linear.weight"):
        # zamba2 normalises their output; larger weights amplify rounding errors a hundredfold.
        value = 0.4 * noise * shape[-1] ** -0.5
    else:
        value = noise * shape[-1] ** -0.5
    return value.astype(np.float32)


def write_safetensors(path, config, weights, name="model.safetensors"):
    """Writes a checkpoint directory with these tensors."""
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in weights.items()}, path / name)
    config_name = "params.json" if "dim" in config else "config.json"
    (path / config_name).write_text(json.dumps(config))
    return path
