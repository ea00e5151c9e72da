"""Verifiers that test drafts by the ratio of target and draft probabilities.

From the root on, the children of a node are tried in the order drawn. With p the target's
distribution and q the draft's, both after temperature, top-k and top-p, the child with token t is
accepted with probability `min(1, p(t) / q(t))`; otherwise p becomes `norm(max(p - q, 0))`.

This accepts more than following the target, and is exact only for children drawn from q in the way
that the rule assumes:

    "multi_step"            independent draws (SpecInfer: Miao et al., 2023, arXiv:2305.09781)
    "without_replacement"   a token drawn once is not drawn again (recursive rejection sampling:
                            Jeon et al., 2024, arXiv:2402.14160)

With one child a node both are the speculative sampling of Leviathan et al., 2022
(arXiv:2211.17192).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Float32, Int
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.decoding.verifiers.base import Verifier
from stree_jax.decoding.verifiers.follow import Follow
from stree_jax.tree import Tree, TreeTopology

_TARGET_ONLY = Follow()


@dataclasses.dataclass(frozen=True)
class Reject(Verifier):
    """Tests drafts from the root down; reads how they were drawn from `DraftTree.drawn`."""

    name: str
    exact_for: str  # the kind of `Drawn` that `check` accepts where nodes have several children

    def check(self, drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        check_drawn(self.name, (self.exact_for,), drawn, topology, temperature_is_zero)

    def verify(
        self, draft: DraftTree, logits: Array, step: Step, topology: TreeTopology
    ) -> Verdict:
        return verify_by(try_children, self.name, draft, logits, step, topology)


def check_drawn(
    name: str,
    kinds: tuple[str, ...],
    drawn: Drawn,
    topology: TreeTopology,
    temperature_is_zero: bool,
) -> None:
    """Refuses drafts that a rule must not test by their probabilities."""
    if temperature_is_zero:
        raise ValueError(f"verifier {name!r} needs temperature > 0; use 'greedy' at 0")
    if topology.num_nodes == 1:  # no draft to test
        return
    # A single child is drawn the same way with and without replacement.
    if drawn.is_sampled and (topology.width == 1 or drawn.kind in kinds):
        return
    raise ValueError(
        f"verifier {name!r} is not exact for child_sampling = {drawn.kind!r},"
        f" only for {' and '.join(map(repr, kinds))}; use 'target_only', which is exact for any, or"
        f" ModelDrafter(..., child_sampling={kinds[-1]!r})"
    )


class Drafted(NamedTuple):
    """One row's drafts, and the numbers that decide their tests."""

    uniforms: Float32[Array, " N"]
    tokens: Int[Array, " N"]
    tree: Tree
    draft_log_probs: Float32[Array, "Z V"]
    log_prob_row: Int[Array, " N"]
    target_log_probs: Float32[Array, "N V"]


class Walk(NamedTuple):
    """One row's tests, with the probability of passing each."""

    last: Int[Array, ""]
    probs: Float32[Array, " V"]  # distribution of the token after `last`
    tested: Array  # [N] bool
    accept_prob: Float32[Array, " N"]  # acceptance probability of the tested nodes


Rule = Callable[..., Walk]


def verify_by(
    rule: Rule, name: str, draft: DraftTree, logits: Array, step: Step, topology: TreeTopology
) -> Verdict:
    """Tests the drafts of each row, and draws the token after them."""
    num_nodes = draft.tokens.shape[1]
    if num_nodes == 1:  # no draft to test
        return _TARGET_ONLY.verify(draft, logits, step, topology)
    if draft.log_probs is None:
        raise ValueError(
            f"verifier {name!r} needs the draft's distributions, and the drafter gave"
            " log_probs = None; use 'target_only'"
        )
    if not draft.drawn.is_sampled:
        raise ValueError(
            f"verifier {name!r} must know how children were drawn, and the draft has"
            f" drawn = {draft.drawn}; make it with DraftTree(..., drawn=Drawn('iid')), or the kind"
            " that is true"
        )
    log_probs = token_log_probs(logits, step.sampling)

    def row(key, tokens, tree, draft_log_probs, target_log_probs):
        test_key, next_key = jax.random.split(key)
        uniforms = jax.random.uniform(test_key, (num_nodes,), jnp.float32)
        laws = draft_log_probs, draft.log_prob_row, target_log_probs
        walk = rule(Drafted(uniforms, tokens, tree, *laws), replace=draft.drawn.kind == "iid")
        token = jax.random.categorical(next_key, jnp.log(walk.probs)).astype(jnp.int32)
        return Verdict(walk.last, tree.depth[walk.last], token)

    return jax.vmap(row)(step.keys, draft.tokens, draft.tree, draft.log_probs, log_probs)


def try_children(row: Drafted, *, replace: bool) -> Walk:
    """Tests children in the order drawn, with replacement or without.

    One pass over the nodes is enough: children come after their parent, so when the walk moves to a
    node they are still ahead, and the siblings that it leaves behind are no children of that node.
    """
    uniforms, tokens, tree, draft_log_probs, log_prob_row, target_log_probs = row

    def try_node(node, carry):
        at, p, log_q, tested, accept_prob = carry
        token = tokens[node]
        is_child = (tree.parents[node] == at) & tree.valid[node]
        # q stays in logs: at low temperature the second child's probability is 0 in float32, but
        # its logit decides once the first child is removed.
        ratio = jnp.exp(jnp.minimum(jnp.log(p[token]) - log_q[token], 0.0))
        accept = is_child & (uniforms[node] < ratio)
        residual = jnp.maximum(p - jnp.exp(log_q), 0.0)
        mass = residual.sum()
        # If p equals q the residual is empty, and only rounding can have rejected the token.
        residual = jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1.0), p)
        remaining = log_q if replace else without(log_q, token)
        p = jnp.where(accept, jnp.exp(target_log_probs[node]), jnp.where(is_child, residual, p))
        below = draft_log_probs[jnp.maximum(log_prob_row[node], 0)]
        log_q = jnp.where(accept, below, jnp.where(is_child, remaining, log_q))
        at = jnp.where(accept, node, at)
        tested = tested.at[node].set(is_child)
        accept_prob = accept_prob.at[node].set(jnp.where(is_child, ratio, 0.0))
        return at, p, log_q, tested, accept_prob

    num_nodes = tokens.shape[0]
    start = (
        jnp.int32(0),
        jnp.exp(target_log_probs[0]),
        draft_log_probs[jnp.maximum(log_prob_row[0], 0)],
        jnp.zeros(num_nodes, bool),
        jnp.zeros(num_nodes, jnp.float32),
    )
    at, p, _, tested, accept_prob = lax.fori_loop(1, num_nodes, try_node, start)
    return Walk(at, p, tested, accept_prob)


def without(log_probs: Array, token: Array) -> Array:
    """The distribution given that it is not `token`; all `-inf` if nothing else was possible."""
    remaining = log_probs.at[token].set(-jnp.inf)
    some_left = jnp.isfinite(remaining.max())
    return jnp.where(some_left, jax.nn.log_softmax(remaining), -jnp.inf)
