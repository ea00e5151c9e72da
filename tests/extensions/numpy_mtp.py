"""A multi-token-prediction head in NumPy float64, on tensors with the names of Nemotron-3's files.

One text, a loop over entries. It shares no code with the library: the source is the format page.
"""

import numpy as np


class Head:
    """A head and its target's embedding and output head.

    Args:
        weights: tensors by name, and the target's `embedding` and `lm_head`, `[V, M]` each.
        num_heads, num_kv_heads: of the attention; `head_dim` follows.
        groups, active_groups, active, scale: of the router.
        eps: epsilon of the norms.
    """

    def __init__(
        self, weights, *, num_heads, num_kv_heads, groups, active_groups, active, scale, eps
    ):
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.groups, self.active_groups, self.active = groups, active_groups, active
        self.scale, self.eps = scale, eps

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean() + self.eps) * self.w[name]

    def joined(self, token, hidden):
        """eh_proj [enorm(embedding) ; hnorm(h)], the embedding first."""
        e = self.norm(self.w["embedding"][token], "mtp.layers.0.enorm.weight")
        h = self.norm(np.asarray(hidden, np.float64), "mtp.layers.0.hnorm.weight")
        return self.w["mtp.layers.0.eh_proj.weight"] @ np.concatenate([e, h])

    def keys_values(self, x):
        u = self.norm(x, "mtp.layers.0.norm.weight")
        return [
            (self.w[f"mtp.layers.0.mixer.{name}_proj.weight"] @ u).reshape(self.num_kv_heads, -1)
            for name in "kv"
        ]

    def output(self, x, entries):
        """The head's output for an entry; `entries` are keys and values up to it."""
        u = self.norm(x, "mtp.layers.0.norm.weight")
        q = (self.w["mtp.layers.0.mixer.q_proj.weight"] @ u).reshape(self.num_heads, -1)
        y = []
        for head in range(self.num_heads):
            group = head // (self.num_heads // self.num_kv_heads)
            scores = np.array([k[group] @ q[head] for k, _ in entries]) * q.shape[1] ** -0.5
            share = np.exp(scores - scores.max())
            share /= share.sum()
            y.append(sum(s * v[group] for s, (_, v) in zip(share, entries, strict=True)))
        x = x + self.w["mtp.layers.0.mixer.o_proj.weight"] @ np.concatenate(y)
        x = x + self.experts(self.norm(x, "mtp.layers.1.norm.weight"))
        return self.norm(x, "mtp.layers.1.final_layernorm.weight")

    def experts(self, u):
        mixer = {
            name.removeprefix("mtp.layers.1.mixer."): value
            for name, value in self.w.items()
            if name.startswith("mtp.layers.1.mixer.")
        }

        def mlp(x, name):
            hidden = np.maximum(mixer[f"{name}.up_proj.weight"] @ x, 0) ** 2
            return mixer[f"{name}.down_proj.weight"] @ hidden

        scores = 1 / (1 + np.exp(-mixer["gate.weight"] @ u))
        preference = scores + mixer["gate.e_score_correction_bias"]
        of_groups = preference.reshape(self.groups, -1)
        best_two = np.sort(of_groups, axis=1)[:, -2:].sum(axis=1)
        closed = np.argsort(-best_two)[self.active_groups :]
        of_groups[closed] = -np.inf
        chosen = np.argsort(-of_groups.ravel())[: self.active]
        share = scores[chosen] / (scores[chosen].sum() + 1e-20) * self.scale
        latent = "fc1_latent_proj.weight" in mixer
        x = mixer["fc1_latent_proj.weight"] @ u if latent else u
        routed = sum(s * mlp(x, f"experts.{e}") for s, e in zip(share, chosen, strict=True))
        if latent:
            routed = mixer["fc2_latent_proj.weight"] @ routed
        return routed + mlp(u, "shared_experts")

    def text_entries(self, text, hidden):
        """Keys and values of the entries of a text: tokens 1, 2, ... and the states before them."""
        pairs = zip(text[1:], hidden[: len(text) - 1], strict=True)
        return [self.keys_values(self.joined(token, h)) for token, h in pairs]

    def logits(self, text, hidden, path):
        """Logits after the text, and after each token of a path of drafts.

        Args:
            text: at least two tokens; the last is the root.
            hidden: the target's states after its final norm, at all tokens but the last.
            path: tokens below the root.
        """
        entries = self.text_entries(text[:-1], hidden)
        out, above = [], hidden[len(text) - 2]
        for token in [text[-1], *path]:
            x = self.joined(token, above)
            entries.append(self.keys_values(x))
            above = self.output(x, entries)
            out.append(self.w["lm_head"] @ above)
        return np.array(out)
