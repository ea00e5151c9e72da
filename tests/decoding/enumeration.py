"""Exactness by enumeration: every draft, every accept or reject, no sampling."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import TreeTopology
from stree_jax.decoding.types import DraftTree
from stree_jax.decoding.verifiers import follow
from stree_jax.decoding.verifiers.reject import Drafted, try_children

VOCAB = 4
ROWS = VOCAB**4  # of a program: the drafts that a tree of five nodes may have
EXACT = 1e-6  # total variation; the probabilities are float32


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


def draft_of(topology, tokens, log_probs=None, valid=None, **more):
    """A draft of tokens `[B, N]` for a verifier."""
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid)
    none = jnp.full(topology.num_nodes, -1, jnp.int32)
    row = none if log_probs is None else jnp.arange(topology.num_nodes)
    finite = jnp.ones(len(tokens), bool)
    return DraftTree(tokens, topology.tree(valid), log_probs, row, finite, **more)


def followed(models, topology, tokens):
    """Distribution of the first tokens after following, by what the target samples at each node of
    one draft; and how many drafts each pattern accepts."""
    p, _ = tables(models, topology, tokens[None])
    nodes = topology.num_nodes
    chosen = np.array(list(itertools.product(range(VOCAB), repeat=nodes)), np.int32)
    weights = np.prod(p[0, np.arange(nodes), chosen].astype(np.float64), axis=1)
    every = np.broadcast_to(tokens, chosen.shape)
    verdict = jax.tree.map(np.asarray, follow(draft_of(topology, every), jnp.asarray(chosen)))
    np.testing.assert_array_equal(verdict.num_accepted, np.array(topology.depths)[verdict.last])
    next_probs = np.eye(VOCAB)[verdict.next_token]
    joint = first_tokens(models, topology, every, weights, verdict.last, next_probs)
    return joint, verdict.num_accepted


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
    drafted = Drafted(uniforms, jnp.maximum(tokens, 0), tree, log_q, rows, log_p)
    axes = Drafted(0, 0, 0, 0, None, 0)
    return jax.vmap(functools.partial(rule, replace=replace), (axes,))(drafted)


def enumerated(
    models, topology, tokens, weights, *, replace, rule=try_children, length=2, log_p=None
):
    """Distribution of the first tokens, and the expected number of accepted drafts."""
    joint, accepted = np.zeros((VOCAB,) * length), 0.0
    options = dict(replace=replace, rule=rule, log_p=log_p)
    for weight, walk in walks(models, topology, tokens, weights, **options):
        joint += first_tokens(models, topology, tokens, weight, walk.last, walk.probs, length)
        accepted += (weight * np.array(topology.depths)[walk.last]).sum()
    return joint, accepted


def distance(models, topology, drafts, *, replace, rule=try_children, length=2):
    """How far the first tokens are from the target's distribution, with drafts of some weights."""
    options = dict(replace=replace, rule=rule, length=length)
    joint, _ = enumerated(models, topology, *drafts, **options)
    return total_variation(joint, target_joint(models, length))


def walks(models, topology, tokens, weights, *, replace, rule=try_children, log_p=None):
    """Of each pattern of tests: its probability for drafts, and its end."""
    p, q = tables(models, topology, tokens)
    with np.errstate(divide="ignore"):
        log_p = np.log(p).astype(np.float32) if log_p is None else log_p
        log_q = np.log(q).astype(np.float32)
    seen = [set() for _ in tokens]
    # Padded, so that all models share a program.
    padded = np.arange(-(-len(tokens) // ROWS) * ROWS) % len(tokens)
    inputs = tokens[padded], log_q[padded], log_p[padded]
    options = dict(topology=topology, replace=replace, rule=rule)
    for pattern in itertools.product((0.0, 1 - 2**-24), repeat=topology.num_nodes - 1):
        uniforms = np.broadcast_to(np.array([0.0, *pattern], np.float32), inputs[0].shape)
        walk = run_walks(uniforms, *inputs, **options)
        walk = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(tokens)], walk)
        uniforms = uniforms[: len(tokens)]
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
