"""Heads in NumPy float64, from the format page alone."""

import dataclasses

import numpy as np

from pallas_kernels.tree_attention.reference import tree_attention
from stree_jax.testing import HYBRIDS
from tests import oracle
from tests.convert import checkpoints
from tests.convert.numpy_nemotron_h import moe
from tests.numpy_parts import (
    attend,
    float64,
    rms_norm,
    rope_frequencies,
    rotate,
    sigmoid,
    silu,
    within,
)


class Head:
    """A head of its files, with the target's `embedding` and `lm_head`."""

    def __init__(self, config, weights):
        self.config, self.w = config, float64(weights)
        self.eps = config.get("layer_norm_epsilon", config.get("rms_norm_eps"))

    def norm(self, x, name):
        return rms_norm(x, self.w[f"{name}.weight"], self.eps)

    def state(self, target):
        """The head's input from a state of the target."""
        return target

    def projected(self, name, entries):
        """Queries, keys or values `[T, heads, E]` of the attention's inputs."""
        rows = entries @ self.w[f"{self.attention}.{name}_proj.weight"].T
        return rows.reshape(len(entries), -1, self.config["head_dim"])

    def qkv(self, entries):
        return [self.projected(name, entries) for name in "qkv"]

    def layer(self, entries, residual):
        """The head's output at the last entry."""
        y = attend(*self.qkv(entries), self.config["head_dim"] ** -0.5)[-1].ravel()
        y = self.w[f"{self.attention}.o_proj.weight"] @ (y * self.gate(entries[-1]))
        return self.after(residual + y)

    def gate(self, entry):
        """What scales the attention's outputs."""
        return 1.0

    def entry(self, token, state):
        """A product with [norm(embedding) ; norm(h)], the embedding first; and before its norm."""
        of_token, of_state, joined, *after = self.names
        parts = self.norm(self.w["embedding"][token], of_token), self.norm(state, of_state)
        x = self.w[f"{joined}.weight"] @ np.concatenate(parts)
        return self.norm(x, *after) if after else x, x

    def mlp(self, u, part):
        """Of one row or several."""
        gate, up, down = (self.w[f"{part}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return (silu(u @ gate) * (u @ up)) @ down

    def output(self, above):
        return self.w["lm_head"] @ above

    def entries(self, text, states):
        """The attention's inputs for all tokens of a text but the first."""
        pairs = zip(text[1:], states, strict=False)
        return [self.entry(token, self.state(state))[0] for token, state in pairs]

    def logits(self, text, states, path):
        """Logits after a text, and after each token of a path of drafts."""
        entries, out = self.entries(text[:-1], states), []
        above = self.state(states[len(text) - 2])
        for token in [text[-1], *path]:
            entry, residual = self.entry(token, above)
            entries.append(entry)
            above = self.layer(np.array(entries), residual)
            out.append(self.output(above))
        return np.array(out)


class Mtp(Head):
    """A head of Nemotron-3."""

    attention = "mtp.layers.0.mixer"
    names = (*(f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "norm")),)

    def after(self, x):
        experts = within("mtp.layers.1.mixer.", self.w)
        x = x + moe(self.config, experts, self.norm(x, "mtp.layers.1.norm")[None])[0]
        return self.norm(x, "mtp.layers.1.final_layernorm")


class Qwen(Head):
    """A head of Qwen3.5 or Qwen3-Next: its norms multiply by 1 + w."""

    attention = "mtp.layers.0.self_attn"
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
    names += ("mtp.layers.0.input_layernorm",)

    def norm(self, x, name):
        return rms_norm(x, 1 + self.w[f"{name}.weight"], self.eps)

    def by_head(self, entries):
        """The rows of q_proj: of each head its query, then its gate."""
        rows = entries @ self.w[f"{self.attention}.q_proj.weight"].T
        return rows.reshape(*entries.shape[:-1], -1, 2, self.config["head_dim"])

    def gate(self, entry):
        return sigmoid(self.by_head(entry)[:, 1].ravel())

    def qkv(self, entries):
        rope, size = self.config["rope_parameters"], self.config["head_dim"]
        turned = round(size * rope["partial_rotary_factor"])
        frequencies = rope_frequencies(turned, rope["rope_theta"])
        q, k = (
            rms_norm(x, 1 + self.w[f"{self.attention}.{name}_norm.weight"], self.eps)
            for name, x in (
                ("q", self.by_head(entries)[:, :, 0]),
                ("k", self.projected("k", entries)),
            )
        )
        return rotate(q, frequencies), rotate(k, frequencies), self.projected("v", entries)

    def after(self, x):
        part = "mtp.layers.0.mlp"
        u = self.norm(x, "mtp.layers.0.post_attention_layernorm")
        if "num_experts" not in self.config:
            return self.norm(x + self.mlp(u, part), "mtp.norm")
        w = within(f"{part}.", self.w)
        scores = w["gate.weight"] @ u
        chosen = np.argsort(-scores)[: self.config["num_experts_per_tok"]]
        shares = np.exp(scores[chosen] - scores.max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            gate, up = np.split(w["experts.gate_up_proj"][expert] @ u, 2)
            x = x + share * (w["experts.down_proj"][expert] @ (silu(gate) * up))
        opened = sigmoid(w["shared_expert_gate.weight"] @ u)
        return self.norm(x + opened * self.mlp(u, f"{part}.shared_expert"), "mtp.norm")


class Ling(Head):
    """A head of Ling 3, whose layer has the weights of the target's last one."""

    names = ("enorm", "hnorm", "eh_proj")

    def __init__(self, config, weights):
        layer = f"model.layers.{config['num_hidden_layers']}."
        super().__init__(config, within(layer, weights) | weights)
        target = checkpoints.random_model(HYBRIDS["bailing_hybrid"])
        blocks = [*oracle.parameters(target)["blocks"].values()][-2:]
        self.p = {"blocks": blocks, "final_norm_scale": self.w["final_layernorm.weight"]}
        attention, experts = target.config.layers[-2:]  # whose limits the head does not have
        experts = dataclasses.replace(experts, limit=None, shared_limit=None)
        self.layers = target.config.with_layers((attention, experts))

    def qkv(self, entries):
        """They are compared by what follows from them."""
        return ()

    def layer(self, entries, residual):
        p = self.p | {"embedding": entries}
        return oracle.hidden_of(self.layers, p, range(len(entries)))[-1]


class Eagle3(Head):
    """An EAGLE-3 head; its states of the target are those of inner layers, concatenated."""

    attention = "midlayer.self_attn"

    def state(self, target):
        return self.w["fc.weight"] @ target

    def qkv(self, entries):
        frequencies = rope_frequencies(self.config["head_dim"], self.config["rope_theta"])
        q, k, v = super().qkv(entries)
        return rotate(q, frequencies), rotate(k, frequencies), v

    def entry(self, token, state):
        e = self.norm(self.w["embedding"][token], "midlayer.input_layernorm")
        normed = self.norm(state, "midlayer.hidden_norm")
        before = self.config.get("norm_before_residual", False)
        return np.concatenate([e, normed]), normed if before else state

    def after(self, x):
        return x + self.mlp(self.norm(x, "midlayer.post_attention_layernorm"), "midlayer.mlp")

    def output(self, above):
        logits = self.w["lm_head.weight"] @ self.norm(above, "norm")
        full = np.full(len(self.w["t2d"]), -np.inf)
        full[np.arange(len(logits)) + self.w["d2t"].astype(int)] = logits
        return full


class Medusa:
    """Medusa heads: `kernel` `[heads, M, M]`, `bias` `[heads, M]`, and the target's `lm_head`."""

    def __init__(self, weights):
        self.w = float64(weights)

    def logits(self, text, states, path):
        h, w = np.asarray(states[len(text) - 2], np.float64), self.w
        return np.array(
            [
                w["lm_head"] @ (h + silu(h @ kernel + bias))
                for kernel, bias in zip(w["kernel"], w["bias"], strict=True)
            ]
        )[: len(path) + 1]


class DFlash(Head):
    """A DFlash or DSpark head of its files; the embeddings are the target's or its own."""

    def __init__(self, config, weights):
        super().__init__(config, weights)
        self.fields = config.get("dflash_config") or config
        self.dspark = config["architectures"] == ["Qwen3DSparkModel"]
        self.second = config["architectures"] == ["DFlash2DraftModel"]
        names = {"embed_tokens.weight": "embedding", "lm_head.weight": "lm_head"}
        self.w |= {new: self.w[name] for name, new in names.items() if name in self.w}

    def qkv_of(self, name, rows, first):
        """Queries, keys or values of rows, the first at this position."""
        size = self.config["head_dim"]
        rows = rows @ self.w[f"{self.attention}.{name}_proj.weight"].T
        heads = rows.reshape(len(rows), rows.shape[1] // size, size)
        if name == "v":
            return heads
        heads = rms_norm(heads, self.w[f"{self.attention}.{name}_norm.weight"], self.eps)
        padded = np.pad(heads, ((first, 0), (0, 0), (0, 0)))
        return rotate(padded, rope_frequencies(size, self.config["rope_theta"]))[first:]

    def context(self, states):
        """What the layers make their keys and values of, for tokens with such inner states."""
        return rms_norm(states @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.eps)

    def cached(self, layer, states):
        """Keys and values of a layer."""
        self.attention = f"layers.{layer}.self_attn"
        return [self.qkv_of(name, self.context(states), 0) for name in "kv"]

    def around(self, name, u, x, side):
        """A convolution of the rows x before (0) or after (1) a part with the input u."""
        if not self.second:
            return x
        size, width = self.fields["conv_group_size"], self.fields["conv_kernel_size"]
        taps = u @ self.w[f"{name}.kernel_projection.weight"].T
        taps = taps.reshape(len(u), 2, width, -1)[:, side]
        y = np.zeros_like(x)
        for place in range(len(x)):
            for back in range(min(width, place + 1)):
                kernel = self.w[f"{name}.base_kernel"][side, back]
                y[place] += (kernel + np.repeat(taps[place, back], size)) * x[place - back]
        return y

    def outputs(self, text, states):
        """Those of the block at the text's last token, at the places with drafts."""
        config, before = self.config, len(text) - 1
        size = self.fields.get("block_size") or config["block_size"]
        x = self.w["embedding"][[text[-1]] + [self.fields["mask_token_id"]] * (size - 1)]
        for layer, kind in enumerate(config["layer_types"]):
            cached = [rows.swapaxes(0, 1)[None] for rows in self.cached(layer, states[:before])]
            u = self.norm(x, f"layers.{layer}.input_layernorm")
            part = f"layers.{layer}.attention_conv"
            inputs = self.around(part, u, u, 0)
            qkv = [self.qkv_of(name, inputs, before)[None] for name in "qkv"]
            slides = kind == "sliding_attention"
            causal = slides and config.get("is_causal", True)
            y = tree_attention(
                *(*qkv, *cached, np.array([before])),
                np.tri(size, dtype=bool)[None] if causal else np.ones((1, size, size), bool),
                scale=config["head_dim"] ** -0.5,
                window=config["sliding_window"] if slides else None,
                is_block=slides and not causal,
            )
            y = y.reshape(size, -1) @ self.w[f"{self.attention}.o_proj.weight"].T
            x = x + self.around(part, u, y, 1)
            u = self.norm(x, f"layers.{layer}.post_attention_layernorm")
            part = f"layers.{layer}.mlp"
            y = self.mlp(self.around(f"{part}_conv", u, u, 0), part)
            x = x + self.around(f"{part}_conv", u, y, 1)
        return self.norm(x, "norm")[not config.get("sample_from_anchor", self.dspark) :]

    def confidence(self, text, states, path):
        """The chance of a draft after a text, and after each token of a path of drafts."""
        rows = self.outputs(text, states)[: len(path) + 1]
        if self.config["confidence_head_with_markov"]:
            words = self.w["markov_head.markov_w1.weight"][[text[-1], *path]]
            rows = np.concatenate([rows, words], axis=1)
        weight, bias = (self.w[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        return sigmoid(rows @ weight[0] + bias)

    def logits(self, text, states, path):
        outputs = self.outputs(text, states)[: len(path) + 1]
        rows = outputs @ self.w["lm_head"].T
        if self.second:
            before, after, project = (
                self.w[f"candidate_selector.{name}"]
                for name in (
                    *("predecessor_codebook", "successor_codebook"),
                    "hidden_projection.weight",
                )
            )
            pairs = (before[[text[-1], *path]] * (outputs @ project.T)) @ after.T
            least = np.sort(rows)[:, -self.fields["selector_top_k"], None]
            scores = np.where(rows >= least, np.exp(rows + pairs), 0)
            mass = np.where(rows >= least, np.exp(rows), 0).sum(-1, keepdims=True)
            scores *= mass / scores.sum(-1, keepdims=True)
            rows = np.where(rows >= least, np.log(np.maximum(scores, 1e-300)), rows)
        if self.dspark:
            first, second = (self.w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            rows = rows + first[[text[-1], *path]] @ second.T
        return rows
