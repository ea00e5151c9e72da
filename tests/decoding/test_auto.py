"""`topology="auto"`: the text of no drafts, whatever trees steps take, and when they take which."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import tree_times
from stree_jax.decoding.auto import TREES
from stree_jax.decoding.plan import plan
from stree_jax.testing import perturbed, random_mtp_head, tiny_model
from tests.methods import PROMPTS

NEW = 24
SAMPLED = {"temperature": 1.0, "key": jax.random.key(3)}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def _times(monkeypatch):
    """Nothing is timed here, and no text teaches another."""
    monkeypatch.setattr(tree_times, "_measured", lambda *_: [1.0, 1.3, 1.6, 1.6])
    for name in ("_times", "_taught"):
        monkeypatch.setattr(tree_times, name, {})


def drafters(model):
    return {
        "model": st.ModelDrafter(perturbed(model, 0.05, 1)),
        "prompt lookup": st.NgramDrafter(),
        "head": st.MtpDrafter(model, random_mtp_head(model)),
    }


def steps(model, drafter, numbers, **options):
    """The state after steps with trees of these numbers, each after the other."""
    request = plan(
        model,
        PROMPTS,
        drafter=drafter,
        topology="auto",
        max_new_tokens=NEW,
        eos_token=(),
        **options,
    )
    arguments = request.context, request.keys, request.sampling
    state = request.decoder.start(model, request.drafter, *arguments)
    for number in numbers:
        if state.done.all():
            break
        own = state.drafter
        forced = jnp.full_like(state.step, number)
        own = own._replace(choosing=own.choosing._replace(forced=forced))
        state, _, _ = request.decoder.step(
            model, request.drafter, state._replace(drafter=own), request.limits, request.sampling
        )
    return state


@pytest.mark.parametrize("name", ["model", "prompt lookup", "head"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param(SAMPLED, marks=pytest.mark.thorough)], ids=["greedy", "sampled"]
)
def test_the_text_is_that_of_no_drafts_with_any_tree_at_any_step(name, options, model):
    numbers = np.random.default_rng(0).integers(0, len(TREES), 2 * NEW).tolist()
    want = st.generate(model, PROMPTS, max_new_tokens=NEW, eos_token=(), **options)
    state = steps(model, drafters(model)[name], numbers, **options)
    assert state.done.all()
    for row, prompt in enumerate(PROMPTS):
        new = np.asarray(state.context.tokens[row, len(prompt) : len(prompt) + NEW])
        assert new.tolist() == want.tokens[row].tolist()
    assert (np.asarray(state.drafter.choosing.counts) > 0).all()


def test_a_draft_model_that_was_off_reads_what_it_missed(model):
    """As good as its target, it has all drafts accepted, also after more tokens than a window."""
    state = steps(model, st.ModelDrafter(model), [0] * 18 + [3])
    assert np.asarray(state.drafter.choosing.behind).tolist() == [0] * len(PROMPTS)
    assert np.asarray(state.emitted).tolist() == [18 + 5] * len(PROMPTS)
    state = steps(model, st.ModelDrafter(model), [3] + [0] * 3)
    assert np.asarray(state.drafter.choosing.behind).tolist() == [3] * len(PROMPTS)


@pytest.mark.parametrize(("noise", "often"), [(0.0, TREES[3]), (30.0, TREES[0])])
def test_a_good_draft_gets_the_longest_chain_and_a_bad_one_nothing(noise, often, model):
    drafter = st.ModelDrafter(perturbed(model, noise, 1) if noise else model)
    options = {"max_new_tokens": 60, "eos_token": ()}
    want = st.generate(model, PROMPTS[:1], **options)
    for _ in range(2):  # the second time it knows
        out = st.generate(model, PROMPTS[:1], drafter=drafter, topology="auto", **options)
        assert out.tokens.tolist() == want.tokens.tolist()
    calls = out.stats.calls_by_tree
    assert sum(calls.values()) == out.stats.num_target_calls
    assert calls[often] >= 0.9 * out.stats.num_target_calls


def test_a_trial_finds_out_that_drafts_pay_again(model):
    """They failed for long, and would all be accepted now."""
    request = plan(model, PROMPTS, drafter=st.ModelDrafter(model), topology="auto", eos_token=())
    decoder, drafter = request.decoder, request.drafter
    state = decoder.start(model, drafter, request.context, request.keys)
    choosing = state.drafter.choosing
    failed = {"tried": choosing.tried + 50, "rest": choosing.rest + 1}
    failed |= {"pause": choosing.pause + 64, "trial": choosing.trial + 2}
    state = state._replace(drafter=state.drafter._replace(choosing=choosing._replace(**failed)))
    state = decoder.run(model, drafter, state, request.limits, request.sampling, 8)
    counts = np.asarray(state.drafter.choosing.counts)
    assert counts[:, 0].tolist() == [1] * len(PROMPTS)
    assert (np.asarray(state.drafter.choosing.pause) == 0).all()


def test_streams_and_texts_that_go_on(model):
    drafter = drafters(model)["model"]
    options = {"max_new_tokens": 12, "eos_token": ()}
    want = st.generate(model, PROMPTS, max_new_tokens=24, eos_token=())
    auto = {"drafter": drafter, "topology": "auto"}
    first = st.generate(model, PROMPTS, return_prefix=True, **auto, **options)
    nothing = [[] for _ in PROMPTS]
    then = st.generate(model, nothing, after=first.prefix, **auto, **options)
    assert np.hstack([first.tokens, then.tokens]).tolist() == want.tokens.tolist()
    rows = [[] for _ in PROMPTS]
    for pieces in st.stream(model, PROMPTS, **auto, **options):
        for row, piece in zip(rows, pieces, strict=True):
            row += piece
    assert rows == want.tokens[:, :12].tolist()


def test_what_it_refuses(model):
    drafter = drafters(model)["model"]

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            st.generate(model, PROMPTS, **{"drafter": drafter, "topology": "auto"} | options)

    refused("topology must be a TreeTopology, got 'best'", topology="best")
    tested = {"drafter": st.ModelDrafter(model, child_sampling="iid"), "verifier": "multi_step"}
    refused("with verifier 'multi_step', whose texts depend on the tree", **tested, **SAMPLED)
    refused("DynamicDrafter chooses the shape", drafter=st.DynamicDrafter(model))
    with pytest.raises(ValueError, match="a Scheduler takes a TreeTopology"):
        st.Scheduler(model, rows=2, max_length=32, drafter=drafter, topology="auto")
    plain = st.generate(model, PROMPTS, topology="auto", max_new_tokens=4)  # nothing to choose
    assert plain.stats.tau == 1


def test_times_are_measured_once_and_kept_in_a_file(model, monkeypatch, tmp_path):
    monkeypatch.undo()
    for name in ("_times", "_taught"):
        monkeypatch.setattr(tree_times, name, {})
    monkeypatch.setattr(tree_times, "_file", lambda name: tmp_path / f"{name}.json")
    auto = {"drafter": st.NgramDrafter(), "topology": "auto", "max_new_tokens": 80}
    st.generate(model, PROMPTS, **auto)
    (path,) = tmp_path.iterdir()
    measured = json.loads(path.read_text())["seconds"]
    assert len(measured) == len(TREES)
    assert all(0 < each < 60 for each in measured)
    monkeypatch.setattr(tree_times, "_measured", lambda *_: None)
    for text, known in (('{"seconds": [1, 2, 3, 4]}', [1, 2, 3, 4]), ("{", None), ("[1]", None)):
        path.write_text(text)
        tree_times._times.clear()
        if known:
            st.generate(model, PROMPTS, **auto)
        else:
            with pytest.warns(UserWarning, match="is damaged: the trees are timed again"):
                st.generate(model, PROMPTS, **auto)
        assert [*tree_times._times.values()] == ([known] if known else [])
