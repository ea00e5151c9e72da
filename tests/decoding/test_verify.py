"""Exactness of the verifiers, enumerated: every draft, every accept or reject, no sampling."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import TreeTopology
from stree_jax.decoding.types import DraftTree, Sampling
from stree_jax.decoding.verifiers import VERIFIERS, follow
from stree_jax.decoding.verifiers.rejection_sampling import try_children

VOCAB = 4
EXACT = 1e-6  # total variation; the probabilities are float32

TOPOLOGIES = {
    "chain of 2": TreeTopology.chain(2),
    "2 children": TreeTopology.from_branching((2,)),
    "4 children": TreeTopology.from_branching((4,)),
    "ragged": TreeTopology.from_parents([-1, 0, 0, 1]),
    "second child goes on": TreeTopology.from_parents([-1, 0, 0, 2, 2]),
}


class Models:
    """Next-token distributions of a target and a draft, for every prefix of up to two tokens."""

    def __init__(self, seed, *, equal=False, kind="full support"):
        rng = np.random.default_rng(seed)

        def table():
            values = rng.dirichlet(np.full(VOCAB, 0.7), size=(VOCAB + 1, VOCAB + 1))
            if kind == "filtered":  # as after top-k: another token is impossible in each row
                values[np.arange(VOCAB + 1), :, np.arange(VOCAB + 1) % VOCAB] = 0
                values /= values.sum(-1, keepdims=True)
            return values

        self.target = table()
        self.draft = self.target if equal else table()
        if kind == "cold":  # all but the best token of the draft have probability 0 in float32
            scaled = rng.normal(size=self.draft.shape) / 0.005
            scaled -= scaled.max(-1, keepdims=True)
            scaled = np.maximum(scaled, -600)  # float64 has them
            self.draft = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)

    @staticmethod
    def at(table, prefix):
        return table[tuple([*prefix, VOCAB, VOCAB][:2])]


def draft_outcomes(models, topology, children):
    """All drafts: tokens of each node (-1: there is none), and the probability of drawing them."""
    outcomes = [([-1] * topology.num_nodes, 1.0)]
    for node, below in enumerate(topology.children):
        for child in below:
            grown = []
            for tokens, weight in outcomes:
                probs = Models.at(models.draft, prefix_of(topology, tokens, node)).astype(float)
                if children == "without_replacement":
                    probs[[tokens[c] for c in below if c < child and tokens[c] >= 0]] = 0
                if (node > 0 and tokens[node] < 0) or probs.sum() == 0:
                    grown.append((tokens, weight))  # nothing to draw from
                    continue
                for token in np.flatnonzero(probs):
                    new = [*tokens[:child], int(token), *tokens[child + 1 :]]
                    grown.append((new, weight * probs[token] / probs.sum()))
            outcomes = grown
    return np.array([tokens for tokens, _ in outcomes]), np.array([w for _, w in outcomes])


def prefix_of(topology, tokens, node):
    """Draft tokens from below the root to the node."""
    path = [n for n in np.flatnonzero(topology.ancestor_mask[node]) if n > 0]
    return [tokens[n] for n in path]


def tree_of(topology, batch):
    return topology.tree(jnp.ones((batch, topology.num_nodes), bool))


def tables(models, topology, tokens):
    """The target's and the draft's distributions at every node of every draft."""

    def gather(table):
        return np.array(
            [
                [Models.at(table, prefix_of(topology, row, n)) for n in range(topology.num_nodes)]
                for row in tokens
            ]
        )

    return gather(models.target), gather(models.draft)


def first_tokens(models, topology, tokens, weights, last, next_probs, length=2):
    """Distribution of the first emitted tokens, completed by the target where there are fewer."""
    joint = np.zeros((VOCAB,) * length)

    def add(prefix, weight, probs):
        if len(prefix) >= length:
            joint[tuple(prefix[:length])] += weight
        elif len(prefix) == length - 1:
            joint[tuple(prefix)] += weight * probs
        else:
            for token in np.flatnonzero(probs):
                path = [*prefix, token]
                add(path, weight * probs[token], Models.at(models.target, path))

    for row, weight, node, probs in zip(tokens, weights, last, next_probs, strict=True):
        if weight:
            add(prefix_of(topology, row, node), weight, np.asarray(probs, np.float64))
    return joint


def target_joint(models, length=2):
    root = TreeTopology.chain(0)
    first = [Models.at(models.target, [])]
    return first_tokens(models, root, np.zeros((1, 1), int), [1.0], [0], first, length)


def total_variation(a, b):
    return 0.5 * np.abs(a - b).sum()


@functools.partial(jax.jit, static_argnames=("topology", "replace", "rule"))
def run_walks(uniforms, tokens, log_q, log_p, *, topology, replace, rule=try_children):
    tree = topology.tree((tokens >= 0).at[:, 0].set(True))
    rows = jnp.arange(topology.num_nodes)
    return jax.vmap(lambda u, t, tree, q, p: rule(u, t, tree, q, rows, p, replace=replace))(
        uniforms, jnp.maximum(tokens, 0), tree, log_q, log_p
    )


def enumerated_joint(models, topology, tokens, weights, **options):
    """Distribution of the first two tokens."""
    return enumerated(models, topology, tokens, weights, **options)[0]


def enumerated(models, topology, tokens, weights, *, replace, rule=try_children, length=2):
    """Distribution of the first tokens, and the expected number of accepted drafts."""
    joint, accepted = np.zeros((VOCAB,) * length), 0.0
    options = dict(replace=replace, rule=rule)
    for weight, walk in walks(models, topology, tokens, weights, **options):
        joint += first_tokens(models, topology, tokens, weight, walk.last, walk.probs, length)
        accepted += (weight * np.array(topology.depths)[walk.last]).sum()
    return joint, accepted


def walks(models, topology, tokens, weights, *, replace, rule=try_children):
    """All patterns of passed and failed tests, with their odds as the verifier reports them.

    Yields the probability of the pattern for each draft, and what it ends in.
    """
    p, q = tables(models, topology, tokens)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p).astype(np.float32), np.log(q).astype(np.float32)
    seen = [set() for _ in tokens]
    for pattern in itertools.product((0.0, 1 - 2**-24), repeat=topology.num_nodes - 1):
        uniforms = np.broadcast_to(np.array([0.0, *pattern], np.float32), tokens.shape)
        walk = jax.tree.map(
            np.asarray,
            run_walks(
                *(uniforms, jnp.asarray(tokens), log_q, log_p),
                topology=topology,
                replace=replace,
                rule=rule,
            ),
        )
        assert np.isfinite(walk.probs).all()
        odds = walk.accept_prob.astype(np.float64)
        passed = uniforms < walk.accept_prob
        chance = np.prod(np.where(walk.tested, np.where(passed, odds, 1 - odds), 1.0), axis=1)
        # Patterns that differ only in tests that were not made are one outcome.
        signature = [
            (tuple(t), tuple(s & t)) for t, s in zip(walk.tested.tolist(), passed, strict=True)
        ]
        new = np.array([s not in known for s, known in zip(signature, seen, strict=True)])
        for s, known in zip(signature, seen, strict=True):
            known.add(s)
        yield weights * chance * new, walk


@pytest.mark.parametrize("kind", ["full support", "filtered", "cold"])
@pytest.mark.parametrize("children", ["iid", "without_replacement"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_testing_is_exact(name, children, kind):
    topology = TOPOLOGIES[name]
    models = Models(seed=len(name), kind=kind)
    tokens, weights = draft_outcomes(models, topology, children)
    np.testing.assert_allclose(weights.sum(), 1.0)
    joint = enumerated_joint(models, topology, tokens, weights, replace=children == "iid")
    assert total_variation(joint, target_joint(models)) < EXACT


@pytest.mark.parametrize("children", ["iid", "without_replacement"])
def test_equal_models_accept_everything(children):
    """The residual is all zero; nothing may be rejected."""
    topology = TOPOLOGIES["ragged"]
    models = Models(seed=3, equal=True)
    tokens, weights = draft_outcomes(models, topology, children)
    joint = enumerated_joint(models, topology, tokens, weights, replace=children == "iid")
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


def test_the_enumeration_can_fail():
    """Sorting the drawn children by the draft's probability is the classic mistake."""
    topology = TOPOLOGIES["2 children"]
    models = Models(seed=5)
    tokens, weights = draft_outcomes(models, topology, "without_replacement")
    q = Models.at(models.draft, [])
    tokens[:, 1:] = np.array([sorted(row, key=lambda t: -q[t]) for row in tokens[:, 1:]])
    joint = enumerated_joint(models, topology, tokens, weights, replace=False)
    assert total_variation(joint, target_joint(models)) > 0.01


