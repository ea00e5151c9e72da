"""Dynamic trees: the nodes that are kept, and that output is autoregressive output."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.sampling import position_noise
from stree_jax.decoding.types import Context, Sampling
from stree_jax.testing import perturbed, randomised, tiny_model
from tests.decoding import test_lossless, test_same_key
from tests.decoding.test_beam import HYBRID, steps, with_head
from tests.decoding.test_lossless import PROMPTS, decode
from tests.decoding.test_same_key import ROWS, sample
from tests.helpers import apply

BUDGET = st.TreeTopology.budget(9, 4)
SHALLOW = st.TreeTopology.budget(7, 3)
VOCAB = 4


@pytest.fixture(scope="module")
def autoregressive():
    return decode()


@pytest.fixture(scope="module")
def sampled():
    return sample()[0]


def dynamic_tree(next_log_probs, num_nodes, depth, expand):
    """The definition: every path is a tuple of tokens, all candidates are sorted.

    Returns the kept paths with their scores, best first, and the paths that were read.
    """
    level, scores, read = [()], {(): 0.0}, set()
    for _ in range(depth):
        read |= set(level)
        below = []
        for path, log_probs in zip(level, next_log_probs(level), strict=True):
            for token in np.argsort(-log_probs, kind="stable")[:expand]:
                below.append((*path, int(token)))
                scores[below[-1]] = scores[path] + log_probs[token]
        level = sorted(below, key=lambda path: -scores[path])[:expand]
    kept = sorted(scores, key=lambda path: (-scores[path], len(path)))[:num_nodes]
    return {path: scores[path] for path in kept}, read


def paths_of(tokens, parents, valid):
    """The path of each node that exists; parents come first."""
    paths = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], int(tokens[node])))
    return [path for path, exists in zip(paths, valid, strict=True) if exists]


def test_the_kept_nodes_are_the_best_of_a_sorted_list():
    """Over several steps: after nodes that were read, that were not, and that were dropped."""
    target = tiny_model(HYBRID)
    model, expand, sharpness = perturbed(target, 0.02), 4, 4.0
    drafter = st.DynamicDrafter(model, expand=expand, sharpness=sharpness)
    shapes, ends, dropped = set(), set(), 0

    def next_log_probs(text, paths):
        padded = np.zeros((expand, 40), np.int32)
        for row, path in zip(padded, paths, strict=False):
            row[: len(text) + len(path)] = [*text, *path]
        last = len(text) + len(paths[0]) - 1
        logits = apply(model, padded)[: len(paths), last, :37]  # the rest is padding
        return np.asarray(jax.nn.log_softmax(sharpness * logits), np.float64)

    for before, draft, verdict in steps(target, drafter, SHALLOW, count=5):
        for row in range(len(PROMPTS)):
            text = before.tokens[row, : before.length[row]].tolist()
            kept, read = dynamic_tree(
                functools.partial(next_log_probs, text), SHALLOW.num_nodes, SHALLOW.depth, expand
            )
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


def tiny_vocabulary(temperature, num_nodes, depth, expand, sharpness):
    """A tree of a model of 4 tokens in one row, and the log-probability of every token."""
    config = st.ModelConfig.tiny(vocab_size=VOCAB, num_layers=1, tie_embeddings=False)
    model = randomised(st.HybridLM(config, rngs=nnx.Rngs(0)), 0)
    topology = st.TreeTopology.budget(num_nodes, depth)
    text = [2, 1, 3]
    context = Context(jnp.array([text], jnp.int32), jnp.array([3], jnp.int32))
    sampling = Sampling(
        jnp.full(1, temperature or 1.0), jnp.zeros(1, int), jnp.ones(1), temperature == 0, False
    )
    keys = jax.random.split(jax.random.key(3), 1)
    noise = position_noise(keys, jnp.zeros(1, jnp.int32), depth, VOCAB) if temperature else None

    @jax.jit
    def propose(drafter):
        state = drafter.prepare(context, topology, max_length=16)
        return drafter.propose(state, context, keys, sampling, topology, noise)[0]

    draft = propose(st.DynamicDrafter(model, expand=expand, sharpness=sharpness))

    def next_log_probs(path):
        logits = apply(model, np.array([[*text, *path]], np.int32))[0, -1]
        if temperature:
            logits = logits / temperature + noise[0, len(path)]
        return np.asarray(jax.nn.log_softmax(sharpness * logits), np.float64)

    return jax.tree.map(
        lambda part: np.asarray(part[0]), draft._replace(log_prob_row=jnp.zeros(1))
    ), next_log_probs


@pytest.mark.parametrize(
    ("temperature", "num_nodes", "depth", "sharpness"),
    [(0.0, 7, 3, 2.5), (1.0, 12, 3, 1.0), (0.7, 2, 1, 2.5), (0.0, 40, 10, 1.0)],
)
def test_the_kept_nodes_are_the_best_of_all_paths(temperature, num_nodes, depth, sharpness):
    """`expand` is more than the tokens that exist, and more than the nodes of the tree."""
    draft, next_log_probs = tiny_vocabulary(temperature, num_nodes, depth, 64, sharpness)
    scores = {(): 0.0}
    threshold = -np.inf
    for _ in range(depth):
        level = max(map(len, scores))
        for path in [path for path in scores if len(path) == level and scores[path] >= threshold]:
            for token, log_prob in enumerate(next_log_probs(path)):
                scores[(*path, token)] = scores[path] + log_prob
        # No path below this is among the best: enough are better already.
        threshold = sorted(scores.values())[-num_nodes:][0]
    best = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
    paths = paths_of(draft.tokens, draft.tree.parents, draft.tree.valid)
    assert len(paths) == num_nodes
    assert set(paths) == set(best)
    assert all(scores[path] <= scores[path[:-1]] for path in paths if path)
    assert all(path[:-1] in paths for path in paths if path)


def test_ties_are_a_tree():
    """All logits are equal: of equal scores the node that comes first stays."""
    model = tiny_model(HYBRID)
    flat = with_head(0.0, model)
    for _, draft, _ in steps(model, st.DynamicDrafter(flat, expand=4), SHALLOW, count=1):
        for row in range(len(PROMPTS)):
            assert draft.tree.parents[row].tolist() == [-1, 0, 0, 0, 0, 1, 1]
            assert draft.tokens[row, 1:].tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("kind", ["itself", "alike", "unrelated"])
def test_greedy_output_is_autoregressive_output(kind, autoregressive):
    target = tiny_model()
    model = {
        "itself": target,
        "alike": perturbed(target, 0.1),
        "unrelated": tiny_model(seed=1),
    }[kind]
    out = decode(drafter=st.DynamicDrafter(model, expand=4), topology=BUDGET)
    test_lossless.assert_same_tokens(out, autoregressive)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), out.cache, autoregressive.cache
    )
    assert out.stats.num_drafted == 8 * out.stats.num_target_calls
    low, high = {"itself": (3, 5), "alike": (1.5, 3), "unrelated": (1, 1.5)}[kind]
    assert low < out.stats.tau <= high


@pytest.mark.parametrize("size", [(1, 0), (2, 1), (3, 2)])
def test_small_budgets(size, autoregressive):
    drafter = st.DynamicDrafter(perturbed(tiny_model(), 0.1))
    out = decode(drafter=drafter, topology=st.TreeTopology.budget(*size))
    test_lossless.assert_same_tokens(out, autoregressive)
    assert (out.stats.tau > 1) == (size[0] > 1)


def test_every_row_of_a_batch_has_the_tree_that_it_has_alone():
    drafter = st.DynamicDrafter(perturbed(tiny_model(), 0.1), expand=4)
    together = decode(drafter=drafter, topology=BUDGET)
    calls = together.stats.target_calls_per_row
    order = [2, 0, 1]
    other = decode(drafter=drafter, topology=BUDGET, prompts=[PROMPTS[i] for i in order])
    np.testing.assert_array_equal(other.tokens, together.tokens[order])
    np.testing.assert_array_equal(other.stats.target_calls_per_row, calls[order])


def test_sampled_output_is_autoregressive_output_with_the_same_key(sampled):
    """At all temperatures and filters at once; rows have samplings of their own."""
    taus = []
    for draft in (tiny_model(), perturbed(tiny_model(), 0.1), tiny_model(seed=1)):
        new, tau = sample(drafter=st.DynamicDrafter(draft, expand=4), topology=BUDGET)
        test_same_key.assert_same_tokens(new, sampled)
        taus.append(tau)
    itself, alike, unrelated = taus
    assert itself > 3 > alike > unrelated > 1


def test_sampled_rows_do_not_depend_on_their_place(sampled):
    order = np.random.default_rng(0).permutation(len(ROWS))
    drafter = st.DynamicDrafter(perturbed(tiny_model(), 0.1), expand=4)
    new, _ = sample([ROWS[i] for i in order], drafter=drafter, topology=BUDGET)
    np.testing.assert_array_equal(new, sampled[order])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "name",
    ["mamba2attn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("falcon_h1", "nemotron_h"))],
)
def test_hybrids(name, temperature):
    model = tiny_model(f"{name} hybrid")
    options = dict(
        max_new_tokens=16, temperature=temperature, key=jax.random.key(1), return_cache=True
    )
    drafter = st.DynamicDrafter(perturbed(model, 0.1), expand=3)
    plain = st.generate(model, PROMPTS, **options)
    out = st.generate(model, PROMPTS, drafter=drafter, topology=BUDGET, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out.cache, plain.cache
    )
    assert out.stats.tau > 1.3


def test_a_program_serves_every_sharpness():
    structures = {
        jax.tree.structure(st.DynamicDrafter(tiny_model(), sharpness=s)) for s in (1.0, 2.5)
    }
    assert len(structures) == 1


def test_testing_verifiers_are_refused():
    options = dict(drafter=st.DynamicDrafter(tiny_model()), temperature=1.0, key=jax.random.key(0))
    assert plan(tiny_model(), PROMPTS, **options).decoder.verifier.name == "target_only"
    for verifier in ("multi_step", "without_replacement", "traversal"):
        with pytest.raises(ValueError, match="not exact for child_sampling = 'shared'") as error:
            plan(tiny_model(), PROMPTS, verifier=verifier, **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(expand=0), "expand must be an integer, at least 1; got 0"),
        (dict(sharpness=0.0), "sharpness must be a number above 0, got 0.0"),
        (dict(sharpness=np.nan), "sharpness must be a number above 0, got nan"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        st.DynamicDrafter(tiny_model(), **arguments)


def test_a_tree_that_is_larger_than_the_search_is_refused():
    drafter = st.DynamicDrafter(tiny_model(), expand=2)
    plan(tiny_model(), PROMPTS, drafter=drafter, topology=st.TreeTopology.budget(11, 3))
    with pytest.raises(ValueError, match="expand = 2 scores at most 10 drafts in 3 levels, fewer"):
        plan(tiny_model(), PROMPTS, drafter=drafter, topology=st.TreeTopology.budget(12, 3))
