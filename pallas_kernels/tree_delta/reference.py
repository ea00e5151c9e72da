"""Specification of the gated delta rule: one node at a time, each from the state of its parent.

Arguments are those of `api`, with parents instead of masks, and all nodes are queries.
"""

import numpy as np

EPSILON = 1e-6


def normed(x):
    """Vectors `[..., S]` of length 1."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def step(q, k, v, g, beta, before):
    """One node of one head: y `[P]`, u `[P]` and the state after it `[P, S]`.

    g is a number, or one for each channel of k `[S]`.
    """
    q, k = normed(q) * q.shape[-1] ** -0.5, normed(k)
    decayed = np.exp(g) * before
    u = beta * (v - decayed @ k)
    after = decayed + np.outer(u, k)
    return after @ q, u, after


def tree_delta(q, k, v, g, beta, state, parents):
    """Outputs and u `[B, N, H, P]`, and the state after each node `[B, N, H, P, S]`.

    From q, k `[B, N, G, S]` (head h uses group `h // (H / G)`), v `[B, N, H, P]`, g `[B, N, H]`
    or `[B, N, H, S]`, beta `[B, N, H]`, the state `[B, H, P, S]` before the root and parents
    `[B, N]`, -1 above a root.
    """
    batch, num_nodes, num_heads, _ = v.shape
    heads_per_group = num_heads // k.shape[2]
    y, u = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((batch, num_nodes, *state.shape[1:]), state.dtype)
    for b, node, h in np.ndindex(batch, num_nodes, num_heads):
        above, group = parents[b, node], h // heads_per_group
        before = states[b, above, h] if above >= 0 else state[b, h]
        y[b, node, h], u[b, node, h], states[b, node, h] = step(
            *(q[b, node, group], k[b, node, group], v[b, node, h]),
            *(g[b, node, h], beta[b, node, h], before),
        )
    return y, u, states


def replay_delta(k, u, g, state, path):
    """The state `[B, H, P, S]` after the nodes that `path` marks, from the record of a tree.

    `path` `[B, N]` is a root-to-node path in node order; all False leaves the state as it is.
    """
    batch, num_nodes, num_heads, _ = u.shape
    heads_per_group = num_heads // k.shape[2]
    new_state = np.array(state)
    for b, node, h in np.ndindex(batch, num_nodes, num_heads):
        if path[b, node]:
            written = np.outer(u[b, node, h], normed(k[b, node, h // heads_per_group]))
            new_state[b, h] = np.exp(g[b, node, h]) * new_state[b, h] + written
    return new_state


def replay_tree_delta(prev_k, prev_u, prev_g, prev_path, q, k, v, g, beta, state, parents):
    """Outputs and u of a tree after the path of the tree before, and the state before its root."""
    new_state = replay_delta(prev_k, prev_u, prev_g, state, prev_path)
    y, u, _ = tree_delta(q, k, v, g, beta, new_state, parents)
    return y, u, new_state


def delta_chunks(q, k, v, g, beta, state, valid):
    """Outputs of a whole sequence, 0 where it is not `valid` `[B, T]`, and the state after it."""
    y, state = np.zeros_like(v), np.array(state)
    heads_per_group = v.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*v.shape[:3]):
        if valid[b, t]:
            group = h // heads_per_group
            y[b, t, h], _, state[b, h] = step(
                *(q[b, t, group], k[b, t, group], v[b, t, h]),
                *(g[b, t, h], beta[b, t, h], state[b, h]),
            )
    return y, state
