"""Logits processors: with trees, the text is that of autoregressive decoding with the same ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.loop import RULED_OUT
from stree_jax.decoding.nodes import MAX_UNROLLED
from stree_jax.decoding.options import plan
from stree_jax.decoding.processor_rows import Ruling, processors_of
from stree_jax.testing import PROMPTS, assert_same_text, perturbed, tiny_model
from tests.decoding.rules import SIZE, Walk, autoregressive, random_walk, ruled, ruling_of
from tests.decoding.texts import ROWS, decoded, ended, planned
from tests.helpers import forget_many_programs, heads_of

Topology = st.TreeTopology
RAGGED = Topology.from_parents([-1, 0, 1, 2, 0, 4, 2, 6, 3])
KEY = jax.random.key(5)


@pytest.fixture(autouse=True)
def _forget_programs():
    forget_many_programs()


def alike(target):
    return perturbed(target, 0.1)


# A drafter from a target, and a tree. All but the first have a shape that the loop has to find out.
METHODS = {
    "ragged": (lambda target: st.ModelDrafter(alike(target)), RAGGED),
    "deep": (lambda target: st.ModelDrafter(alike(target)), Topology.beam(2, MAX_UNROLLED + 2)),
    "beam": (lambda target: st.BeamDrafter(alike(target)), Topology.beam(3, 3)),
    "dynamic": (
        lambda target: st.DynamicDrafter(alike(target), expand=4),
        Topology.budget(9, 4),
    ),
    "lookup": (lambda target: st.NgramDrafter(), Topology.from_branching((2, 2, 1))),
    "heads": (lambda target: st.MedusaDrafter(target, heads_of(target)), RAGGED),
    "turns": (
        lambda target: st.InterleavedDrafter(alike(target), perturbed(target, 0.15, 1), "sqqs"),
        None,
    ),
    "cascade": (
        lambda target: st.CascadeDrafter(alike(target), st.ModelDrafter(alike(target)), rounds=2),
        None,
    ),
}
FAST = [
    ("plain", "ragged"),
    ("plain", "dynamic"),
    ("mamba2attn hybrid", "ragged"),
]
SLOW = [
    *(("plain", name) for name in ("deep", "beam", "lookup", "heads", "turns", "cascade")),
    ("falcon_h1 hybrid", "ragged"),
    ("nemotron_h hybrid", "dynamic"),
]


def options_of(target, name):
    make, topology = METHODS[name]
    return dict(drafter=make(target), topology=topology)


@pytest.mark.parametrize(
    ("family", "name"), [*FAST, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)]
)
def test_text_and_cache_are_those_of_autoregressive_decoding(family, name):
    """Rows of all ways of sampling, with processors of their own."""
    target = tiny_model(family)
    request = ruled(planned(target, ROWS, **options_of(target, name)), range(len(ROWS)))
    out = decoded(target, request)
    assert_same_text(target, request, out, autoregressive(family))
    assert out.stats.num_accepted > 0
    free = [i for i in range(len(ROWS)) if not ruling_of(i).processors]
    plain = decoded(target, planned(target, [ROWS[i] for i in free]))
    np.testing.assert_array_equal(out.tokens[np.array(free)], plain.tokens)


def test_a_row_does_not_depend_on_its_place_in_the_batch():
    target, order = tiny_model(), np.random.default_rng(0).permutation(len(ROWS))
    rows = [ROWS[i] for i in order]
    out = decoded(target, ruled(planned(target, rows, **options_of(target, "ragged")), order))
    np.testing.assert_array_equal(out.tokens, autoregressive().tokens[order])


def test_every_rule_changes_texts():
    ways = [way for i in range(7) for way in ruling_of(i).processors[:1]]
    assert len(ways) == 7
    free = st.generate(tiny_model(), PROMPTS, max_new_tokens=24).tokens
    for index, one in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5)):
        rules = [ruling_of(index).processors[one]]
        out = st.generate(tiny_model(), PROMPTS, max_new_tokens=24, processors=rules).tokens
        assert (out != free).any(), rules


def test_drafts_are_masked():
    """With the target as its own draft every first child is right, whatever the rules are."""
    target, topology = tiny_model(), Topology.from_branching((2, 1, 1))
    for make in (st.ModelDrafter, st.BeamDrafter):
        out = st.generate(
            target,
            PROMPTS,
            max_new_tokens=24,
            drafter=make(target),
            topology=topology,
            processors=[random_walk(share=0.08), st.RepetitionPenalty(1.4)],
        )
        assert out.stats.tau == 4.0, make


def test_rows_whose_tokens_are_all_ruled_out_end_alone():
    """The walk ends after two tokens, of the second row after its first; drafts go on below."""
    table = -jnp.ones((3, SIZE), jnp.int32)
    table = table.at[0, 4:30].set(1).at[1, 4:30].set(2)
    rules = [Ruling((Walk(table, start),)) for start in (0, 1, 0)]
    options = dict(drafter=st.ModelDrafter(tiny_model()), topology=Topology.chain(3))
    request = plan(tiny_model(), PROMPTS, **options)
    sampling = dataclasses.replace(request.sampling, processors=processors_of(rules))
    out = ended(tiny_model(), request._replace(sampling=sampling))
    assert out.failed.tolist() == [RULED_OUT] * 3
    assert out.emitted.tolist() == [2, 1, 2]
    with pytest.raises(st.NonFiniteLogitsError, match="leave no token in row 0") as got:
        st.generate(tiny_model(), PROMPTS, processors=[Walk(table)], **options)
    with pytest.raises(st.NonFiniteLogitsError) as want:
        st.generate(tiny_model(), PROMPTS, processors=[Walk(table)])
    np.testing.assert_array_equal(got.value.generation.tokens, want.value.generation.tokens)


def test_without_processors_the_state_has_no_leaves():
    request = plan(tiny_model(), PROMPTS)
    assert jax.tree.leaves(request.sampling.processors) == []
    state = request.decoder.start(tiny_model(), None, request.context, request.keys)
    assert jax.tree.leaves(state.processors) == []
