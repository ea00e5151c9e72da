"""Beam trees: the search, and exactness with trees that depend on the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.drafters.search import best_continuations
from stree_jax.testing import perturbed, tiny_model
from tests.decoding.texts import HYBRID, greedy, log_probs_after, steps
from tests.methods import PROMPTS

# Only the level sizes of a topology count. Here a path may be longer than the convolution.
SIZES = (2, 3, 1)
UNEVEN = st.TreeTopology.from_parents([-1, 0, 0, 1, 2, 2, 3])


def beam_search(next_log_probs, widths):
    """As in a textbook: parents and tokens of nodes, level by level."""
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


@pytest.mark.thorough
def test_the_tree_is_that_of_a_textbook_beam_search():
    """Over several steps, which include replay and the catch-up token."""
    target = tiny_model(HYBRID)
    model, accepted, shapes = perturbed(target, 0.03), set(), set()

    options = dict(drafter=st.BeamDrafter(model), topology=UNEVEN)
    for before, draft, verdict, _ in steps(target, count=6, **options):
        accepted |= set(verdict.num_accepted.tolist())
        for row, prompt in enumerate(PROMPTS):
            read = before.tokens[row, : before.length[row]].tolist()
            new = read[len(prompt) :]
            assert new == greedy(HYBRID).tokens[row, : len(new)].tolist()
            parents, tokens = beam_search(
                lambda path, read=read: log_probs_after(model, read, [path])[0], SIZES
            )
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
