"""Beam trees: the search, and exactness with trees that depend on the text."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from stree_jax.decoding.drafters.search import best_continuations
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.decoding.verifiers import follow
from stree_jax.testing import PROMPTS, apply, perturbed, random_model, tiny_model
from tests.decoding.enumeration import (
    EXACT,
    VOCAB,
    Models,
    first_tokens,
    target_joint,
    total_variation,
)
from tests.decoding.texts import HYBRID, steps, with_head
from tests.helpers import state_after

BEAMS, STEPS = 3, 3
TOPOLOGY = st.TreeTopology.beam(BEAMS, STEPS)
# Only the level sizes of a topology count. Here a path may be longer than the convolution.
SIZES = (2, 3, 1)
UNEVEN = st.TreeTopology.from_parents([-1, 0, 0, 1, 2, 2, 3])


def beam_search(next_log_probs, widths):
    """Beam search as in a textbook: every path is a tuple of tokens, all continuations are sorted.

    Returns parents and tokens of the nodes below the root, level by level.
    """
    level, parents, tokens = [(0.0, (), 0)], [], []
    for width in widths:
        candidates = []
        for beam, (score, path, node) in enumerate(level):
            for token, log_prob in enumerate(next_log_probs(path)):
                candidates.append((-(score + log_prob), beam, token, path, node))
        candidates.sort(key=lambda candidate: candidate[:3])
        level = []
        for score, _, token, path, node in candidates[:width]:
            parents.append(node)
            tokens.append(token)
            level.append((-score, (*path, token), len(tokens)))
    return parents, tokens


def test_the_tree_is_that_of_a_textbook_beam_search():
    """Over several steps, which include replay and the catch-up token."""
    target = tiny_model(HYBRID)
    model, accepted, shapes = perturbed(target, 0.03), set(), set()

    def next_log_probs(read, path):
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(read) + len(path)] = [*read, *path]
        logits = apply(model, padded)[0, len(read) + len(path) - 1, :37]  # the rest is padding
        return np.asarray(jax.nn.log_softmax(logits), np.float64)

    for before, draft, verdict in steps(target, st.BeamDrafter(model), UNEVEN, count=6):
        accepted |= set(verdict.num_accepted.tolist())
        for row, prompt in enumerate(PROMPTS):
            read = before.tokens[row, : before.length[row]].tolist()
            best = apply(target, np.pad([read], ((0, 0), (0, 40 - len(read)))))[0, :, :37].argmax(
                -1
            )
            assert read[len(prompt) :] == best[len(prompt) - 1 : len(read) - 1].tolist()
            parents, tokens = beam_search(functools.partial(next_log_probs, read), SIZES)
            assert draft.tokens[row].tolist() == [read[-1], *tokens]
            assert draft.tree.parents[row].tolist() == [-1, *parents]
            topology = st.TreeTopology.from_parents([-1, *parents])
            shapes.add(topology)
            assert draft.tree.depth[row].tolist() == list(topology.depths)
            np.testing.assert_array_equal(draft.tree.ancestor_mask[row], topology.ancestor_mask)
            assert draft.tree.valid[row].all()
    assert len(shapes) > 3
    # No catch-up token; paths that end in a node that was read; paths that end in an unread leaf.
    assert {0, len(SIZES)} < accepted


def test_a_sure_draft_is_accepted_whole():
    """The best path is then the greedy path; with flat logits the search may drop that one."""
    target = with_head(20.0, tiny_model())
    out = st.generate(target, PROMPTS, drafter=st.BeamDrafter(target), topology=TOPOLOGY)
    assert out.stats.target_calls_per_row.tolist() == [64 / (STEPS + 1)] * len(PROMPTS)


def test_ties_go_to_the_earlier_beam_and_the_lower_token():
    target = tiny_model(HYBRID)
    for _, draft, _ in steps(target, st.BeamDrafter(with_head(0.0, target)), UNEVEN, count=1):
        want = beam_search(lambda path: np.zeros(37), SIZES)
        assert want[0] == [0, 0, 1, 1, 1, 3]
        for row in range(len(PROMPTS)):
            assert draft.tree.parents[row, 1:].tolist() == want[0]
            assert draft.tokens[row, 1:].tolist() == want[1]


def test_one_step_of_the_search_with_ties_and_impossible_tokens():
    rng = np.random.default_rng(0)
    with np.errstate(divide="ignore"):
        # Powers of a half, so that sums are exact and many are equal; some tokens are impossible.
        scores = np.log2(rng.choice([1.0, 0.5, 0.25], size=(6, 3)))
        logits = np.log(rng.choice([1.0, 0.5, 0.0], size=(6, 3, 5)))
        logits[..., 0] = 0.0
    scores[:, 1] = scores[:, 0]
    scores[5, 2] = -np.inf  # a beam that does not exist
    for count in (2, 7):
        kept, beam, token, _ = best_continuations(jnp.asarray(scores), jnp.asarray(logits), count)
        for row in range(6):
            log_probs = np.asarray(jax.nn.log_softmax(logits[row].astype(np.float32)))
            total = scores[row].astype(np.float32)[:, None] + log_probs
            order = np.lexsort((np.arange(15), -total.ravel()))[:count]
            np.testing.assert_allclose(kept[row], total.ravel()[order], rtol=1e-6)
            possible = np.isfinite(total.ravel()[order])
            got = (np.asarray(beam[row]) * 5 + np.asarray(token[row]))[possible]
            np.testing.assert_array_equal(got, order[possible])


def test_target_only_is_exact():
    """Enumerates what the target samples at each node of a tree drafted by a model of 4 tokens."""
    config = st.ModelConfig.tiny(vocab_size=VOCAB, tie_embeddings=False)
    draft_model = random_model(config)
    drafter, topology = st.BeamDrafter(draft_model), st.TreeTopology.beam(2, 2)
    context = Context(jnp.array([[2, 1, 3]], jnp.int32), jnp.array([3], jnp.int32))

    @jax.jit
    def propose(drafter, key, temperature):
        sampling = Sampling(temperature[None])
        state = state_after(drafter, context, topology, max_length=8)
        keys = jax.random.split(key, 1)
        return drafter.propose(state, Step(context, keys, None, sampling), topology)[0]

    draft = propose(drafter, jax.random.key(0), jnp.float32(1))
    # Following is exact only if the draft depends neither on the key nor on the temperature.
    jax.tree.map(
        np.testing.assert_array_equal, draft, propose(drafter, jax.random.key(1), jnp.float32(0.3))
    )
    drawn = st.TreeTopology.from_parents(draft.tree.parents[0].tolist())
    models = Models(seed=7)
    tokens = np.asarray(draft.tokens)
    p = np.array(
        [
            Models.at(models.target, tokens[0, np.flatnonzero(drawn.ancestor_mask[node])[1:]])
            for node in range(5)
        ]
    )
    chosen = np.array(list(itertools.product(range(VOCAB), repeat=5)), np.int32)
    weights = np.prod(p[np.arange(5), chosen], axis=1)
    batch = len(chosen)
    every = jax.tree.map(
        lambda value: jnp.broadcast_to(value, (batch, *value.shape[1:])),
        draft._replace(log_prob_row=jnp.full((1, 5), -1)),
    )
    verdict = follow(every._replace(log_prob_row=draft.log_prob_row), jnp.asarray(chosen))
    joint = first_tokens(
        models,
        drawn,
        np.asarray(every.tokens),
        weights,
        np.asarray(verdict.last),
        np.eye(VOCAB)[np.asarray(verdict.next_token)],
    )
    assert (np.asarray(verdict.num_accepted) == 2).any()
    assert total_variation(joint, target_joint(models)) < EXACT
