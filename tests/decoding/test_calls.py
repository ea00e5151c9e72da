"""Which call emitted a token, and whether it was a draft: the loop's record, and what shows it."""

import html
import io
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from rich.console import Console

import stree_jax as st
from stree_jax.decoding.showing import counts
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import rows

PROMPTS = [[5, 9, 2], [3]]
TREE = st.TreeTopology.from_branching((2, 1))


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
        assert counts(out, row).startswith(f"{size} tokens from {want[-1]} calls of the target")
        ends = np.flatnonzero(np.diff(want, append=0))
        own = np.flatnonzero(~out.drafted[row, :size])
        assert {*own} <= {*ends}  # the target's own token is the last of a call
        assert {*ends[:-1]} <= {*own}  # which only the limit may cut
    assert out.drafted.sum() == out.stats.num_accepted > 0
    assert plain._repr_html_() is None
    with pytest.raises(ValueError, match=r"generate\(\.\.\., record_calls=True\)"):
        plain.show()


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
    file = io.StringIO()
    out.show(Console(file=file, width=20))
    assert file.getvalue() == f"[ a<]b[\nc]\n{count}\n"
    file = io.StringIO()
    out.show(Console(file=file, force_terminal=True, color_system="standard", width=20))
    assert "\x1b[32m a<\x1b[0m\x1b[1mb\x1b[0m\n\x1b[32mc\x1b[0m\n" in file.getvalue()
    page = out._repr_html_()
    ElementTree.fromstring(page.replace("<br>", "<br/>"))  # well-formed
    calls = re.findall(r'title="call (\d)"[^>]*>(.*?)</span></span>', page, re.DOTALL)
    text = [[html.unescape(t) for t in re.findall(">([^<]*)(?:<|$)", call)] for _, call in calls]
    assert [number for number, _ in calls] == ["1", "2"]
    assert [list(filter(None, each)) for each in text] == [[" a<", "b"], ["\nc"]]
    assert count in page
    ids = st.Generation(out.tokens, out.lengths, stats, calls=out.calls, drafted=out.drafted)
    ids.show(Console(file=file))
    assert file.getvalue().endswith(f"[ 7] 8[ 9]\n{count}\n")


def test_a_tree_as_a_picture():
    """A node stands right of its parent and in the middle of its children; the root is there."""
    tree = st.TreeTopology.from_parents([-1, 0, 0, 2, 2, 1])
    picture = ElementTree.fromstring(tree._repr_svg_())
    kinds = [[each for each in picture if each.tag.endswith(tag)] for tag in ("circle", "line")]
    places = [(float(each.get("cx")), float(each.get("cy"))) for each in kinds[0]]
    ends = [tuple(float(each.get(f"{a}{i}")) for i in "12" for a in "xy") for each in kinds[1]]
    assert ends == [(*places[p], *places[n]) for n, p in enumerate(tree.parents) if n]
    assert all(places[p][0] < places[n][0] for n, p in enumerate(tree.parents) if n)
    assert places[2][1] == (places[3][1] + places[4][1]) / 2
    assert len({*places}) == 6
    assert max(x for x, _ in places) < float(picture.get("width"))
    assert max(y for _, y in places) < float(picture.get("height"))
    assert st.TreeTopology.chain(300)._repr_svg_() is None
