"""mamba_ssm's models, which need CUDA, in NumPy float64."""

import numpy as np

from tests.numpy_parts import (
    attend,
    causal_conv,
    float64,
    mamba2_scan,
    mamba2_shapes,
    rms_norm,
    rope_frequencies,
    rotate,
    silu,
    within,
)

_SSM = dict(d_conv=4, expand=2, headdim=64, d_state=128, ngroups=1, d_ssm=None, rmsnorm=True)
_SSM |= dict(norm_before_gate=False, D_has_hdim=False, bias=False, conv_bias=True)
_SSM |= dict(dt_limit=[0.0, np.inf])
_ATTENTION = dict(num_heads_kv=None, head_dim=None, mlp_dim=0, d_conv=0, softmax_scale=None)
_ATTENTION |= dict(qkv_proj_bias=True, out_proj_bias=True)
_ATTENTION |= dict(rotary_emb_dim=0, rotary_emb_base=10000.0)
_EPS = 1e-5


def _sizes(config):
    ssm = _SSM | config["ssm_cfg"]
    inner = ssm["expand"] * config["d_model"]
    d_ssm = ssm["d_ssm"] or inner
    return ssm, inner, d_ssm, d_ssm // ssm["headdim"], ssm["ngroups"] * ssm["d_state"]


def _attention_sizes(config):
    """The settings, and the widths of queries, keys and both halves of the MLP."""
    attention = _ATTENTION | config["attn_cfg"]
    assert attention["causal"]  # upstream's default is False, which no language model uses
    heads = attention["num_heads"]
    attention["num_heads_kv"] = attention["num_heads_kv"] or heads
    attention["head_dim"] = attention["head_dim"] or config["d_model"] // heads
    queries = heads * attention["head_dim"]
    keys = attention["num_heads_kv"] * attention["head_dim"]
    return attention, queries, keys, -(-attention["mlp_dim"] // 256) * 256


def _mixer_shapes(config):
    ssm, inner, d_ssm, heads, bc = _sizes(config)
    d_model = config["d_model"]
    rows = 2 * inner + 2 * bc + heads
    out = mamba2_shapes(d_model, d_ssm, d_ssm + 2 * bc, heads, ssm["d_conv"])
    out |= {"in_proj.weight": (rows, d_model), "out_proj.weight": (d_model, inner)}
    if ssm["D_has_hdim"]:
        out["D"] = (d_ssm,)
    if ssm["bias"]:
        out |= {"in_proj.bias": (rows,), "out_proj.bias": (d_model,)}
    left_out = {"conv1d.bias": not ssm["conv_bias"], "norm.weight": not ssm["rmsnorm"]}
    return {name: shape for name, shape in out.items() if not left_out.get(name)}


def _attention_shapes(config):
    attention, queries, keys, mlp = _attention_sizes(config)
    d_model, qkv = config["d_model"], queries + 2 * keys
    out = {"in_proj.weight": (qkv + mlp, d_model), "out_proj.weight": (d_model, queries + mlp // 2)}
    if attention["qkv_proj_bias"]:
        out["in_proj.bias"] = (qkv + mlp,)
    if attention["out_proj_bias"]:
        out["out_proj.bias"] = (d_model,)
    if attention["d_conv"]:
        out |= {"conv1d.weight": (qkv, 1, attention["d_conv"]), "conv1d.bias": (qkv,)}
    return out


def shapes(config):
    """Shapes of the tensors in a state dict."""
    d_model, multiple = config["d_model"], config["pad_vocab_size_multiple"]
    vocab = -(-config["vocab_size"] // multiple) * multiple
    hidden = -(-config["d_intermediate"] // 128) * 128
    out = {"backbone.embedding.weight": (vocab, d_model), "backbone.norm_f.weight": (d_model,)}
    for i in range(config["n_layer"]):
        is_attention = i in config["attn_layer_idx"]
        mixer = _attention_shapes(config) if is_attention else _mixer_shapes(config)
        layer = f"backbone.layers.{i}"
        out |= {f"{layer}.mixer.{name}": shape for name, shape in mixer.items()}
        out[f"{layer}.norm.weight"] = (d_model,)
        if hidden:
            out[f"{layer}.norm2.weight"] = (d_model,)
            out[f"{layer}.mlp.fc1.weight"] = (2 * hidden, d_model)
            out[f"{layer}.mlp.fc2.weight"] = (d_model, hidden)
    if not config["tie_embeddings"]:
        out["lm_head.weight"] = (vocab, d_model)
    return out


def logits(config, weights, tokens):
    """Logits `[T, V]` of one sequence."""
    w = float64(weights)
    hidden = w["backbone.embedding.weight"][np.asarray(tokens)]
    for i in range(config["n_layer"]):
        layer = f"backbone.layers.{i}"
        mixer = within(f"{layer}.mixer.", w)
        mix = _attention if i in config["attn_layer_idx"] else _mixer
        hidden = hidden + mix(config, mixer, rms_norm(hidden, w[f"{layer}.norm.weight"], _EPS))
        if config["d_intermediate"]:
            normed = rms_norm(hidden, w[f"{layer}.norm2.weight"], _EPS)
            up, gate = np.split(normed @ w[f"{layer}.mlp.fc1.weight"].T, 2, axis=1)
            hidden = hidden + (up * silu(gate)) @ w[f"{layer}.mlp.fc2.weight"].T
    hidden = rms_norm(hidden, w["backbone.norm_f.weight"], _EPS)
    return hidden @ w.get("lm_head.weight", w["backbone.embedding.weight"]).T


def _mixer(config, w, u):
    ssm, inner, d_ssm, heads, bc = _sizes(config)
    branch, groups = inner - d_ssm, ssm["ngroups"]
    zxbcdt = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0.0)
    ends = np.cumsum([branch, branch, d_ssm, d_ssm + 2 * bc])
    z0, x0, z, xbc, dt = np.split(zxbcdt, ends, axis=1)
    y = mamba2_scan(w, xbc, dt, ssm["dt_limit"], d_ssm, heads, groups)
    if not ssm["rmsnorm"]:
        y = y * silu(z)
    elif ssm["norm_before_gate"]:
        y = rms_norm(y, w["norm.weight"], _EPS, groups) * silu(z)
    else:
        y = rms_norm(y * silu(z), w["norm.weight"], _EPS, groups)
    y = np.concatenate([silu(z0) * x0, y], axis=1)
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0)


def _attention(config, w, u):
    attention, queries, keys, mlp = _attention_sizes(config)
    length, qkv = len(u), queries + 2 * keys
    projected = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0.0)
    qkv, up, gate = np.split(projected, [qkv, qkv + mlp // 2], axis=1)
    if attention["d_conv"]:
        qkv = causal_conv(qkv, w["conv1d.weight"], w["conv1d.bias"])  # without an activation
    q, k, v = (
        part.reshape(length, -1, attention["head_dim"])
        for part in np.split(qkv, [queries, queries + keys], axis=1)
    )
    if attention["rotary_emb_dim"]:
        rope = rope_frequencies(attention["rotary_emb_dim"], attention["rotary_emb_base"])
        q, k = rotate(q, rope), rotate(k, rope)
    scale = attention["softmax_scale"] or attention["head_dim"] ** -0.5
    context = attend(q, k, v, scale).reshape(length, queries)
    context = np.concatenate([context, up * silu(gate)], axis=1)
    return context @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0)
