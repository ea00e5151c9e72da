"""Verifiers: from the target's opinion of a draft tree to one path and the next token.

All walk from the root; at node u, p is the target's distribution after temperature and filters and
q the draft's after the same. Two kinds:

*Following* picks one token at every node, the best (greedy) or one sampled from p (target-only),
and follows the child that carries it. Exact for any tree, because the drafts have no part in the
choice.

*Testing* tries the children in the order drawn: the child with token t is accepted with probability
`min(1, p(t) / q(t))`, else p becomes `norm(max(p - q, 0))`. It accepts more than following, and is
exact only for children drawn from q in the way that the rule assumes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import best_of
from stree_jax.array_types import Array, Float, Float32, Int, Key
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.state import DraftTree, Sampling, Verdict
from stree_jax.tree import Tree, TreeTopology

# How a drafter chose the children of a node.
CHILDREN = ("top_k", "iid", "without_replacement")


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A verification rule.

    Attributes:
        name: what users call it.
        greedy: for temperature 0; the others are for temperatures above.
        tests: accepts by the ratio p / q, and so needs the draft's distributions.
        exact_for: kinds of children for which the output has the target's distribution.
        chains_only: for trees where no node has two children.
    """

    name: str
    greedy: bool = False
    tests: bool = False
    exact_for: tuple[str, ...] = CHILDREN
    chains_only: bool = False

    def check(self, children: str, topology: TreeTopology, *, greedy: bool) -> None:
        """Refuses a pairing that would not reproduce the target.

        Raises:
            ValueError: naming the pairing and what to use instead.
        """
        if greedy and self.tests:
            raise ValueError(f"verifier {self.name!r} needs temperature > 0; use 'greedy' at 0")
        if not greedy and self.greedy:
            raise ValueError("verifier 'greedy' is exact at temperature 0 only; use 'target_only'")
        branching = max(map(len, topology.children))
        if self.chains_only and branching > 1:
            raise ValueError(
                f"verifier {self.name!r} takes chains,"
                f" this tree has nodes with {branching} children;"
                " use 'multi_step' or 'without_replacement'"
            )
        # A lone child is drawn the same way with and without replacement.
        drawn = children != "top_k" and branching <= 1
        if children not in self.exact_for and not (drawn and self.tests):
            raise ValueError(
                f"verifier {self.name!r} is not exact for children = {children!r}, only for"
                f" {list(self.exact_for)}; use 'target_only', which is exact for any"
            )

    def verify(
        self,
        keys: Key[Array, " B"],
        draft: DraftTree,
        target: Float[Array, "B N W"],
        sampling: Sampling,
        *,
        vocab_size: int,
        filtered: bool,
    ) -> Verdict:
        """Picks a path of each row's tree. Rows use their own keys, one of which is used up.

        The greedy verifier takes the target's best tokens, the others its logits.

        Raises:
            ValueError: it is the other of the two.
        """
        with jax.named_scope("verify"):
            if self.greedy:
                return follow(draft, best_of(target, vocab_size)[0])
            log_probs = token_log_probs(target, sampling, vocab_size=vocab_size, filtered=filtered)
            if not self.tests:
                chosen = jax.vmap(lambda key, row: jax.random.categorical(key, row))(
                    keys, log_probs
                )
                return follow(draft, chosen.astype(jnp.int32))
            return self._test(keys, draft, log_probs)

    def _test(self, keys: Array, draft: DraftTree, log_probs: Array) -> Verdict:
        num_nodes = draft.tokens.shape[1]

        def row(key, tokens, tree, draft_log_probs, target_log_probs):
            test_key, next_key = jax.random.split(key)
            walk = try_children(
                jax.random.uniform(test_key, (num_nodes,)),
                tokens,
                tree,
                draft_log_probs,
                draft.rows,
                target_log_probs,
                replace="iid" in self.exact_for,
            )
            token = jax.random.categorical(next_key, jnp.log(walk.probs)).astype(jnp.int32)
            return Verdict(walk.last, tree.depth[walk.last], token)

        return jax.vmap(row)(keys, draft.tokens, draft.tree, draft.log_probs, log_probs)


VERIFIERS = {
    verifier.name: verifier
    for verifier in (
        Verifier("greedy", greedy=True),
        Verifier("target_only"),
        Verifier("multi_step", tests=True, exact_for=("iid",)),
        Verifier("without_replacement", tests=True, exact_for=("without_replacement",)),
        Verifier("chain", tests=True, exact_for=("iid",), chains_only=True),
    )
}


