"""Exactness of the verifiers, enumerated: every draft, every accept or reject, no sampling; and
mistakes that the enumeration must catch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from stree_jax import TreeTopology
from stree_jax.decoding.types import Drawn, Sampling, Step
from stree_jax.decoding.verifiers import VERIFIERS, Reject, Traverse, follow
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from tests.decoding import enumeration as en
from tests.helpers import refusal, some
from tests.methods import CHAIN

KINDS = ("iid", "without_replacement")
PAIR = TreeTopology.from_branching((2,))
# Trees with at most five nodes, up to three deep.
TREES = {
    "chain of 3": TreeTopology.chain(3),
    "4 children": TreeTopology.from_branching((4,)),  # all tokens that there are
    "2, 1": TreeTopology.from_branching((2, 1)),
    "second child continues": TreeTopology.from_parents([-1, 0, 0, 2, 2]),
    "deep": TreeTopology.from_parents([-1, 0, 0, 1, 3]),
}


@pytest.mark.parametrize("kind", some(["full support", "filtered", "cold"], "filtered"))
@pytest.mark.parametrize("children", KINDS)
@pytest.mark.parametrize("name", some(TREES, "deep", "chain of 3"))
def test_testing_is_exact(name, children, kind):
    topology, models = TREES[name], en.Models(seed=len(name), kind=kind)
    drafts = en.draft_outcomes(models, topology, children)
    assert_allclose(drafts[1].sum(), 1.0)
    for rule in (try_children, traverse):
        options = dict(replace=children == "iid", rule=rule, length=3)
        assert en.distance(models, topology, drafts, **options) < en.EXACT


@pytest.mark.parametrize("children", KINDS)
def test_equal_models_accept_everything(children):
    """The residual is all zero; nothing may be rejected."""
    topology = TREES["2, 1"]
    models = en.Models(seed=3, equal=True)
    tokens, _ = drafts = en.draft_outcomes(models, topology, children)
    assert en.distance(models, topology, drafts, replace=children == "iid") < en.EXACT
    log_p = np.log(en.tables(models, topology, tokens)[0]).astype(np.float32)
    uniforms = np.full(tokens.shape, 1 - 2**-24, np.float32)  # the strictest test
    walk = en.run_walks(
        uniforms, jnp.asarray(tokens), log_p, log_p, topology=topology, replace=children == "iid"
    )
    first = [children[0] if children else None for children in topology.children]
    assert (np.asarray(walk.last) == first[first[0]]).all()  # the first child, then its first


def test_a_residual_of_zero_falls_back_to_the_target():
    """A rejection although p equals q, which only rounding can cause."""
    p = np.full((1, 3, en.VOCAB), 0.25, np.float32)
    q = p.copy()
    q[0, 0, 0] = np.nextafter(np.float32(0.25), np.float32(1))  # p / q just below 1
    walk = en.run_walks(
        np.full((1, 3), 1 - 2**-24, np.float32),
        jnp.array([[0, 0, 1]]),
        np.log(q),
        np.log(p),
        topology=PAIR,
        replace=True,
    )
    assert_allclose(np.asarray(walk.probs).sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize("rule", [try_children, traverse])
def test_the_enumeration_can_fail(rule):
    """Sorting the drawn children by the draft's probability is the classic mistake."""
    models = en.Models(seed=5)
    tokens, weights = en.draft_outcomes(models, PAIR, "without_replacement")
    q = en.Models.at(models.draft, [])
    tokens[:, 1:] = np.array([sorted(row, key=lambda t: -q[t]) for row in tokens[:, 1:]])
    assert en.distance(models, PAIR, (tokens, weights), replace=False, rule=rule) > 0.01


