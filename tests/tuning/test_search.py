"""The acceptance of a tree, and which trees are tried."""

import functools

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.measuring import Costs
from stree_jax.testing import perturbed, tiny_model
from stree_jax.tuning import RankTrace, rank_trace
from stree_jax.tuning.search import acceptance, best_trees, replay_tau

PROMPTS = [[5, 9, 2, 30, 11], [3], [1, 2, 3, 4, 1, 2]]
TREES = [
    (st.TreeTopology.chain(1), st.TreeTopology.paper("A")),
    (st.TreeTopology.chain(4), st.TreeTopology.from_parents([-1, 0, 1, 2, 0, 4, 2, 6, 7])),
]


@functools.cache
def forests(nodes):
    """All ordered forests of so many nodes, each tree as the forest of its children."""
    if nodes == 0:
        return ((),)
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in forests(size - 1)
        for rest in forests(nodes - size)
    )


def expected(forest, accept, depth=0):
    """Accepted drafts below a node, given that it is reached; minus infinity if too deep."""
    total = 0.0
    for rank, children in enumerate(forest):
        if depth == len(accept) or rank == accept.shape[1]:
            return -np.inf
        total += accept[depth, rank] * (1 + expected(children, accept, depth + 1))
    return total


def forest_of(topology, node=0):
    """Its children are in the order of rank."""
    return tuple(forest_of(topology, child) for child in topology.children[node])


def costs(level=0.0):
    return Costs({1: 1.0, 64: 1.0}, level, {1: level})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_depth", [1, 2, 3, 6])
def test_best_trees_are_the_best_of_all_ordered_trees(seed, max_depth):
    rng = np.random.default_rng(seed)
    accept = -np.sort(-rng.dirichlet(np.ones(8), size=6)[:, :7], axis=1)
    found = best_trees(accept, costs(), 7, max_depth)
    for nodes in range(2, 8):
        best = max(expected(forest, accept[:max_depth]) for forest in forests(nodes - 1))
        ours = max(expected(forest_of(t), accept) for t in found if t.num_nodes == nodes)
        assert ours == pytest.approx(best, abs=1e-12)
    assert all(t.depth <= max_depth for t in found)


def test_costs_decide_between_sizes_and_depths():
    accept = np.array([[0.6, 0.2, 0.1]] * 4)
    flat = best_trees(accept, costs(), 16, 4)[0]
    assert flat.num_nodes == 16
    steep = best_trees(accept, Costs({1: 1.0, 2: 1.1, 3: 9.0}, 0.0, {1: 0.0}), 16, 4)[0]
    assert steep.num_nodes == 2
    slow_draft = best_trees(accept, costs(level=3.0), 16, 4)[0]
    assert slow_draft.depth < flat.depth
    # Jumps are kept: nothing fits a line through the sizes.
    assert Costs({1: 1.0, 2: 3.0, 4: 4.0}, 0.5, {1: 0.25, 2: 0.5}).step(
        st.TreeTopology.from_branching((2, 1))  # 5 nodes; 2 nodes of level 1 have a child
    ) == pytest.approx(4.0 + 0.5 + 0.5)


def test_acceptance_is_counted_below_what_was_accepted():
    trace = RankTrace([np.array([0, 1, 2, 0]), np.array([2, 0])], 2)
    np.testing.assert_allclose(acceptance(trace, 2), [[3 / 6, 1 / 6], [0, 1 / 2]])


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "shared noise"])
def traced(request):
    """A drafter, and the ranks of what the target writes; one text ends early."""
    model = tiny_model()
    drafter = st.ModelDrafter(perturbed(model, 0.2))
    options = dict(max_new_tokens=40, temperature=request.param, key=jax.random.key(3))
    free = st.generate(model, PROMPTS, **options)
    options["eos_token"] = int(free.tokens[1, 9])
    out = st.generate(model, PROMPTS, **options)
    assert len(set(out.lengths.tolist())) > 1
    written = [row[:length] for row, length in zip(out.tokens, out.lengths, strict=True)]
    made_by = plan(model, PROMPTS, **options)
    return drafter, options, rank_trace(drafter, model, made_by, written, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("i", range(2))
def test_replay_is_decoding(i, traced):
    """Two trees greedily, and two others with shared noise."""
    drafter, options, trace = traced
    topology = TREES[options["temperature"] > 0][i]
    out = st.generate(tiny_model(), PROMPTS, drafter=drafter, topology=topology, **options)
    assert replay_tau(topology, trace) == pytest.approx(out.stats.tau, abs=1e-12)


def test_candidates_of_random_draws_are_refused():
    drafter = st.ModelDrafter(tiny_model(), child_sampling="iid")
    request = plan(tiny_model(), PROMPTS, temperature=1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="'iid' draws new candidates.*use 'shared'"):
        rank_trace(drafter, tiny_model(), request, [np.array([1])] * 3, 8)
