"""Traversal verification: drafts are tested from the leaves up, by the whole path above them.

Traversal verification (Weng et al., 2025, arXiv:2505.12398); on a chain it is block verification
(Sun et al., 2024, arXiv:2403.10444).

A node with token t is accepted with probability `a = min(1, a' p(t) / q(t))`, where a', p and q
belong to its parent. The children of a node may use the part `min(a p, q)` of its distribution.
When one is left without success, the residual `max(a p - q, 0)`, of mass S, remains: p becomes the
residual over S, and a becomes `S / (S + 1 - a)`. A node is tested after all nodes below it, and the
first that passes ends the search.

Nodes below a rejected draft can thus still be accepted, so this accepts at least as much as
testing from the root down.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.decoding.verifiers.base import Verifier
from stree_jax.decoding.verifiers.reject import Drafted, Walk, check_drawn, verify_by, without
from stree_jax.tree import TreeTopology


@dataclasses.dataclass(frozen=True)
class Traverse(Verifier):
    """Tests drafts from the leaves up; reads how they were drawn from `DraftTree.drawn`."""

    name: str = "traversal"

    def check(self, drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        if drawn.by_depth and drawn.is_sampled and not (temperature_is_zero or topology.width == 1):
            rule = "multi_step" if drawn.kind == "iid" else drawn.kind
            raise ValueError(
                f"verifier {self.name!r} is not exact where nodes of a depth share their draws, as"
                f" with {drawn}; use {rule!r}, or a chain"
            )
        kinds = "iid", "without_replacement"
        check_drawn(self.name, kinds, drawn, topology, temperature_is_zero)

    def verify(
        self, draft: DraftTree, logits: Array, step: Step, topology: TreeTopology
    ) -> Verdict:
        return verify_by(traverse, self.name, draft, logits, step, topology)


def traverse(row: Drafted, *, replace: bool) -> Walk:
    """Tests the nodes of a tree, each after the nodes below it."""
    uniforms, tokens, tree, draft_log_probs, log_prob_row, target_log_probs = row

    # The residual after a rejected child depends on its token, not on the nodes below it. So one
    # pass from the root down computes the residuals of all nodes, and the tests come afterwards.
    def leave(node: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        accept_prob, probs, log_q = carry
        parent, token, valid = tree.parents[node], tokens[node], tree.valid[node]
        a, p, q = accept_prob[parent], probs[parent], log_q[parent]
        accepted = jnp.exp(jnp.minimum(jnp.log(a) + jnp.log(p[token]) - q[token], 0.0))
        remaining = jnp.maximum(a * p - jnp.exp(q), 0.0)
        mass = remaining.sum()
        # If a is 1 and nothing is left, p equals q, and only rounding can have rejected the child.
        total = mass + (1 - a)
        left = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), a)
        residual = jnp.where(mass > 0, remaining / jnp.where(mass > 0, mass, 1.0), p)
        accept_prob = accept_prob.at[parent].set(jnp.where(valid, left, a))
        accept_prob = accept_prob.at[node].set(jnp.where(valid, accepted, 0))
        probs = probs.at[parent].set(jnp.where(valid, residual, p))
        if not replace:
            log_q = log_q.at[parent].set(jnp.where(valid, without(q, token), q))
        return accept_prob, probs, log_q

    num_nodes = tokens.shape[0]
    start = (
        jnp.zeros(num_nodes, jnp.float32).at[0].set(1),
        jnp.exp(target_log_probs),
        draft_log_probs[jnp.maximum(log_prob_row, 0)],
    )
    accept_prob, probs, _ = lax.fori_loop(1, num_nodes, leave, start)

    # A node's position in the order of tests: after all nodes below it, after its earlier siblings
    # and all nodes below them, and after the same of its ancestors.
    nodes = np.arange(num_nodes)[None]
    sizes = (tree.ancestor_mask & tree.valid[:, None]).sum(axis=0, dtype=jnp.int32)
    earlier = (tree.parents[None] == tree.parents[:, None]) & (nodes < nodes.T) & tree.valid[None]
    before = jnp.where(earlier, sizes[None], 0).sum(axis=1, dtype=jnp.int32)
    above = jnp.where(tree.ancestor_mask, before[None], 0).sum(axis=1, dtype=jnp.int32)
    place = above + sizes
    passed = tree.valid & ((uniforms < accept_prob) | (nodes[0] == 0))
    last = lax.argmin(jnp.where(passed, place, num_nodes + 1), 0, jnp.int32)
    return Walk(last, probs[last], tree.valid & (place <= place[last]), accept_prob)
