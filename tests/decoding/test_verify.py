"""Exactness of the verifiers, enumerated: every draft, every accept or reject, no sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import TreeTopology
from stree_jax.decoding.types import Drawn, Sampling, Step
from stree_jax.decoding.verifiers import VERIFIERS, Reject, Traverse, follow
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from tests.decoding.enumeration import (
    EXACT,
    VOCAB,
    Models,
    draft_of,
    draft_outcomes,
    enumerated,
    followed,
    run_walks,
    tables,
    target_joint,
    total_variation,
)
from tests.methods import CHAIN

TOPOLOGIES = {
    "chain of 2": TreeTopology.chain(2),
    "2 children": TreeTopology.from_branching((2,)),
    "4 children": TreeTopology.from_branching((4,)),
    "ragged": TreeTopology.from_parents([-1, 0, 0, 1]),
    "second child continues": TreeTopology.from_parents([-1, 0, 0, 2, 2]),
}


@pytest.mark.parametrize("kind", ["full support", "filtered", "cold"])
@pytest.mark.parametrize("children", ["iid", "without_replacement"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_testing_is_exact(name, children, kind):
    topology = TOPOLOGIES[name]
    models = Models(seed=len(name), kind=kind)
    tokens, weights = draft_outcomes(models, topology, children)
    np.testing.assert_allclose(weights.sum(), 1.0)
    joint = enumerated(models, topology, tokens, weights, replace=children == "iid")[0]
    assert total_variation(joint, target_joint(models)) < EXACT


@pytest.mark.parametrize("children", ["iid", "without_replacement"])
def test_equal_models_accept_everything(children):
    """The residual is all zero; nothing may be rejected."""
    topology = TOPOLOGIES["ragged"]
    models = Models(seed=3, equal=True)
    tokens, weights = draft_outcomes(models, topology, children)
    joint = enumerated(models, topology, tokens, weights, replace=children == "iid")[0]
    assert total_variation(joint, target_joint(models)) < EXACT
    log_p = np.log(tables(models, topology, tokens)[0]).astype(np.float32)
    uniforms = np.full(tokens.shape, 1 - 2**-24, np.float32)  # the strictest test
    walk = run_walks(
        uniforms, jnp.asarray(tokens), log_p, log_p, topology=topology, replace=children == "iid"
    )
    first = [children[0] if children else None for children in topology.children]
    assert (np.asarray(walk.last) == first[first[0]]).all()  # the first child, then its first


def test_a_residual_of_zero_falls_back_to_the_target():
    """A rejection although p equals q, which only rounding can cause."""
    topology = TOPOLOGIES["2 children"]
    p = np.full((1, 3, VOCAB), 0.25, np.float32)
    q = p.copy()
    q[0, 0, 0] = np.nextafter(np.float32(0.25), np.float32(1))  # p / q just below 1
    walk = run_walks(
        np.full((1, 3), 1 - 2**-24, np.float32),
        jnp.array([[0, 0, 1]]),
        np.log(q),
        np.log(p),
        topology=topology,
        replace=True,
    )
    np.testing.assert_allclose(np.asarray(walk.probs).sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize("rule", [try_children, traverse])
def test_the_enumeration_can_fail(rule):
    """Sorting the drawn children by the draft's probability is the classic mistake."""
    topology = TOPOLOGIES["2 children"]
    models = Models(seed=5)
    tokens, weights = draft_outcomes(models, topology, "without_replacement")
    q = Models.at(models.draft, [])
    tokens[:, 1:] = np.array([sorted(row, key=lambda t: -q[t]) for row in tokens[:, 1:]])
    joint = enumerated(models, topology, tokens, weights, replace=False, rule=rule)[0]
    assert total_variation(joint, target_joint(models)) > 0.01


def test_top_k_children_are_not_for_testing():
    topology = TOPOLOGIES["2 children"]
    models = Models(seed=5)
    best = np.argsort(-Models.at(models.draft, []))[:2]
    tokens = np.array([[0, *best]], np.int32)
    joint = enumerated(models, topology, tokens, np.ones(1), replace=True)[0]
    assert total_variation(joint, target_joint(models)) > 0.01


@pytest.mark.parametrize("duplicates", [False, True])
def test_following_is_exact_for_any_draft(duplicates):
    """Target-only: enumerate what the target samples at each node, for fixed drafts."""
    topology, models = TreeTopology.from_parents([-1, 0, 0, 1, 2]), Models(seed=7)
    drafts = np.array([0, 2, 2 if duplicates else 3, 1, 0], np.int32)
    joint, _ = followed(models, topology, drafts)
    assert total_variation(joint, target_joint(models)) < EXACT


def test_following_skips_nodes_that_do_not_exist():
    topology = TreeTopology.from_branching((2, 1))
    draft = draft_of(topology, [[0, 1, 1, 2, 2]], valid=[[True, False, True, False, True]])
    verdict = follow(draft, jnp.array([[1, 2, 2, 3, 3]]))
    assert verdict.last.tolist() == [4]  # through node 2, although the missing node 1 matches too
    assert verdict.next_token.tolist() == [3]


TREE = TreeTopology.complete(2, 2)


def verify(rule, draft, logits, *, topology, temperature=1.0):
    sampling = Sampling(jnp.full(1, temperature), temperature_is_zero=not temperature)
    keys = jax.random.split(jax.random.key(0), 1)
    rule = VERIFIERS[rule] if isinstance(rule, str) else rule
    return rule.verify(draft, logits, Step(None, keys, None, sampling), topology)


def test_following_at_temperature_0_takes_the_best_token():
    draft = draft_of(CHAIN, [[0, 2, 1, 3]])
    logits = 9.0 * jax.nn.one_hot(jnp.array([[2, 1, 0, 0]]), VOCAB)
    for name in ("greedy", "target_only"):
        verdict = verify(name, draft, logits, topology=CHAIN, temperature=0.0)
        assert (verdict.last.tolist(), verdict.next_token.tolist()) == ([2], [0])


def test_testing_needs_the_distributions_of_the_draft():
    draft = draft_of(CHAIN, np.zeros((1, 4)))
    for name in ("traversal", "multi_step"):
        with pytest.raises(ValueError, match=f"'{name}' needs the draft's distributions"):
            verify(name, draft, jnp.zeros((1, 4, VOCAB)), topology=CHAIN)


@pytest.mark.parametrize("rule", [Reject("reject", "iid"), Traverse()])
@pytest.mark.parametrize("topology", [TREE, CHAIN])
def test_a_rule_reads_from_the_draft_how_children_were_drawn(rule, topology):
    shape = (1, topology.num_nodes, VOCAB)
    q, logits = (jax.random.normal(jax.random.key(seed), shape) for seed in (2, 3))
    tokens = jax.random.randint(jax.random.key(1), shape[:2], 0, VOCAB)
    draft = draft_of(topology, tokens, jax.nn.log_softmax(q))
    with pytest.raises(ValueError, match=r"drawn = Drawn\(kind='top_k'"):
        verify(rule, draft, logits, topology=topology)
    for kind in ("iid", "without_replacement"):
        drawn = draft._replace(drawn=Drawn(kind))
        got = verify(rule, drawn, logits, topology=topology)
        name = "traversal" if isinstance(rule, Traverse) else "multi_step"
        if kind != "iid" and name == "multi_step":
            name = kind
        want = verify(VERIFIERS[name], drawn, logits, topology=topology)
        np.testing.assert_array_equal(got.last, want.last)
        np.testing.assert_array_equal(got.next_token, want.next_token)
