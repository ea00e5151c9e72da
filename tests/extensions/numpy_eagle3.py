"""An EAGLE-3 head in NumPy float64, on tensors with the names of its files.

One text, a loop over entries. It shares no code with the library: the source is the format page.
"""

import numpy as np


class Head:
    """A head, and the embedding that it uses.

    Args:
        weights: tensors by name, and `embedding` `[V, M]`.
        num_heads, num_kv_heads, theta: of the attention.
        eps: epsilon of the norms.
        norm_before_residual: see the config.
    """

    def __init__(self, weights, *, num_heads, num_kv_heads, theta, eps, norm_before_residual):
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.num_heads, self.num_kv_heads, self.theta = num_heads, num_kv_heads, theta
        self.eps, self.norm_before_residual = eps, norm_before_residual

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean() + self.eps) * self.w[f"{name}.weight"]

    def state(self, inner):
        """The head's state of three states of the target, concatenated."""
        return self.w["fc.weight"] @ np.asarray(inner, np.float64)

    def rotated(self, x, position):
        half = x.shape[1] // 2
        angle = position * self.theta ** (-np.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        turned = [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
        return np.concatenate(turned, axis=1)

    def joined(self, token, state):
        e = self.norm(self.w["embedding"][token], "midlayer.input_layernorm")
        return np.concatenate([e, self.norm(state, "midlayer.hidden_norm")])

    def heads(self, x, name, count):
        return (self.w[f"midlayer.self_attn.{name}_proj.weight"] @ x).reshape(count, -1)

    def entry(self, token, state, position):
        """Keys and values."""
        x = self.joined(token, state)
        keys = self.rotated(self.heads(x, "k", self.num_kv_heads), position)
        return keys, self.heads(x, "v", self.num_kv_heads)

    def output(self, token, state, entries):
        """The head's output before its last norm; `entries` end with the token's own."""
        x = self.joined(token, state)
        q = self.rotated(self.heads(x, "q", self.num_heads), len(entries) - 1)
        y = []
        for head in range(self.num_heads):
            group = head // (self.num_heads // self.num_kv_heads)
            scores = np.array([k[group] @ q[head] for k, _ in entries]) * q.shape[1] ** -0.5
            share = np.exp(scores - scores.max())
            share /= share.sum()
            y.append(sum(s * v[group] for s, (_, v) in zip(share, entries, strict=True)))
        residual = x[len(x) // 2 :] if self.norm_before_residual else state
        x = residual + self.w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(y)
        u = self.norm(x, "midlayer.post_attention_layernorm")
        gate = self.w["midlayer.mlp.gate_proj.weight"] @ u
        up = self.w["midlayer.mlp.up_proj.weight"] @ u
        return x + self.w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def logits(self, text, inner, path):
        """Logits after the text, and after each token of a path of drafts.

        Args:
            text: at least two tokens; the last is the root.
            inner: the target's inner states `[T, 3 M]`, at all tokens but the last.
            path: tokens below the root.
        """
        pairs = zip(text[1:-1], inner, strict=False)
        entries = [self.entry(t, self.state(s), i) for i, (t, s) in enumerate(pairs)]
        out, state = [], self.state(inner[len(text) - 2])
        for token in [text[-1], *path]:
            entries.append(self.entry(token, state, len(entries)))
            state = self.output(token, state, entries)
            own = self.w["lm_head.weight"] @ self.norm(state, "norm")
            full = np.full(len(self.w["t2d"]), -np.inf)
            full[np.arange(len(own)) + self.w["d2t"].astype(int)] = own
            out.append(full)
        return np.array(out)
