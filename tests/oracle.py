"""An independent implementation of the whole model: NumPy, float64, one token at a time.

Written from the description of the block, not from the library's code; it shares nothing with it
but the names of the parameters.
"""

import jax
import numpy as np
from flax import nnx


def parameters(model):
    """The model's weights as nested dicts of float64 arrays."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf.astype("float32"), np.float64),
        nnx.to_pure_dict(nnx.state(model)),
    )


def logits(model, tokens):
    """Logits `[T, V]` of one sequence of token ids."""
    config, p = model.config, parameters(model)
    hidden = p["embedding"][np.asarray(tokens)] * config.embedding_multiplier
    for i, kind in enumerate(config.layers):
        block = p["blocks"][i]
        normed = _rms(hidden, block["norm_scale"], config.norm_eps)
        if kind == "mlp":
            gate, up = np.split(normed @ block["mixer"]["in_proj"]["kernel"], 2, axis=1)
            out = (_silu(gate) * up) @ block["mixer"]["out_proj"]["kernel"]
        else:
            out = _mixer(config.mamba2, block["mixer"], normed)
        hidden = hidden + config.residual_multiplier * out
    hidden = _rms(hidden, p["final_norm_scale"], config.norm_eps)
    head = p["embedding"] if config.tie_embeddings else p["head"]
    return hidden @ head.T * config.logits_multiplier


def _rms(x, scale, eps, groups=1):
    parts = x.reshape(*x.shape[:-1], groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return parts.reshape(x.shape) * scale


def _silu(x):
    return x / (1 + np.exp(-x))


def _mixer(c, p, u):
    length = len(u)
    projected = (u * c.input_multiplier) @ p["in_proj"]["kernel"]
    if c.in_proj_bias:
        projected = projected + p["in_proj"]["bias"]
    x_heads = c.num_x_heads or c.num_heads
    b_groups = c.num_b_groups or c.num_groups
    inner = c.num_heads * c.head_dim
    sizes = [
        c.mlp_dim,
        c.mlp_dim,
        inner,
        x_heads * c.head_dim,
        b_groups * c.state_size,
        c.num_groups * c.state_size,
        c.num_heads,
    ]
    z0, x0, z, x, B, C, dt = np.split(projected, np.cumsum(sizes)[:-1], axis=1)
    z, x, B, C, dt = (v * m for v, m in zip((z, x, B, C, dt), c.section_multipliers, strict=True))
    dt = np.clip(np.log1p(np.exp(dt + p["dt_bias"])), *c.dt_limit)

    def repeat(v, size, count):
        heads = v.reshape(length, -1, size)
        return np.repeat(heads, count // heads.shape[1], axis=1).reshape(length, -1)

    if c.repeat_before_conv:
        x, B = repeat(x, c.head_dim, c.num_heads), repeat(B, c.state_size, c.num_groups)
    widths = [x.shape[1], B.shape[1]]
    inputs = np.concatenate([x, B, C], axis=1)
    padded = np.concatenate([np.zeros((c.conv_width - 1, inputs.shape[1])), inputs])
    conv = np.stack(
        [(padded[t : t + c.conv_width] * p["conv_weight"]).sum(0) for t in range(length)]
    )
    if c.conv_bias:
        conv = conv + p["conv_bias"]
    x, B, C = np.split(_silu(conv), np.cumsum(widths), axis=1)
    x, B = repeat(x, c.head_dim, c.num_heads), repeat(B, c.state_size, c.num_groups)
    x = x.reshape(length, c.num_heads, c.head_dim)
    B, C = (v.reshape(length, c.num_groups, c.state_size) for v in (B, C))

    A = -np.exp(p["A_log"])
    D = np.broadcast_to(p["D"].reshape(c.num_heads, -1), x.shape[1:])
    state = np.zeros((c.num_heads, c.head_dim, c.state_size))
    y = np.zeros_like(x)
    for t in range(length):
        for h in range(c.num_heads):
            g = h * c.num_groups // c.num_heads
            state[h] = np.exp(dt[t, h] * A[h]) * state[h] + dt[t, h] * np.outer(x[t, h], B[t, g])
            y[t, h] = state[h] @ C[t, g] + D[h] * x[t, h]
    y = y.reshape(length, inner)
    groups = c.norm_groups or c.num_groups
    if c.norm == "gate_then_norm":
        y = _rms(y * _silu(z), p["norm_scale"], c.norm_eps, groups)
    elif c.norm == "norm_then_gate":
        y = _rms(y, p["norm_scale"], c.norm_eps, groups) * _silu(z)
    else:
        y = y * _silu(z)
    y = np.concatenate([_silu(z0) * x0, y], axis=1)
    out = y @ p["out_proj"]["kernel"]
    return out + p["out_proj"]["bias"] if c.out_proj_bias else out
