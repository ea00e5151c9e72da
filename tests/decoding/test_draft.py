import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.nodes import MAX_UNROLLED
from stree_jax.decoding.options import plan
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import apply, state_after

PROMPTS = [[5, 9, 2, 30], [3], [1, 2, 3, 4, 1, 2, 3, 4]]
ZERO = Sampling(jnp.zeros(1), temperature_is_zero=True)


# More levels than are unrolled: one path, with leaves and branches of several widths beside it.
DEEP = st.TreeTopology.from_parents(
    [*range(-1, MAX_UNROLLED + 2), 0, 2, 2, 4, 14, 15, 6, 6, MAX_UNROLLED]
)


@pytest.mark.unrolled
@pytest.mark.parametrize("children", ["top_k", "iid", "without_replacement"])
@pytest.mark.parametrize(
    "topology", [st.TreeTopology.from_branching((2, 1, 1)), DEEP], ids=["unrolled", "looped"]
)
def test_drafts_come_from_the_draft_model_given_their_whole_path(topology, children):
    """Over several steps, which include replay and the catch-up token."""
    target = tiny_model()
    draft_model = perturbed(target, 0.1)
    greedy = children == "top_k"
    request = plan(
        target,
        PROMPTS,
        max_new_tokens=60,
        drafter=(drafter := st.ModelDrafter(draft_model, child_sampling=children)),
        topology=topology,
        temperature=0.0 if greedy else 0.7,
        key=jax.random.key(2),
    )
    topology, temperature = request.decoder.topology, float(request.sampling.temperature[0])
    state = request.decoder.start(target, drafter, request.context, request.keys)
    catch_up = set()
    for _ in range(5):
        before = jax.tree.map(np.asarray, state.context)
        state, draft, _ = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        catch_up |= set(np.ravel(state.drafter.reader.has_catch_up).tolist())
        draft = jax.tree.map(np.asarray, draft)
        for row in range(len(PROMPTS)):
            read = before.tokens[row, : before.length[row]].tolist()
            for node, below in enumerate(topology.children):
                if not below:
                    continue
                path = np.flatnonzero(topology.ancestor_mask[node])[1:]
                sequence = np.array([[*read, *draft.tokens[row, path]]], np.int32)
                padded = np.pad(sequence, ((0, 0), (0, 96 - sequence.shape[1])))
                logits = np.asarray(apply(draft_model, padded)[0, sequence.shape[1] - 1])
                drawn = draft.tokens[row, list(below)]
                if greedy:
                    assert drawn.tolist() == np.argsort(-logits)[: len(below)].tolist()
                    continue
                want = jax.nn.log_softmax(logits / temperature)
                got = draft.log_probs[row, draft.log_prob_row[node]]
                np.testing.assert_allclose(got, want, atol=2e-4)
                if children == "without_replacement":
                    assert len(set(drawn.tolist())) == len(below)
    assert catch_up == {False, True}


def test_children_that_cannot_be_drawn_do_not_exist():
    """Top-k 1 leaves one token; a second child without replacement is impossible."""
    target = tiny_model()
    drafter = st.ModelDrafter(target, child_sampling="without_replacement")
    request = plan(
        target,
        PROMPTS,
        drafter=drafter,
        topology=st.TreeTopology.from_branching((2, 1)),
        temperature=1.0,
        top_k=1,
        key=jax.random.key(0),
    )
    state = request.decoder.start(target, drafter, request.context, request.keys)
    _, draft, verdict = request.decoder.step(
        target, drafter, state, request.limits, request.sampling
    )
    assert draft.tree.valid.tolist() == [[True, True, False, True, False]] * 3
    assert verdict.num_accepted.tolist() == [2, 2, 2]  # draft and target agree on the one token


@pytest.mark.slow
@pytest.mark.unrolled
@pytest.mark.parametrize("kind", [st.ModelDrafter, st.BeamDrafter, st.DynamicDrafter])
def test_programs_do_not_grow_with_the_depth_of_a_tree(kind):
    """A drafter on a chain of 40 did not compile within a minute."""

    def operations(depth):
        drafter, topology = kind(tiny_model()), st.TreeTopology.beam(2, depth)
        context = Context(jnp.zeros((1, 64), jnp.int32), jnp.ones(1, jnp.int32))

        def propose(context):
            state = state_after(drafter, context, topology, 64)
            keys = jax.random.split(jax.random.key(0), 1)
            return drafter.propose(state, Step(context, keys, None, ZERO), topology)[0]

        return str(jax.make_jaxpr(propose)(context)).count(" = ")

    assert operations(40) == operations(MAX_UNROLLED + 1) < operations(MAX_UNROLLED)


def lookup(row, topology, **options):
    drafter = st.NgramDrafter(**options)
    tokens = np.zeros((1, 20), np.int32)
    tokens[0, : len(row)] = row
    context = Context(jnp.asarray(tokens), jnp.array([len(row)], jnp.int32))
    step = Step(context, jax.random.split(jax.random.key(0), 1), None, ZERO)
    draft, _ = drafter.propose(None, step, topology)
    return [
        int(token) if valid else None
        for token, valid in zip(draft.tokens[0], draft.tree.valid[0], strict=True)
    ]


CHAIN = st.TreeTopology.chain(3)


@pytest.mark.parametrize(
    ("row", "topology", "options", "want"),
    [
        # What followed 1 2 before.
        ([1, 2, 7, 8, 9, 1, 2], CHAIN, {}, [2, 7, 8, 9]),
        # No earlier occurrence: no drafts.
        ([1, 2, 3, 4], CHAIN, {}, [4, None, None, None]),
        ([5], CHAIN, {}, [5, None, None, None]),
        # A longer match wins over a later one.
        ([1, 2, 7, 3, 2, 8, 1, 2], CHAIN, {}, [2, 7, 3, 2]),
        # Among matches of one length the latest wins.
        ([2, 7, 2, 8, 2], CHAIN, {}, [2, 8, 2, 8]),
        # Matches below min_match do not count.
        ([3, 2, 7, 1, 2], CHAIN, {"min_match": 2}, [2, None, None, None]),
        # A tree takes different continuations, and continues each with what followed it.
        (
            [1, 2, 7, 5, 1, 2, 8, 6, 1, 2],
            st.TreeTopology.from_branching((2, 1)),
            {},
            [2, 8, 7, 6, 5],
        ),
        # A second child only where there is a second continuation.
        ([1, 2, 7, 5, 1, 2], st.TreeTopology.from_branching((2, 1)), {}, [2, 7, None, 5, None]),
        # A repeated token continues itself: the match overlaps what it predicts.
        ([4, 4, 4], CHAIN, {}, [4, 4, 4, 4]),
    ],
)
def test_prompt_lookup(row, topology, options, want):
    assert lookup(row, topology, **options) == want


def test_prompt_lookup_ignores_what_is_past_the_end():
    """The buffer beyond the last token holds tokens of rejected paths, which must not be read."""
    drafter = st.NgramDrafter()
    tokens = jnp.array([[1, 2, 3, 1, 2, 9, 1, 2, 9]], jnp.int32)
    context = Context(tokens, jnp.array([5], jnp.int32))
    step = Step(context, jax.random.split(jax.random.key(0), 1), None, ZERO)
    draft, _ = drafter.propose(None, step, st.TreeTopology.chain(2))
    assert draft.tokens[0].tolist() == [2, 3, 1]
