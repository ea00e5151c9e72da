"""Building blocks of the NumPy models: one sequence, float64."""

import numpy as np

from pallas_kernels.ssd.reference import ssd
from pallas_kernels.tree_attention.reference import tree_attention
from pallas_kernels.tree_delta.reference import delta_chunks


def float64(weights):
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, scale, eps, groups=1):
    """RMS norm of `[..., D]`, separately for each group of channels."""
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)).reshape(x.shape) * scale


def causal_conv(x, weight, bias):
    """Causal depthwise convolution of `[T, D]` with `[D, 1, K]`; the last tap is the present."""
    width = weight.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return sum(padded[k : k + len(x)] * weight[:, 0, k] for k in range(width)) + bias


def state_space(x, dt, A_log, B, C, D):
    """Of `x` `[T, H, P]`, `dt` `[T, H]`, `B`, `C` `[T, G, N]`, `D` `[H, 1 or P]`."""
    state = np.zeros((1, *x.shape[1:], B.shape[2]))
    return ssd(x[None], dt[None], -np.exp(A_log), B[None], C[None], D, state)[0][0]


def mamba2_scan(w, xbc, dt, limits, inner, heads, groups):
    """The convolution and the scan `[T, inner]` of a Mamba-2 mixer, by its tensors' names."""
    dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), *limits)
    xbc = silu(causal_conv(xbc, w["conv1d.weight"], w.get("conv1d.bias", 0.0)))
    x, B, C = np.split(xbc, [inner, (inner + xbc.shape[1]) // 2], axis=1)
    x, B, C = (v.reshape(len(v), n, -1) for v, n in ((x, heads), (B, groups), (C, groups)))
    return state_space(x, dt, w["A_log"], B, C, w["D"].reshape(heads, -1)).reshape(-1, inner)


def delta_rule(q, k, v, g, beta):
    """Of `q`, `k` `[T, G, S]` before the norm, `v` `[T, H, P]`, others `[T, H]`."""
    state, valid = np.zeros((1, *v.shape[1:], q.shape[2])), np.ones((1, len(v)), bool)
    return delta_chunks(*(each[None] for each in (q, k, v, g, beta)), state, valid)[0][0]


def rope_frequencies(size, base):
    """Radians per position for each of the `size / 2` channel pairs."""
    return base ** (-np.arange(0, size, 2) / size)


def llama3_frequencies(plain, factor, low, high, original_length):
    """Pairs with few turns are slowed down, those between are interpolated."""
    turns = original_length * plain / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * plain + (1 - keep) * plain / factor


def rotate(x, frequencies):
    """RoPE on the first channels of `[T, H, D]`, the pairs i and i + half; the others stay."""
    half = len(frequencies)
    angle = np.arange(len(x))[:, None, None] * frequencies
    first, second = slice(0, half), slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    out[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
    return out


def attend(q, k, v, scale, window=None):
    """Causal attention `[T, H, D]` with fewer key heads `[T, G, D]`: head h reads h // (H / G)."""
    nothing, mask = np.zeros((1, k.shape[1], 0, k.shape[2])), np.tri(len(q), dtype=bool)
    before = nothing, nothing, np.zeros(1, int)
    given = (each[None] for each in (q, k, v))
    return tree_attention(*given, *before, mask[None], scale=scale, window=window)[0]


def mamba2_shapes(width, inner, conv, heads, conv_width):
    """Shapes of a Mamba-2 mixer of `inner` channels, with `conv` ones in its convolution."""
    return {
        "in_proj.weight": (inner + conv + heads, width),
        "conv1d.weight": (conv, 1, conv_width),
        "conv1d.bias": (conv,),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (width, inner),
    }


def attention_shapes(width, queries, keys):
    """Shapes of attention without biases, by its tensors' names."""
    return {
        "q_proj.weight": (queries, width),
        "k_proj.weight": (keys, width),
        "v_proj.weight": (keys, width),
        "o_proj.weight": (width, queries),
    }


def within(prefix, values):
    """The entries whose names begin with the prefix, without it."""
    return {name[len(prefix) :]: values[name] for name in values if name.startswith(prefix)}
