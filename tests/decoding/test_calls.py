"""Which call emitted a token, and whether it was a draft: the loop's record, and what shows it."""

import io

import numpy as np
import pytest
from rich.console import Console

import stree_jax as st
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import refusal, rows

PROMPTS = [[5, 9, 2], [3]]
TREE = st.TreeTopology.from_branching((2, 1))


def shown(generation, **options):
    console = Console(file=io.StringIO(), **options)
    generation.show(console)
    return console.file.getvalue()


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_record_is_what_the_loop_did(temperature):
    """Calls have the tokens that `stream` gives call by call; drafts are as many as accepted."""
    model = tiny_model()
    own = rows(max_new_tokens=[9, 7], temperature=[temperature] * 2, key=[0, 1], eos_token=[()] * 2)
    options = dict(drafter=st.ModelDrafter(perturbed(model, 0.05)), topology=TREE, options=own)
    plain, out = (st.generate(model, PROMPTS, record_calls=r, **options) for r in (False, True))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert plain.calls is plain.drafted is plain.pieces is None
    steps = [*st.stream(model, PROMPTS, **options)]
    for row, size in enumerate(out.lengths):
        by_call = [len(step[row]) for step in steps if step[row]]
        want = [number for number, count in enumerate(by_call, 1) for _ in range(count)]
        assert out.calls[row].tolist() == want + [0] * (9 - size)
        assert want[-1] == out.stats.target_calls_per_row[row]
        assert f"\n{size} tokens from {want[-1]} calls of the target" in shown(out)
        ends = np.flatnonzero(np.diff(want, append=0))
        own = np.flatnonzero(~out.drafted[row, :size])
        assert {*own} <= {*ends}  # the target's own token is the last of a call
        assert {*ends[:-1]} <= {*own}  # which only the limit may cut
    assert out.drafted.sum() == out.stats.num_accepted > 0
    refusal(r"generate\(\.\.\., record_calls=True\)", plain.show)


def test_a_generation_is_shown_call_by_call():
    """A call of a draft and an own token, then one that the limit cut at a draft."""
    ones = np.ones(1, int)
    stats = st.DecodeStatistics(1.5, 2, 3, 4, 2, ones, 1.5 * ones, 2 * ones)
    out = st.Generation(
        tokens=np.array([[7, 8, 9, st.PAD]]),
        lengths=np.array([3]),
        stats=stats,
        calls=np.array([[1, 1, 2, 0]]),
        drafted=np.array([[True, False, True, False]]),
        pieces=[[" a<", "b", "\nc"]],
    )
    count = "3 tokens from 2 calls of the target, 2 of them accepted drafts"
    assert shown(out, width=20) == f"[ a<]b[\nc]\n{count}\n"
    colours = shown(out, force_terminal=True, color_system="standard", width=20)
    assert "\x1b[32m a<\x1b[0m\x1b[1mb\x1b[0m\n\x1b[32mc\x1b[0m\n" in colours
    ids = st.Generation(out.tokens, out.lengths, stats, calls=out.calls, drafted=out.drafted)
    assert shown(ids).endswith(f"[ 7] 8[ 9]\n{count}\n")
