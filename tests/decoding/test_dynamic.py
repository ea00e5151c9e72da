"""Dynamic trees: the nodes that are kept."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.sampling import position_noise
from stree_jax.testing import perturbed, random_model, tiny_model
from tests.decoding.texts import HYBRID, dynamic_tree, log_probs_after, paths_of, proposed, steps
from tests.helpers import with_weight
from tests.methods import PROMPTS

thorough = pytest.mark.thorough

SHALLOW = st.TreeTopology.budget(7, 3)
VOCAB = 4


@thorough
def test_the_kept_nodes_are_the_best_of_a_sorted_list():
    """Over several steps: after nodes that were read, that were not, and that were dropped."""
    target = tiny_model(HYBRID)
    model, expand, sharpness = perturbed(target, 0.02), 4, 4.0
    drafter = st.DynamicDrafter(model, expand=expand, sharpness=sharpness)
    shapes, ends, dropped = set(), set(), 0

    for before, draft, verdict, _ in steps(target, drafter=drafter, topology=SHALLOW, count=5):
        for row in range(len(PROMPTS)):
            text = before.tokens[row, : before.length[row]].tolist()
            next_log_probs = functools.partial(log_probs_after, model, text, sharpness=sharpness)
            kept, read = dynamic_tree(next_log_probs, SHALLOW.num_nodes, SHALLOW.depth, expand)
            tree = jax.tree.map(lambda part, row=row: part[row], draft.tree)
            assert tree.valid.all()
            paths = paths_of(draft.tokens[row], tree.parents, tree.valid)
            assert set(paths) == set(kept)
            assert len(set(paths)) == SHALLOW.num_nodes
            # Level by level, siblings best first, and the arrays belong to these parents.
            assert [len(path) for path in paths] == sorted(map(len, paths))
            for a, b in itertools.combinations(paths, 2):
                assert a[:-1] != b[:-1] or not a or kept[a] >= kept[b]
            topology = st.TreeTopology.from_parents(tree.parents.tolist())
            assert tree.depth.tolist() == list(topology.depths)
            np.testing.assert_array_equal(tree.ancestor_mask, topology.ancestor_mask)
            shapes.add(topology)
            last = paths[verdict.last[row]]
            ends.add((len(last) > 0, last in read))
            dropped += len(last) > 0 and not read <= set(kept)
    assert len(shapes) > 3
    assert ends >= {(True, True), (True, False)}
    assert dropped


@pytest.mark.parametrize(
    ("temperature", "num_nodes", "depth", "sharpness"),
    [
        (1.0, 12, 3, 1.0),
        pytest.param(0.0, 7, 3, 2.5, marks=thorough),
        pytest.param(0.7, 2, 1, 2.5, marks=thorough),
        pytest.param(0.0, 40, 10, 1.0, marks=thorough),
    ],
)
def test_the_kept_nodes_are_the_best_of_all_paths(temperature, num_nodes, depth, sharpness):
    """`expand` is more than the tokens that exist, and more than the nodes of the tree."""
    model = random_model(st.ModelConfig.tiny(vocab_size=VOCAB, num_layers=1, tie_embeddings=False))
    text, keys = [2, 1, 3], jax.random.split(jax.random.key(3), 1)
    noise = position_noise(keys, jnp.zeros(1, jnp.int32), depth, VOCAB) if temperature else None
    drafter = st.DynamicDrafter(model, expand=64, sharpness=sharpness)
    topology = st.TreeTopology.budget(num_nodes, depth)
    draft = proposed(drafter, topology, text, temperature=temperature, key=3, noise=noise)
    tokens, tree = jax.tree.map(lambda part: np.asarray(part[0]), (draft.tokens, draft.tree))
    paths = paths_of(tokens, tree.parents, tree.valid)

    # No node of so few is below more than 64 others of its level: these are the best of all.
    options = dict(sharpness=sharpness, noise=noise, temperature=temperature)
    next_log_probs = functools.partial(log_probs_after, model, text, **options)
    best, _ = dynamic_tree(next_log_probs, num_nodes, depth, 64)
    assert len(paths) == num_nodes
    assert set(paths) == set(best)


@thorough
def test_ties_are_a_tree():
    """All logits are equal: of equal scores the node that comes first stays."""
    model = tiny_model(HYBRID)
    flat = with_weight(model, "head", lambda head: 0.0 * head)
    drafter = st.DynamicDrafter(flat, expand=4)
    for _, draft, _, _ in steps(model, drafter=drafter, topology=SHALLOW, count=1):
        for row in range(len(PROMPTS)):
            assert draft.tree.parents[row].tolist() == [-1, 0, 0, 0, 0, 1, 1]
            assert draft.tokens[row, 1:].tolist() == [0, 1, 2, 3, 0, 1]


def test_a_program_serves_every_sharpness():
    structures = {
        jax.tree.structure(st.DynamicDrafter(tiny_model(), sharpness=s)) for s in (1.0, 2.5)
    }
    assert len(structures) == 1