def test_top_k_children_are_not_for_testing():
    topology = TOPOLOGIES["2 children"]
    models = Models(seed=5)
    best = np.argsort(-Models.at(models.draft, []))[:2]
    tokens = np.array([[0, *best]], np.int32)
    joint = enumerated_joint(models, topology, tokens, np.ones(1), replace=True)
    assert total_variation(joint, target_joint(models)) > 0.01


@pytest.mark.parametrize("duplicates", [False, True])
def test_following_is_exact_for_any_draft(duplicates):
    """Target-only: enumerate what the target samples at each node, for fixed drafts."""
    topology = TreeTopology.from_parents([-1, 0, 0, 1, 2])
    models = Models(seed=7)
    drafts = np.array([0, 2, 2 if duplicates else 3, 1, 0], np.int32)
    p, _ = tables(models, topology, drafts[None])
    chosen = np.array(list(itertools.product(range(VOCAB), repeat=5)), np.int32)
    weights = np.prod(p[0, np.arange(5), chosen].astype(np.float64), axis=1)
    batch = len(chosen)
    draft = DraftTree(
        tokens=jnp.broadcast_to(drafts, (batch, 5)),
        tree=tree_of(topology, batch),
        log_probs=None,
        log_prob_row=jnp.full(5, -1, jnp.int32),
        finite=jnp.ones(batch, bool),
    )
    verdict = follow(draft, jnp.asarray(chosen))
    next_probs = np.eye(VOCAB)[np.asarray(verdict.next_token)]
    joint = first_tokens(
        models, topology, np.asarray(draft.tokens), weights, np.asarray(verdict.last), next_probs
    )
    assert total_variation(joint, target_joint(models)) < EXACT
    np.testing.assert_array_equal(
        verdict.num_accepted, np.array(topology.depths)[np.asarray(verdict.last)]
    )


