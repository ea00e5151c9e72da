"""Nemotron-H and Puzzle in NumPy float64; layers have their block's fields."""

import numpy as np

from tests.numpy_parts import (
    attend,
    attention_shapes,
    float64,
    mamba2_scan,
    mamba2_shapes,
    rms_norm,
    sigmoid,
    silu,
    within,
)

_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def blocks(config):
    """The fields of each layer."""
    own = config.get("block_configs")
    if own is None:
        own = [{"block_type": kind} for kind in config["layers_block_type"]]
    own = [{name: value for name, value in block.items() if value is not None} for block in own]
    return [
        config | block | {"kind": _KINDS.get(kind := block["block_type"], kind)} for block in own
    ]


def shapes(config, prefix="model"):
    """Shapes of the tensors of a checkpoint."""
    width, vocab = config["hidden_size"], config["vocab_size"]
    out = {f"{prefix}.embeddings.weight": (vocab, width), f"{prefix}.norm_f.weight": (width,)}
    out["lm_head.weight"] = (vocab, width)
    of_kind = dict(mamba=_mamba_shapes, attention=_attention_shapes)
    of_kind |= dict(moe=moe_shapes, mlp=_mlp_shapes)
    for i, fields in enumerate(blocks(config)):
        out[f"{prefix}.layers.{i}.norm.weight"] = (width,)
        mixer = of_kind[fields["kind"]](fields)
        out |= {f"{prefix}.layers.{i}.mixer.{name}": shape for name, shape in mixer.items()}
    return out


def _mamba_shapes(c):
    heads, inner = c["mamba_num_heads"], c["mamba_num_heads"] * c["mamba_head_dim"]
    channels = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    return mamba2_shapes(c["hidden_size"], inner, channels, heads, c["conv_kernel"])


def _attention_shapes(c):
    heads = (c["num_attention_heads"], c["num_key_value_heads"])
    return attention_shapes(c["hidden_size"], *(count * c["head_dim"] for count in heads))


def _mlp_shapes(c, hidden=None, width=None):
    hidden, width = hidden or c["intermediate_size"], width or c["hidden_size"]
    return {"up_proj.weight": (hidden, width), "down_proj.weight": (width, hidden)}


def moe_shapes(c):
    width, count, latent = c["hidden_size"], c["n_routed_experts"], c.get("moe_latent_size")
    out = {"gate.weight": (count, width), "gate.e_score_correction_bias": (count,)}
    if latent:
        out |= {
            "fc1_latent_proj.weight": (latent, width),
            "fc2_latent_proj.weight": (width, latent),
        }
    parts = {f"experts.{i}": (c["moe_intermediate_size"], latent or width) for i in range(count)}
    parts["shared_experts"] = (c["moe_shared_expert_intermediate_size"], width)
    for part, sizes in parts.items():
        out |= {f"{part}.{name}": shape for name, shape in _mlp_shapes(c, *sizes).items()}
    return out


def logits(config, weights, tokens, prefix="model"):
    """Logits `[T, V]` of one sequence."""
    w = float64(weights)
    hidden = w[f"{prefix}.embeddings.weight"][np.asarray(tokens)]
    run = dict(mamba=_mamba, attention=_attention, moe=moe, mlp=_mlp)
    for i, c in enumerate(blocks(config)):
        layer = f"{prefix}.layers.{i}"
        mixer = within(f"{layer}.mixer.", w)
        normed = rms_norm(hidden, w[f"{layer}.norm.weight"], c["layer_norm_epsilon"])
        hidden = hidden + run[c["kind"]](c, mixer, normed)
    hidden = rms_norm(hidden, w[f"{prefix}.norm_f.weight"], config["layer_norm_epsilon"])
    return hidden @ w["lm_head.weight"].T


def _mamba(c, w, u):
    heads, size, groups = c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"]
    inner, bc = heads * size, groups * c["ssm_state_size"]
    z, xbc, dt = np.split(u @ w["in_proj.weight"].T, [inner, 2 * inner + 2 * bc], axis=1)
    limits = c.get("time_step_limit", (0.0, np.inf))
    y = mamba2_scan(w, xbc, dt, limits, inner, heads, groups)
    y = rms_norm(y * silu(z), w["norm.weight"], c["layer_norm_epsilon"], groups)
    return y @ w["out_proj.weight"].T


def _attention(c, w, u):
    length, size = len(u), c["head_dim"]
    q, k, v = ((u @ w[f"{name}_proj.weight"].T).reshape(length, -1, size) for name in "qkv")
    out = attend(q, k, v, size**-0.5, c.get("sliding_window"))
    return out.reshape(length, -1) @ w["o_proj.weight"].T


def _mlp(c, w, u, part=""):
    return np.maximum(u @ w[f"{part}up_proj.weight"].T, 0) ** 2 @ w[f"{part}down_proj.weight"].T


def moe(c, w, u):
    """A mixture of experts, in groups of which some are open."""
    out = _mlp(c, w, u, "shared_experts.")
    latent = c.get("moe_latent_size")
    inputs = u @ w["fc1_latent_proj.weight"].T if latent else u
    routed = np.zeros_like(inputs)
    for t, token in enumerate(u):
        scores = sigmoid(w["gate.weight"] @ token)
        preference = scores + w["gate.e_score_correction_bias"]
        of_groups = preference.reshape(c.get("n_group", 1), -1)
        best_two = np.sort(of_groups, axis=1)[:, -2:].sum(axis=1)
        of_groups[np.argsort(-best_two)[c.get("topk_group", 1) :]] = -np.inf
        chosen = np.argsort(-preference)[: c["num_experts_per_tok"]]
        share = scores[chosen]
        if c.get("norm_topk_prob", True):
            share = share / (share.sum() + 1e-20)
        for expert, weight in zip(chosen, share * c.get("routed_scaling_factor", 1.0), strict=True):
            routed[t] += weight * _mlp(c, w, inputs[t : t + 1], f"experts.{expert}.")[0]
    return out + (routed @ w["fc2_latent_proj.weight"].T if latent else routed)
