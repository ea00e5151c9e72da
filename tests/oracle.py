"""An independent model: NumPy, float64, one token at a time."""

import math

import jax
import numpy as np
from flax import nnx

from stree_jax.models import MlpConfig
from tests.numpy_parts import (
    attend,
    causal_conv,
    delta_rule,
    llama3_frequencies,
    log_softmax,
    rms_norm,
    rope_frequencies,
    rotate,
    sigmoid,
    silu,
    state_space,
)


def parameters(model):
    """The model's weights as nested dicts of float64 arrays."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf.astype("float32"), np.float64),
        nnx.to_pure_dict(nnx.state(model)),
    )


def logits(model, tokens):
    """Logits `[T, V]` of one sequence of token ids."""
    config, p = model.config, parameters(model)
    head = p["embedding"] if config.tie_embeddings else p["head"]
    return hidden_of(config, p, tokens) @ head.T * config.logits_multiplier


def hidden_of(config, p, tokens):
    """States `[T, M]` after the final norm, by a config and parameters."""
    embedded = p["embedding"][np.asarray(tokens)] * config.embedding_multiplier
    hidden, extra, num_shared = embedded, 0.0, 0
    for i, layer in enumerate(config.layers):
        kind = layer.kind
        block = p["blocks"][i]
        w = block["mixer"]
        if kind == "shared":
            shared = p["shared"][num_shared % config.shared.num_blocks]
            both = np.concatenate([hidden, embedded], axis=1)
            extra = _shared(config, shared, w, both)
            num_shared += 1
            continue
        u = hidden + extra
        u = u if layer.norm_after else rms_norm(u, block["norm_scale"], config.norm_eps)
        if kind == "mlp":
            out = _mlp(layer, w, u)
        elif kind == "moe":
            out = np.stack([_moe(layer, w, token) for token in u])
        elif kind == "attention":
            out = _attention(layer, w, u)
        elif kind == "parallel":
            out = _mixer(layer.mamba2, w["mamba2"], u)
            out = out + _attention(layer.attention, w["attention"], u)
        elif kind == "gated_delta":
            out = _gated_delta(layer, w, u)
        elif kind == "latent_attention":
            out = _latent_attention(layer, w, u)
        elif kind == "short_conv":
            b, c, x = np.split(_linear(w["in_proj"], u), 3, axis=1)
            y = causal_conv(b * x, w["conv_weight"].T[:, None], w.get("conv_bias", 0.0))
            out = _linear(w["out_proj"], c * y)
        else:
            out = _mixer(layer, w, u)
        if layer.norm_after:
            out = rms_norm(out, block["norm_scale"], config.norm_eps)
        elif config.sandwich_norms:
            out = rms_norm(out, block["post_norm_scale"], config.norm_eps)
        hidden, extra = hidden + config.residual_multiplier * out, 0.0
    return rms_norm(hidden, p["final_norm_scale"], config.norm_eps)


def log_probs(model, tokens):
    """Log-probabilities `[T, V]` of the tokens after each, without padded rows of the embedding."""
    return log_softmax(logits(model, tokens)[:, : model.config.vocab_size])


def _linear(w, x):
    return x @ w["kernel"] + w.get("bias", 0.0)


def _activate(name, x):
    if name == "gelu":
        return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2
    return np.maximum(x, 0) ** 2 if name == "relu2" else silu(x)


def _mlp(c, w, u, extra=0.0):
    hidden = _linear(w["in_proj"], u) + extra
    if c.gated:
        gate, up = np.split(hidden, 2, axis=-1)
        gate, limit = _activate(c.activation, gate * c.gate_multiplier), c.limit or np.inf
        hidden = np.minimum(gate, limit) * np.clip(up, -limit, limit)
    else:
        hidden = _activate(c.activation, hidden)
    return _linear(w["out_proj"], hidden) * c.output_multiplier


def _moe(c, w, token):
    """Of one token `[M]`."""
    scores = token @ w["router"]
    if c.router == "softmax":
        chosen = np.argsort(-scores)[: c.num_active]
        weights = np.exp(scores[chosen] - scores[chosen].max())
        weights = weights / weights.sum()
    else:
        scores = sigmoid(scores)
        preference = scores + w["correction"]
        groups = np.split(preference, c.num_router_groups)
        if c.num_router_groups > 1:
            best_two = [np.sort(group)[-2:].sum() for group in groups]
            for group in np.argsort(best_two)[: c.num_router_groups - c.num_active_groups]:
                groups[group][:] = -np.inf
        chosen = np.argsort(-np.concatenate(groups))[: c.num_active]
        weights = scores[chosen]
        if c.normalise:
            weights = weights / (weights.sum() + c.norm_eps)
        weights = weights * c.scale
    x = token if c.latent_size is None else _linear(w["latent_in"], token)
    y, mlp = 0.0, MlpConfig(1, activation=c.activation, gated=c.gated, limit=c.limit)
    for expert, weight in zip(chosen, weights, strict=True):
        one = {
            "in_proj": {"kernel": w["experts_in"][expert]},
            "out_proj": {"kernel": w["experts_out"][expert]},
        }
        y = y + weight * _mlp(mlp, one, x)
    y = y if c.latent_size is None else _linear(w["latent_out"], y)
    if c.shared_size:
        shared = _mlp(c.shared_mlp, w["shared"], token)
        y = y + (sigmoid(token @ w["shared_gate"]) if c.shared_gate else 1.0) * shared
    return y


def _shared(config, shared, w, both):
    x = rms_norm(both, shared["norm_scale"], config.norm_eps)

    def adapter(a, x):
        return _linear(a["up"], _linear(a["down"], x))

    extra = 0.0
    if config.shared.attention_adapters:
        extra = np.concatenate([adapter(w["qkv_adapters"][i], x) for i in range(3)], axis=1)
    y = _attention(config.attention, shared["attention"], x, extra)
    y = rms_norm(y, shared["mlp_norm_scale"], config.norm_eps)
    return _linear(w["out_proj"], _mlp(config.mlp, shared["mlp"], y, adapter(w["mlp_adapter"], y)))


def _attention(c, w, u, extra=0.0):
    length = len(u)
    projected = _linear(w["in_proj"], u * c.input_multiplier)
    inner, keys_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    gates = (c.num_heads if c.gate_per_head else inner) * c.output_gate
    ends = np.cumsum([gates, inner + 2 * keys_size, c.mlp_dim])
    output_gate, qkv, gate, up = np.split(projected, ends, axis=1)
    qkv = qkv + extra
    if c.conv_width:
        qkv = causal_conv(qkv, w["conv_weight"].T[:, None], w["conv_bias"])
    q, k, v = (
        part.reshape(length, -1, c.head_dim)
        for part in np.split(qkv, [inner, inner + keys_size], axis=1)
    )
    if c.qk_norm_eps is not None:
        q, k = (
            rms_norm(
                x.reshape(length, -1) if c.qk_norm_spans else x,
                w[f"{name}_norm_scale"],
                c.qk_norm_eps,
            ).reshape(x.shape)
            for name, x in (("q", q), ("k", k))
        )
    if c.rotary_dim:
        rope = rope_frequencies(c.rotary_dim, c.rope_theta)
        if (s := c.rope_scaling) is not None:
            limits = (s.low_freq_factor, s.high_freq_factor, s.original_length)
            rope = llama3_frequencies(rope, s.factor, *limits)
        rope = np.where(np.arange(len(rope)) < (c.rotary_pairs or len(rope)), rope, 0.0)
        q, k = rotate(q, rope), rotate(k, rope)
    scale = c.head_dim**-0.5 if c.scale is None else c.scale
    y = attend(q, k * c.key_multiplier, v, scale, c.window).reshape(length, -1)
    if c.output_gate:
        y = y * np.repeat(sigmoid(output_gate), inner // gates, axis=1)
    y = np.concatenate([y, silu(gate) * up], axis=1)
    return _linear(w["out_proj"], y) * c.output_multiplier


def _latent_attention(c, w, u):
    """With keys and values of every head expanded from the latents."""
    length, projected = len(u), _linear(w["in_proj"], u)
    ends = np.cumsum([*c.column_sizes[:2], c.latent_size])
    gates, query, latents, key = np.split(projected, ends, axis=1)
    if c.query_rank is not None:
        query = _linear(w["query_up"], rms_norm(query, w["query_norm_scale"], c.norm_eps))
    latents = rms_norm(latents, w["latent_norm_scale"], c.norm_eps)
    q, turned = np.split(query.reshape(length, c.num_heads, -1), [c.head_dim], axis=2)
    key = np.repeat(key[:, None], c.num_heads, axis=1)
    if c.rope_theta is not None:
        rope = rope_frequencies(c.rotary_dim, c.rope_theta)
        turned, key = rotate(turned, rope), rotate(key, rope)
    k = np.concatenate([np.einsum("tl,hnl->thn", latents, w["key_up"]), key], axis=2)
    v = np.einsum("tl,hlv->thv", latents, w["value_up"])
    v = np.pad(v, ((0, 0), (0, 0), (0, k.shape[2] - c.value_dim)))
    y = attend(np.concatenate([q, turned], axis=2), k, v, k.shape[2] ** -0.5)[..., : c.value_dim]
    y = y * sigmoid(gates)[..., None] if c.output_gate else y
    return _linear(w["out_proj"], y.reshape(length, -1))


def _mixer(c, p, u):
    length = len(u)
    projected = _linear(p["in_proj"], u * c.input_multiplier)
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
    conv = causal_conv(inputs, p["conv_weight"].T[:, None], p.get("conv_bias", 0.0))
    x, B, C = np.split(silu(conv), np.cumsum(widths), axis=1)
    x, B = repeat(x, c.head_dim, c.num_heads), repeat(B, c.state_size, c.num_groups)
    x = x.reshape(length, c.num_heads, c.head_dim)
    B, C = (v.reshape(length, c.num_groups, c.state_size) for v in (B, C))
    D = p["D"].reshape(c.num_heads, -1)
    y = state_space(x, dt, p["A_log"], B, C, D).reshape(length, inner)
    groups = c.norm_groups or c.num_groups
    if c.norm == "gate_then_norm":
        y = rms_norm(y * silu(z), p["norm_scale"], c.norm_eps, groups)
    elif c.norm == "norm_then_gate":
        y = rms_norm(y, p["norm_scale"], c.norm_eps, groups) * silu(z)
    else:
        y = y * silu(z)
    y = np.concatenate([silu(z0) * x0, y], axis=1)
    return _linear(p["out_proj"], y) * c.output_multiplier


def _gated_delta(c, p, u):
    length, values, keys = len(u), c.num_heads * c.head_dim, c.num_groups * c.state_size
    sizes = [c.num_heads, values, values, keys, keys]
    if c.by_channel:
        sizes[:2] = [c.gate_rank or c.num_heads * c.state_size, c.gate_rank or values]
    b, z, v, k, q, a = np.split(u @ p["in_proj"]["kernel"], np.cumsum(sizes), axis=1)
    if c.by_channel:
        a, b = b, a
    if c.gate_rank:
        a, z = _linear(p["a_up"], a), _linear(p["z_up"], z)
    inputs = np.concatenate([v, k, q], axis=1)
    conv = silu(causal_conv(inputs, p["conv_weight"].T[:, None], 0.0))
    v, k, q = np.split(conv, [values, values + keys], axis=1)
    v = v.reshape(length, c.num_heads, c.head_dim)
    q, k = (x.reshape(length, c.num_groups, c.state_size) for x in (q, k))
    a, rate = (a + p["dt_bias"]).reshape(length, c.num_heads, -1), np.exp(p["A_log"])[:, None]
    bounded = c.lower_bound is not None
    g = c.lower_bound * sigmoid(rate * a) if bounded else -rate * np.log1p(np.exp(a))
    y = delta_rule(q, k, v, g, c.beta_scale * sigmoid(b))
    y = rms_norm(y, p["norm_scale"], c.norm_eps).reshape(length, values)
    return _linear(p["out_proj"], y * (sigmoid(z) if c.by_channel else silu(z)))
