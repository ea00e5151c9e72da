"""Traversal verification, enumerated as in test_verify.py; and mistakes that it must catch."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse, traverse_chain
from tests.decoding.enumeration import (
    EXACT,
    VOCAB,
    Models,
    draft_outcomes,
    enumerated,
    first_tokens,
    prefix_of,
    run_walks,
    target_joint,
    total_variation,
)

# Trees with at most five nodes, up to three deep.
TREES = {
    "chain of 2": st.TreeTopology.chain(2),
    "chain of 3": st.TreeTopology.chain(3),
    "3 children": st.TreeTopology.from_branching((3,)),
    "2, 1": st.TreeTopology.from_branching((2, 1)),
    "second child continues": st.TreeTopology.from_parents([-1, 0, 0, 2, 2]),
    "deep": st.TreeTopology.from_parents([-1, 0, 0, 1, 3]),
}
KINDS = ("iid", "without_replacement")


def rules(name):
    return (traverse, traverse_chain) if name.startswith("chain") else (traverse,)


@pytest.mark.parametrize("kind", ["full support", "filtered", "cold"])
@pytest.mark.parametrize("children", KINDS)
@pytest.mark.parametrize("name", TREES)
def test_exact(name, children, kind):
    topology = TREES[name]
    models = Models(seed=len(name), kind=kind)
    tokens, weights = draft_outcomes(models, topology, children)
    for rule in rules(name):
        joint, _ = enumerated(
            models, topology, tokens, weights, replace=children == "iid", rule=rule, length=3
        )
        assert total_variation(joint, target_joint(models, 3)) < EXACT


@pytest.mark.parametrize("children", KINDS)
@pytest.mark.parametrize("name", ["chain of 3", "2, 1", "deep", "second child continues"])
@pytest.mark.parametrize("seeds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_never_accepts_less_than_testing_from_the_root(name, children, seeds):
    topology, more = TREES[name], []
    for seed in range(seeds):
        models = Models(seed)
        tokens, weights = draft_outcomes(models, topology, children)
        accepted = [
            enumerated(models, topology, tokens, weights, replace=children == "iid", rule=rule)[1]
            for rule in (try_children, *rules(name))
        ]
        np.testing.assert_allclose(accepted[1:], accepted[1], rtol=1e-5)
        more.append(accepted[1] - accepted[0])
    assert min(more) > -1e-6
    assert max(more) > 1e-3


def by_hand(models, topology, tokens, *, replace, after_failure):
    """The odds of stopping at each node, and what is emitted there; recursive, in float64."""
    odds, outcomes, left = {0: 1.0}, [], 1.0

    def visit(node):
        nonlocal left
        p = Models.at(models.target, prefix_of(topology, tokens, node)).astype(float)
        q = Models.at(models.draft, prefix_of(topology, tokens, node)).astype(float)
        for child in topology.children[node]:
            token = tokens[child]
            odds[child] = min(1.0, odds[node] * p[token] / q[token])
            visit(child)
            residual = np.maximum(odds[node] * p - q, 0)
            odds[node] = after_failure(odds[node], residual.sum(), q[token])
            p = residual / residual.sum() if residual.sum() > 0 else p
            if not replace:
                q[token] = 0
                q = q / q.sum() if q.sum() > 0 else q
        outcomes.append((node, left * odds[node], p))
        left *= 1 - odds[node]

    visit(0)
    return outcomes


def joint_by_hand(models, topology, tokens, weights, **options):
    joint = np.zeros((VOCAB,) * 3)
    for row, weight in zip(tokens, weights, strict=True):
        for node, chance, probs in by_hand(models, topology, row, **options):
            joint += first_tokens(models, topology, [row], [weight * chance], [node], [probs], 3)
    return joint


def right(odds, mass, q):
    return mass / (mass + 1 - odds) if mass + 1 - odds > 0 else odds


def of_a_public_port(odds, mass, q):
    return min(1.0, mass / (1 - q)) if q < 1 else 0.0


@pytest.mark.parametrize("children", KINDS)
def test_the_odds_after_a_failure_matter(children):
    """The enumeration accepts the rule written down again, and catches another one's mistake."""
    topology, models = TREES["2, 1"], Models(seed=0)
    tokens, weights = draft_outcomes(models, topology, children)
    joint = functools.partial(
        joint_by_hand, models, topology, tokens, weights, replace=children == "iid"
    )
    want = target_joint(models, 3)
    assert total_variation(joint(after_failure=right), want) < 1e-12
    assert total_variation(joint(after_failure=of_a_public_port), want) > 0.1


@pytest.mark.parametrize("children", KINDS)
def test_draws_that_nodes_share_are_caught(children):
    """One draw for all nodes of a depth, as heads give: walking from the root is exact with it."""
    topology, models = TREES["2, 1"], Models(seed=5)
    models.draft[:] = models.draft[VOCAB, VOCAB]  # the same after every prefix
    tokens, weights = draft_outcomes(models, topology, children)
    shared = tokens[:, 3] == tokens[:, 4]
    tokens = tokens[shared]
    weights = weights[shared] / models.draft[VOCAB, VOCAB][tokens[:, 4]]
    np.testing.assert_allclose(weights.sum(), 1.0)
    wrong, fine = (
        enumerated(models, topology, tokens, weights, replace=children == "iid", rule=rule)[0]
        for rule in (traverse, try_children)
    )
    assert total_variation(fine, target_joint(models)) < EXACT
    assert total_variation(wrong, target_joint(models)) > 0.005


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_chain_is_a_tree(length):
    """Both forms of the rule, on drafts that end early, too; tokens that cannot be never pass."""
    rng, batch = np.random.default_rng(length), 64
    topology = st.TreeTopology.chain(length)
    shape = (batch, length + 1, VOCAB)
    p, q = (rng.dirichlet(np.full(VOCAB, 0.7), shape[:2]) for _ in range(2))
    p[..., 0] = 0  # filtered
    p /= p.sum(-1, keepdims=True)
    tokens = rng.integers(VOCAB, size=shape[:2])
    ends = rng.integers(length + 2, size=(batch, 1))
    tokens = np.where(np.arange(length + 1) > ends, -1, tokens)
    uniforms = rng.uniform(size=shape[:2]).astype(np.float32)
    uniforms[::4] = 0.0
    with np.errstate(divide="ignore"):
        log_q, log_p = np.log(q, dtype=np.float32), np.log(p, dtype=np.float32)
    drafts = uniforms, jnp.asarray(tokens), log_q, log_p
    chain, tree = (
        run_walks(*drafts, topology=topology, replace=False, rule=rule)
        for rule in (traverse_chain, traverse)
    )
    np.testing.assert_array_equal(chain.last, tree.last)
    np.testing.assert_array_equal(chain.tested, tree.tested)
    np.testing.assert_allclose(chain.probs, tree.probs, atol=1e-5)
    np.testing.assert_allclose(chain.accept_prob, tree.accept_prob, atol=1e-5)
    assert len(np.unique(chain.last)) > 1
    for row, last in enumerate(np.asarray(chain.last)):
        assert 0 not in tokens[row, 1 : last + 1]
