import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.drafters import levels
from stree_jax.testing import perturbed, tiny_model
from tests.decoding.texts import log_probs_after, proposed, steps
from tests.helpers import some
from tests.methods import CHAIN, KEY, PROMPTS

NARROW = st.TreeTopology.from_branching((2, 1))
# One path, with leaves and branches of several widths beside it.
DEEP = st.TreeTopology.from_parents([*range(-1, 10), 0, 2, 2, 4, 14, 15, 6, 6, 8]).level_order()

FEW_LEVELS = st.TreeTopology.from_parents([-1, 0, 0, 1, 2, 2, 4, 4, 5]).level_order()


@pytest.mark.parametrize(
    "children", some(["top_k", "iid", "without_replacement"], "without_replacement")
)
@pytest.mark.parametrize(
    "topology",
    some([st.TreeTopology.from_branching((2, 1, 1)), DEEP, FEW_LEVELS], DEEP, FEW_LEVELS),
    ids=["even", "uneven", "one by one"],
)
def test_drafts_come_from_the_draft_model_given_their_whole_path(topology, children, monkeypatch):
    """Over several steps, which include replay and the catch-up token."""
    if topology == FEW_LEVELS:  # as on a GPU
        monkeypatch.setitem(levels.MOST_ONE_BY_ONE, "cpu", 5)
    target = tiny_model()
    draft_model = perturbed(target, 0.1)
    temperature = 0.0 if children == "top_k" else 0.7
    options = dict(drafter=st.ModelDrafter(draft_model, child_sampling=children), topology=topology)
    options |= dict(max_new_tokens=60, temperature=temperature, key=KEY)
    ends = set()
    for before, draft, verdict, _ in steps(target, count=5, **options):
        ends |= {bool(topology.children[last]) for last in verdict.last}
        for row in range(len(PROMPTS)):
            read = before.tokens[row, : before.length[row]].tolist()
            for node, below in enumerate(topology.children):
                if not below:
                    continue
                path = np.flatnonzero(topology.ancestor_mask[node])[1:]
                paths = [draft.tokens[row, path]]
                (want,) = log_probs_after(draft_model, read, paths, 1 / (temperature or 1))
                drawn = draft.tokens[row, list(below)]
                if not temperature:
                    assert drawn.tolist() == np.argsort(-want)[: len(below)].tolist()
                    continue
                got = draft.log_probs[row, draft.log_prob_row[node]]
                np.testing.assert_allclose(got, want, atol=2e-4)
                if children == "without_replacement":
                    assert len(set(drawn.tolist())) == len(below)
    assert ends == {False, True}  # paths that end in a leaf, which was not read, and others


@pytest.mark.thorough
def test_children_that_cannot_be_drawn_do_not_exist():
    """Top-k 1 leaves one token; a second child without replacement is impossible."""
    drafter = st.ModelDrafter(tiny_model(), child_sampling="without_replacement")
    options = dict(drafter=drafter, topology=NARROW, temperature=1.0, top_k=1, key=KEY)
    ((_, draft, verdict, _),) = steps(tiny_model(), count=1, **options)
    assert draft.tree.valid.tolist() == [[True, True, False, True, False]] * 3
    assert verdict.num_accepted.tolist() == [2, 2, 2]  # draft and target agree on the one token


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [st.ModelDrafter, st.BeamDrafter, st.DynamicDrafter])
def test_programs_do_not_grow_with_the_depth_of_a_tree(kind):
    """Unrolled, a drafter on a chain of 40 did not compile within a minute."""

    def operations(depth):
        drafter, topology = kind(tiny_model()), st.TreeTopology.beam(2, depth)
        program = jax.make_jaxpr(lambda drafter: proposed(drafter, topology, [1] * 64))(drafter)
        return str(program).count(" = ")

    assert operations(40) == operations(9)


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
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], NARROW, {}, [2, 8, 7, 6, 5]),
        # A second child only where there is a second continuation.
        ([1, 2, 7, 5, 1, 2], NARROW, {}, [2, 7, None, 5, None]),
        # A repeated token continues itself: the match overlaps what it predicts.
        ([4, 4, 4], CHAIN, {}, [4, 4, 4, 4]),
    ],
)
def test_prompt_lookup(row, topology, options, want):
    """The buffer beyond the last token holds tokens of rejected paths, which are not read."""
    past = [*row, *row, 9][: 20 - len(row)]
    draft = proposed(st.NgramDrafter(**options), topology, [*row, *past], length=len(row))
    drafted = zip(draft.tokens[0].tolist(), draft.tree.valid[0].tolist(), strict=True)
    assert [token if valid else None for token, valid in drafted] == want
