"""MambaInLlama's hybrids in NumPy float64, on tensors with its own names.

A Llama in which some layers have a Mamba-2 mixer instead of attention. The mixer has one head for
each query head of the Llama it was distilled from. x and B replace values and keys and have as few
heads; C replaces the queries. This follows the training and evaluation code. Upstream's fast
inference code ignores `rope_scaling`.
"""

import numpy as np

from tests.numpy_parts import (
    attend,
    attention_shapes,
    causal_conv,
    float64,
    llama3_frequencies,
    mamba2_shapes,
    rms_norm,
    rope_frequencies,
    rotate,
    silu,
    state_space,
)

_GATED_NORM_EPS = 1e-5  # hard-coded; rms_norm_eps does not change it


def _mixer_sizes(mamba_config):
    ssm = dict(d_conv=4) | mamba_config["ssm_cfg"]
    assert mamba_config["d_inner"] == ssm["ngroups"] * ssm["d_state"]
    return mamba_config["d_inner"], mamba_config["d_xb"], ssm["ngroups"], ssm["d_conv"]


def _attention_sizes(config):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return heads, config["num_key_value_heads"], head_dim


def shapes(config, mamba_config):
    """Shapes of the tensors of a checkpoint, without a tied head."""
    d_model, hidden = config["hidden_size"], config["intermediate_size"]
    inner, d_xb, mixer_heads, width = _mixer_sizes(mamba_config)
    heads, kv_heads, head_dim = _attention_sizes(config)
    mixer = mamba2_shapes(d_model, inner, inner + 2 * d_xb, mixer_heads, width)
    attention = attention_shapes(d_model, heads * head_dim, kv_heads * head_dim)
    out = {"model.embed_tokens.weight": (config["vocab_size"], d_model)}
    out["model.norm.weight"] = (d_model,)
    for i in range(mamba_config["n_layer"]):
        layer = f"model.layers.{i}"
        if i in mamba_config["attn_layers"]:
            out |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        else:
            out |= {f"{layer}.mamba.{name}": shape for name, shape in mixer.items()}
        out |= {f"{layer}.mlp.{name}_proj.weight": (hidden, d_model) for name in ("gate", "up")}
        out[f"{layer}.mlp.down_proj.weight"] = (d_model, hidden)
        norms = ("input_layernorm", "post_attention_layernorm")
        out |= {f"{layer}.{name}.weight": (d_model,) for name in norms}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], d_model)
    return out


def logits(config, mamba_config, weights, tokens, plain_rope=False):
    """Logits `[T, V]` of one sequence; `plain_rope` ignores `rope_scaling`."""
    w = float64(weights)
    eps = config["rms_norm_eps"]
    embedding = w["model.embed_tokens.weight"]
    hidden = embedding[np.asarray(tokens)]
    for i in range(mamba_config["n_layer"]):
        layer = f"model.layers.{i}"
        normed = rms_norm(hidden, w[f"{layer}.input_layernorm.weight"], eps)
        if i in mamba_config["attn_layers"]:
            hidden = hidden + _attention(config, w, f"{layer}.self_attn", normed, plain_rope)
        else:
            hidden = hidden + _mixer(mamba_config, w, f"{layer}.mamba", normed)
        normed = rms_norm(hidden, w[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = normed @ w[f"{layer}.mlp.gate_proj.weight"].T
        up = normed @ w[f"{layer}.mlp.up_proj.weight"].T
        hidden = hidden + (silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    hidden = rms_norm(hidden, w["model.norm.weight"], eps)
    return hidden @ (embedding if config["tie_word_embeddings"] else w["lm_head.weight"]).T


def frequencies(config, plain_rope=False):
    """Radians per position for each channel pair of an attention head."""
    plain = rope_frequencies(_attention_sizes(config)[2], config["rope_theta"])
    scaling = config.get("rope_scaling")
    if plain_rope or scaling is None or scaling["rope_type"] == "default":
        return plain
    assert scaling["rope_type"] == "llama3"
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return llama3_frequencies(plain, *(scaling[name] for name in names))


def _attention(config, w, name, u, plain_rope):
    length, head_dim = len(u), _attention_sizes(config)[2]
    q, k, v = (
        (u @ w[f"{name}.{part}_proj.weight"].T).reshape(length, -1, head_dim) for part in "qkv"
    )
    rope = frequencies(config, plain_rope)
    context = attend(rotate(q, rope), rotate(k, rope), v, head_dim**-0.5)
    return context.reshape(length, -1) @ w[f"{name}.o_proj.weight"].T


def _mixer(mamba_config, w, name, u):
    length, (inner, d_xb, heads, _) = len(u), _mixer_sizes(mamba_config)
    zxbcdt = u @ w[f"{name}.in_proj.weight"].T
    z, xbc, dt = np.split(zxbcdt, [inner, 2 * inner + 2 * d_xb], axis=1)
    dt = np.log1p(np.exp(dt + w[f"{name}.dt_bias"]))
    xbc = silu(causal_conv(xbc, w[f"{name}.conv1d.weight"], w[f"{name}.conv1d.bias"]))
    x, B, C = (
        part.reshape(length, -1, inner // heads) for part in np.split(xbc, [d_xb, 2 * d_xb], axis=1)
    )
    x, B = (np.repeat(part, inner // d_xb, axis=1) for part in (x, B))
    y = state_space(x, dt, w[f"{name}.A_log"], B, C, w[f"{name}.D"][:, None]).reshape(length, inner)
    y = rms_norm(y * silu(z), w[f"{name}.norm.weight"], _GATED_NORM_EPS, heads)
    return y @ w[f"{name}.out_proj.weight"].T