def test_following_skips_nodes_that_do_not_exist():
    topology = TreeTopology.from_branching((2, 1))
    valid = jnp.array([[True, False, True, False, True]])
    draft = DraftTree(
        tokens=jnp.array([[0, 1, 1, 2, 2]]),
        tree=topology.tree(valid),
        log_probs=None,
        log_prob_row=jnp.full(5, -1, jnp.int32),
        finite=jnp.ones(1, bool),
    )
    verdict = follow(draft, jnp.array([[1, 2, 2, 3, 3]]))
    assert verdict.last.tolist() == [4]  # through node 2, although the missing node 1 matches too
    assert verdict.next_token.tolist() == [3]


TREE, CHAIN = TreeTopology.complete(2, 2), TreeTopology.chain(3)


@pytest.mark.parametrize(
    ("verifier", "children", "topology", "greedy"),
    [
        ("greedy", "top_k", TREE, True),
        ("greedy", "iid", TREE, True),
        ("target_only", "top_k", TREE, False),
        ("target_only", "without_replacement", TREE, False),
        ("multi_step", "iid", TREE, False),
        ("multi_step", "without_replacement", CHAIN, False),
        ("without_replacement", "without_replacement", TREE, False),
        ("without_replacement", "iid", CHAIN, False),
        ("traversal", "iid", CHAIN, False),
        ("traversal", "without_replacement", CHAIN, False),
        ("traversal", "without_replacement", TREE, False),
    ],
)
def test_exact_pairs_are_allowed(verifier, children, topology, greedy):
    VERIFIERS[verifier].check(children, topology, temperature_is_zero=greedy)