def follow(draft: DraftTree, chosen: Int[Array, "B N"]) -> Verdict:
    """Follows, from the root on, the first child whose token is the one chosen at its parent."""
    tree, tokens = draft.tree, draft.tokens
    nodes = jnp.arange(tokens.shape[1])
    at_parent = jnp.take_along_axis(chosen, jnp.maximum(tree.parents, 0), axis=1)
    # Of siblings that carry the same token only the first counts: trying the second too, with a
    # choice of its own below, would favour whichever goes deeper.
    same = (
        (tree.parents[:, :, None] == tree.parents[:, None, :])
        & (tokens[:, :, None] == tokens[:, None, :])
        & (nodes < nodes[:, None])
        & tree.valid[:, None, :]
    )
    match = tree.valid & (tokens == at_parent) & ~same.any(-1) & (nodes > 0)
    reached = ~(tree.ancestor_mask & ~match[:, None, :] & (nodes > 0)).any(-1) & tree.valid
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=-1).astype(jnp.int32)
    depth, token = (
        jnp.take_along_axis(values, last[:, None], axis=1)[:, 0] for values in (tree.depth, chosen)
    )
    return Verdict(last, depth, token)


class Walk(NamedTuple):
    """One row's walk through its tree, with the odds of every test on the way."""

    last: Int[Array, ""]
    probs: Float32[Array, " V"]  # what the token after `last` is drawn from
    tested: Array  # [N] bool
    accept_prob: Float32[Array, " N"]  # of the tested nodes


def try_children(
    uniforms: Float32[Array, " N"],
    tokens: Int[Array, " N"],
    tree: Tree,
    draft_log_probs: Float32[Array, "R V"],
    rows: Int[Array, " N"],
    target_log_probs: Float32[Array, "N V"],
    *,
    replace: bool,
) -> Walk:
    """Tests children in the order drawn.

    With replacement this is SpecInfer's multi-step speculative sampling, without it recursive
    rejection sampling (RSD).

    One pass over the nodes does: children come after their parent, so once the walk moves to a
    node, its children are still ahead, and the siblings it left behind are no longer children of
    where it stands.

    Args:
        uniforms: node i passes its test if `uniforms[i]` is below its odds.
        tokens, tree: one row of a `DraftTree`, without the batch axis.
        draft_log_probs, rows: the draft's distributions; node i drew from
            `draft_log_probs[rows[i]]`.
        target_log_probs: the target's.
        replace: children were drawn independently; False: a drawn token could not be drawn again,
            so that after a rejection the draft's distribution loses it.
    """

    def try_node(node, carry):
        at, p, log_q, tested, odds = carry
        token = tokens[node]
        is_child = (tree.parents[node] == at) & tree.valid[node]
        # q stays in logs: at low temperature the second child is drawn by its logit although its
        # probability is 0 in float32, and is likely once the first is out.
        ratio = jnp.exp(jnp.minimum(jnp.log(p[token]) - log_q[token], 0.0))
        accept = is_child & (uniforms[node] < ratio)
        residual = jnp.maximum(p - jnp.exp(log_q), 0.0)
        mass = residual.sum()
        # p equals q: the token could not have been rejected but for rounding.
        residual = jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1.0), p)
        remaining = log_q if replace else _without(log_q, token)
        p = jnp.where(accept, jnp.exp(target_log_probs[node]), jnp.where(is_child, residual, p))
        below = draft_log_probs[jnp.maximum(rows[node], 0)]
        log_q = jnp.where(accept, below, jnp.where(is_child, remaining, log_q))
        return (
            jnp.where(accept, node, at),
            p,
            log_q,
            tested.at[node].set(is_child),
            odds.at[node].set(jnp.where(is_child, ratio, 0.0)),
        )

    num_nodes = tokens.shape[0]
    start = (
        jnp.int32(0),
        jnp.exp(target_log_probs[0]),
        draft_log_probs[jnp.maximum(rows[0], 0)],
        jnp.zeros(num_nodes, bool),
        jnp.zeros(num_nodes, jnp.float32),
    )
    at, p, _, tested, odds = lax.fori_loop(1, num_nodes, try_node, start)
    return Walk(at, p, tested, odds)


def _without(log_probs: Array, token: Array) -> Array:
    """The distribution given that it is not `token`; `-inf` if nothing else was possible."""
    rest = log_probs.at[token].set(-jnp.inf)
    return jnp.where(jnp.isfinite(rest.max()), jax.nn.log_softmax(rest), -jnp.inf)
