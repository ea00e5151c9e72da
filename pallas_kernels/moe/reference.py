"""Specification of `expert_mlps`: one expert at a time, for the tokens that chose it."""

import numpy as np


def expert_mlps(x, weights, chosen, experts_in, experts_out, *, activation, gated, limit=None):
    """The weighted sum of each token's experts `[tokens, M]`.

    From x `[tokens, M]`, weights and chosen `[tokens, A]`, experts_in `[experts, M, X]` and
    experts_out `[experts, F, M]`, where `X = 2 F` if gated, else F; the activation is "silu" or
    "relu2". For the limit see `numerics.gated`.
    """
    function = {
        "silu": lambda v: v / (1 + np.exp(-v)),
        "relu2": lambda v: np.maximum(v, 0) ** 2,
    }[activation]
    y = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, choices = np.nonzero(chosen == expert)
        hidden = x[tokens] @ experts_in[expert]
        if gated:
            gate, up = np.split(hidden, 2, axis=-1)
            most = np.inf if limit is None else limit
            hidden = np.minimum(function(gate), most) * np.clip(up, -most, most)
        else:
            hidden = function(hidden)
        # A token may choose an expert twice.
        np.add.at(y, tokens, weights[tokens, choices, None] * (hidden @ experts_out[expert]))
    return y