@pytest.mark.parametrize("children", KINDS)
@pytest.mark.parametrize(
    "name", some(["chain of 3", "2, 1", "deep", "second child continues"], "2, 1")
)
def test_traversal_never_accepts_less_than_testing_from_the_root(name, children):
    topology, more = TREES[name], []
    for seed in range(6):
        models = en.Models(seed)
        drafts = en.draft_outcomes(models, topology, children)
        tested, traversed = (
            en.enumerated(models, topology, *drafts, replace=children == "iid", rule=rule)[1]
            for rule in (try_children, traverse)
        )
        more.append(traversed - tested)
    assert min(more) > -1e-6
    assert max(more) > 1e-3


@pytest.mark.parametrize("duplicates", [False, True])
def test_following_is_exact_for_any_draft(duplicates):
    """Target-only: enumerate what the target samples at each node, for fixed drafts."""
    topology, models = TreeTopology.from_parents([-1, 0, 0, 1, 2]), en.Models(seed=7)
    drafts = np.array([0, 2, 2 if duplicates else 3, 1, 0], np.int32)
    joint, _ = en.followed(models, topology, drafts)
    assert en.total_variation(joint, en.target_joint(models)) < en.EXACT


def test_following_skips_nodes_that_do_not_exist():
    topology = TreeTopology.from_branching((2, 1))
    draft = en.draft_of(topology, [[0, 1, 1, 2, 2]], valid=[[True, False, True, False, True]])
    verdict = follow(draft, jnp.array([[1, 2, 2, 3, 3]]))
    assert verdict.last.tolist() == [4]  # through node 2, although the missing node 1 matches too
    assert verdict.next_token.tolist() == [3]


TREE = TreeTopology.complete(2, 2)


def verify(rule, draft, logits, *, topology, temperature=1.0):
    sampling = Sampling(jnp.full(1, temperature), temperature_is_zero=not temperature)
    keys = jax.random.split(jax.random.key(0), 1)
    step = Step(None, keys, None, sampling)
    return jax.jit(lambda *arrays: rule.verify(*arrays, topology))(draft, logits, step)


def test_following_at_temperature_0_takes_the_best_token():
    draft = en.draft_of(CHAIN, [[0, 2, 1, 3]])
    logits = 9.0 * jax.nn.one_hot(jnp.array([[2, 1, 0, 0]]), en.VOCAB)
    for name in ("greedy", "target_only"):
        verdict = verify(VERIFIERS[name], draft, logits, topology=CHAIN, temperature=0.0)
        assert (verdict.last.tolist(), verdict.next_token.tolist()) == ([2], [0])


def test_testing_needs_the_distributions_of_the_draft():
    draft = en.draft_of(CHAIN, np.zeros((1, 4)))
    for name in ("traversal", "multi_step"):
        refusal(
            f"'{name}' needs the draft's distributions",
            verify,
            VERIFIERS[name],
            draft,
            jnp.zeros((1, 4, en.VOCAB)),
            topology=CHAIN,
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rule", "names", "topology"),
    [
        (Reject("reject", "iid"), ("multi_step", "without_replacement"), TREE),
        (Traverse(), ("traversal", "traversal"), CHAIN),
    ],
)
def test_a_rule_reads_from_the_draft_how_children_were_drawn(rule, names, topology):
    shape = (1, topology.num_nodes, en.VOCAB)
    q, logits = (jax.random.normal(jax.random.key(seed), shape) for seed in (2, 3))
    tokens = jax.random.randint(jax.random.key(1), shape[:2], 0, en.VOCAB)
    draft = en.draft_of(topology, tokens, jax.nn.log_softmax(q))
    refusal(r"drawn = Drawn\(kind='top_k'", verify, rule, draft, logits, topology=topology)
    for kind, name in zip(KINDS, names, strict=True):
        drawn = draft._replace(drawn=Drawn(kind))
        got = verify(rule, drawn, logits, topology=topology)
        want = verify(VERIFIERS[name], drawn, logits, topology=topology)
        assert_array_equal(got.last, want.last)
        assert_array_equal(got.next_token, want.next_token)
