"""mamba_ssm's Mamba-2 language model in NumPy float64, from its description, on its own tensors.

Its packages need CUDA, so this stands in for them. Nothing here knows of the converter: the names
and the order of every fused projection are those of the upstream files.
"""

import numpy as np

_SSM = dict(d_conv=4, expand=2, headdim=64, d_state=128, ngroups=1, d_ssm=None, rmsnorm=True)
_SSM |= dict(norm_before_gate=False, D_has_hdim=False, bias=False, conv_bias=True)
_SSM |= dict(dt_limit=[0.0, np.inf])


def _sizes(config):
    ssm = _SSM | config["ssm_cfg"]
    inner = ssm["expand"] * config["d_model"]
    d_ssm = ssm["d_ssm"] or inner
    return ssm, inner, d_ssm, d_ssm // ssm["headdim"], ssm["ngroups"] * ssm["d_state"]


def shapes(config):
    """The tensors of a model's state dict."""
    ssm, inner, d_ssm, heads, bc = _sizes(config)
    d_model, multiple = config["d_model"], config["pad_vocab_size_multiple"]
    vocab = -(-config["vocab_size"] // multiple) * multiple
    hidden = -(-config["d_intermediate"] // 128) * 128
    out = {"backbone.embedding.weight": (vocab, d_model), "backbone.norm_f.weight": (d_model,)}
    for i in range(config["n_layer"]):
        mixer = {
            "in_proj.weight": (2 * inner + 2 * bc + heads, d_model),
            "conv1d.weight": (d_ssm + 2 * bc, 1, ssm["d_conv"]),
            "A_log": (heads,),
            "D": (d_ssm,) if ssm["D_has_hdim"] else (heads,),
            "dt_bias": (heads,),
            "out_proj.weight": (d_model, inner),
        }
        if ssm["conv_bias"]:
            mixer["conv1d.bias"] = (d_ssm + 2 * bc,)
        if ssm["bias"]:
            mixer |= {"in_proj.bias": (mixer["in_proj.weight"][0],), "out_proj.bias": (d_model,)}
        if ssm["rmsnorm"]:
            mixer["norm.weight"] = (d_ssm,)
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
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    hidden = w["backbone.embedding.weight"][np.asarray(tokens)]
    for i in range(config["n_layer"]):
        layer = f"backbone.layers.{i}"
        mixer = {
            name.removeprefix(f"{layer}.mixer."): value
            for name, value in w.items()
            if name.startswith(f"{layer}.mixer.")
        }
        hidden = hidden + _mixer(config, mixer, _rms(hidden, w[f"{layer}.norm.weight"]))
        if config["d_intermediate"]:
            normed = _rms(hidden, w[f"{layer}.norm2.weight"])
            up, gate = np.split(normed @ w[f"{layer}.mlp.fc1.weight"].T, 2, axis=1)
            hidden = hidden + (up * _silu(gate)) @ w[f"{layer}.mlp.fc2.weight"].T
    hidden = _rms(hidden, w["backbone.norm_f.weight"])
    return hidden @ w["lm_head.weight"].T


def _rms(x, scale, groups=1):
    parts = x.reshape(len(x), groups, -1)
    return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape) * scale


def _silu(x):
    return x / (1 + np.exp(-x))


def _mixer(config, w, u):
    ssm, inner, d_ssm, heads, bc = _sizes(config)
    length, branch = len(u), inner - d_ssm
    zxbcdt = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0.0)
    ends = np.cumsum([branch, branch, d_ssm, d_ssm + 2 * bc])
    z0, x0, z, xbc, dt = np.split(zxbcdt, ends, axis=1)
    dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), *ssm["dt_limit"])
    width = ssm["d_conv"]
    padded = np.concatenate([np.zeros((width - 1, xbc.shape[1])), xbc])
    conv = sum(padded[k : k + length] * w["conv1d.weight"][:, 0, k] for k in range(width))
    x, B, C = np.split(_silu(conv + w.get("conv1d.bias", 0.0)), [d_ssm, d_ssm + bc], axis=1)
    x = x.reshape(length, heads, -1)
    B, C = (v.reshape(length, ssm["ngroups"], -1) for v in (B, C))
    D = np.broadcast_to(w["D"].reshape(heads, -1), x.shape[1:])
    y = np.zeros_like(x)
    for h in range(heads):
        g = h // (heads // ssm["ngroups"])
        state = np.zeros((x.shape[2], B.shape[2]))
        for t in range(length):
            state = np.exp(-dt[t, h] * np.exp(w["A_log"][h])) * state
            state = state + dt[t, h] * np.outer(x[t, h], B[t, g])
            y[t, h] = state @ C[t, g] + D[h] * x[t, h]
    y = y.reshape(length, d_ssm)
    if not ssm["rmsnorm"]:
        y = y * _silu(z)
    elif ssm["norm_before_gate"]:
        y = _rms(y, w["norm.weight"], ssm["ngroups"]) * _silu(z)
    else:
        y = _rms(y * _silu(z), w["norm.weight"], ssm["ngroups"])
    y = np.concatenate([_silu(z0) * x0, y], axis=1)
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0)