@pytest.mark.parametrize(
    ("verifier", "children", "topology", "greedy", "message"),
    [
        ("greedy", "top_k", TREE, False, "exact at temperature 0 only; use 'target_only'"),
        ("multi_step", "iid", TREE, True, "needs temperature > 0; use 'greedy'"),
        ("multi_step", "top_k", TREE, False, "not exact for child_sampling = 'top_k'"),
        ("multi_step", "top_k", CHAIN, False, "not exact for child_sampling = 'top_k'"),
        ("multi_step", "without_replacement", TREE, False, "not exact .*only for 'iid'"),
        ("without_replacement", "iid", TREE, False, "not exact for child_sampling = 'iid'"),
        ("multi_step", "shared", CHAIN, False, "child_sampling = 'shared', only for 'iid'; use 't"),
        ("without_replacement", "shared", TREE, False, "not exact for child_sampling = 'shared'"),
        ("traversal", "shared", CHAIN, False, "not exact for child_sampling = 'shared'"),
        ("traversal", "top_k", CHAIN, False, "not exact for child_sampling = 'top_k'"),
        ("traversal", "beam", CHAIN, False, "not exact for child_sampling = 'beam'"),
        ("traversal", "iid", TREE, False, "not exact for child_sampling = 'iid'"),
        ("traversal", "iid", TREE, True, "needs temperature > 0; use 'greedy'"),
    ],
)
def test_inexact_pairs_are_refused(verifier, children, topology, greedy, message):
    with pytest.raises(ValueError, match=message):
        VERIFIERS[verifier].check(children, topology, temperature_is_zero=greedy)


def verify(name, draft, logits, *, topology, temperature=1.0):
    sampling = Sampling(
        jnp.full(1, temperature),
        jnp.zeros(1, int),
        jnp.ones(1),
        temperature_is_zero=not temperature,
    )
    keys = jax.random.split(jax.random.key(0), 1)
    return VERIFIERS[name].verify(keys, draft, logits, sampling, None, topology=topology)


def test_following_at_temperature_0_takes_the_best_token():
    draft = DraftTree(
        tokens=jnp.array([[0, 2, 1, 3]]),
        tree=tree_of(CHAIN, 1),
        log_probs=None,
        log_prob_row=jnp.full(4, -1, jnp.int32),
        finite=jnp.ones(1, bool),
    )
    logits = 9.0 * jax.nn.one_hot(jnp.array([[2, 1, 0, 0]]), VOCAB)
    for name in ("greedy", "target_only"):
        verdict = verify(name, draft, logits, topology=CHAIN, temperature=0.0)
        assert (verdict.last.tolist(), verdict.next_token.tolist()) == ([2], [0])


def test_following_without_noise_draws_from_the_keys():
    """As in a loop of one's own: samples of the target, other ones with other keys."""
    draft = DraftTree(
        tokens=jnp.zeros((1, 4), jnp.int32),
        tree=tree_of(CHAIN, 1),
        log_probs=None,
        log_prob_row=jnp.full(4, -1, jnp.int32),
        finite=jnp.ones(1, bool),
    )
    logits = jnp.log(jnp.array([0.5, 0.25, 0.25, 0.0]))
    sampling = Sampling(jnp.ones(1), jnp.zeros(1, int), jnp.ones(1))

    @jax.vmap
    def first_token(key):
        rule = VERIFIERS["target_only"]
        every = jnp.broadcast_to(logits, (1, 4, VOCAB))
        verdict = rule.verify(key[None], draft, every, sampling, None, topology=CHAIN)
        return jnp.where(verdict.last[0] > 0, 0, verdict.next_token[0])

    tokens = np.asarray(first_token(jax.random.split(jax.random.key(0), 1000)))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[3] == 0
    np.testing.assert_allclose(counts[:3] / 1000, [0.5, 0.25, 0.25], atol=0.06)


def test_testing_needs_the_distributions_of_the_draft():
    draft = DraftTree(
        tokens=jnp.zeros((1, 4), jnp.int32),
        tree=tree_of(CHAIN, 1),
        log_probs=None,
        log_prob_row=jnp.full(4, -1, jnp.int32),
        finite=jnp.ones(1, bool),
    )
    with pytest.raises(ValueError, match="'traversal' needs the draft's distributions"):
        verify("traversal", draft, jnp.zeros((1, 4, VOCAB)), topology=CHAIN)
