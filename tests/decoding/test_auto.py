"""`topology="auto"`: the text of no drafts, whatever trees steps take, and when they take which."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding import tree_times
from stree_jax.decoding.auto import AGED, AutoDrafter
from stree_jax.decoding.auto import TREES as DRAFTED
from stree_jax.decoding.plan import plan
from stree_jax.decoding.results import statistics_of
from stree_jax.testing import perturbed, random_model, random_mtp_head, tiny_model
from tests.decoding.texts import of_rows, started
from tests.methods import PROMPTS

TREES = st.TreeTopology.chain(0), *DRAFTED
ONE = [st.TreeTopology.chain(4)]  # compiles in half the time of all
NEW = 24
ONE_TREE = {"two heads": 2, "turns": 3}  # and the depth of the chain they fill
OTHERS = "model", "head", *ONE_TREE
thorough = partial(pytest.param, marks=pytest.mark.thorough)
SAMPLED = {"temperature": 1.0, "key": jax.random.key(3)}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def _times(monkeypatch):
    """Nothing is timed here, and no text teaches another."""
    times = np.array([[1.0, 1.3, 1.6, 1.6]] * 2)
    monkeypatch.setattr(tree_times, "_measured", lambda auto, *_: times[:, : len(auto.choices)])
    for name in ("_times", "_taught"):
        monkeypatch.setattr(tree_times, name, {})


def drafters(model):
    draft, small = perturbed(model, 0.05, 1), perturbed(model, 0.15, 2)
    heads = st.MedusaHeads(model, num_heads=2, rngs=nnx.Rngs(0))
    return {
        "model": st.ModelDrafter(draft),
        "two heads": st.MedusaDrafter(model, heads),
        "turns": st.InterleavedDrafter(draft, small, "sqs"),
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
    state = started(model, request)
    for number in numbers:
        if state.done.all():
            break
        choosing = state.drafter.choosing.of_all(forced=number)
        state = state._replace(drafter=state.drafter._replace(choosing=choosing))
        settings = request.limits, request.sampling
        state = request.decoder.run(model, request.drafter, state, *settings, 1)
    return state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prompt lookup", {}),
        *(thorough(name, {}) for name in OTHERS),
        *(thorough(name, SAMPLED) for name in ("model", "prompt lookup", "head")),
    ],
)
def test_the_text_is_that_of_no_drafts_with_any_tree_at_any_step(name, options, model):
    trees = 2 if name in ONE_TREE else len(TREES)
    numbers = np.random.default_rng(0).integers(0, trees, 2 * NEW).tolist()
    want = st.generate(model, PROMPTS, max_new_tokens=NEW, eos_token=(), **options)
    state = steps(model, drafters(model)[name], numbers, **options)
    assert state.done.all()
    for row, prompt in enumerate(PROMPTS):
        new = np.asarray(state.context.tokens[row, len(prompt) : len(prompt) + NEW])
        assert new.tolist() == want.tokens[row].tolist()
    assert (np.asarray(state.drafter.choosing.counts).sum(axis=2) > 0).all()


@pytest.mark.parametrize("name", ONE_TREE)
def test_it_takes_the_trees_that_a_drafter_can_fill(name, model):
    """A list is the user's word: what the drafter cannot fill is refused."""
    asked = {"drafter": drafters(model)[name], "max_new_tokens": NEW}
    own = st.TreeTopology.chain(ONE_TREE[name])
    found = plan(model, PROMPTS, topology="auto", **asked)
    assert found.drafter.choices == (TREES[0], own)
    assert found.decoder.topology == own
    with pytest.raises(ValueError, match=r"leave topology out|needs as many Medusa heads"):
        plan(model, PROMPTS, topology=[own, *DRAFTED], **asked)
    # Refused with its own reason, not for its trees.
    other = random_model(dataclasses.replace(model.config, vocab_size=90))
    asked["drafter"] = drafters(other)[name]
    with pytest.raises(ValueError, match=r"vocabular|output_head"):
        plan(model, PROMPTS, topology="auto", **asked)


def test_a_draft_model_that_was_off_reads_what_it_missed(model):
    """As good as its target, it has all drafts accepted, also after more tokens than a window."""
    state = steps(model, st.ModelDrafter(model), [0] * 18 + [3])
    assert np.asarray(state.drafter.choosing.behind).tolist() == [0] * len(PROMPTS)
    assert np.asarray(state.emitted).tolist() == [18 + 5] * len(PROMPTS)
    state = steps(model, st.ModelDrafter(model), [3, 1] + [0] * 3)
    assert np.asarray(state.drafter.choosing.behind).tolist() == [3] * len(PROMPTS)
    # A depth counts in the calls whose tree had it, where no draft above was wrong.
    request = plan(model, PROMPTS, drafter=st.NgramDrafter(), topology="auto")
    stats = statistics_of(state.statistics, request, np.asarray(state.drafter.choosing.counts))
    calls = np.array([2, 2, 1, 1]) * len(PROMPTS)
    assert stats.accepted_per_depth.tolist() == stats.reached_per_depth.tolist() == [*calls]
    assert [*stats.calls_by_tree.values()] == [3 * len(PROMPTS), len(PROMPTS), 0, len(PROMPTS)]


@pytest.mark.thorough
@pytest.mark.parametrize(("noise", "often"), [(0.0, TREES[3]), (30.0, TREES[0])])
def test_a_good_draft_gets_the_longest_chain_and_a_bad_one_nothing(noise, often, model, capsys):
    drafter = st.ModelDrafter(perturbed(model, noise, 1) if noise else model)
    options = {"max_new_tokens": 60, "eos_token": ()}
    want = st.generate(model, PROMPTS[:1], **options)
    for _ in range(2):  # the second time it knows
        auto = {"drafter": drafter, "topology": "auto", "record_calls": True}
        out = st.generate(model, PROMPTS[:1], **auto, **options)
        assert out.tokens.tolist() == want.tokens.tolist()
    del auto["record_calls"]
    pieces = [*st.stream(model, PROMPTS[:1], **auto, **options)]
    assert of_rows(pieces, 0) == want.tokens[0].tolist()
    calls = out.stats.calls_by_tree
    assert sum(calls.values()) == out.stats.num_target_calls
    assert calls[often] >= 0.9 * out.stats.num_target_calls
    out.show()
    assert f"{often.name} {calls[often]}" in capsys.readouterr().out


def test_a_trial_finds_out_that_drafts_pay_again(model):
    """They failed for long, and would all be accepted now."""
    asked = {"drafter": st.ModelDrafter(model), "topology": DRAFTED[:1], "eos_token": ()}
    request = plan(model, PROMPTS, **asked)
    state = started(model, request)
    choosing = state.drafter.choosing
    failed = {"tried": choosing.tried + AGED, "pause_left": choosing.pause_left + 1}
    failed |= {"pause": choosing.pause + 64, "trial": choosing.trial + 2}
    state = state._replace(drafter=state.drafter._replace(choosing=choosing._replace(**failed)))
    settings = request.limits, request.sampling
    state = request.decoder.run(model, request.drafter, state, *settings, 8)
    counts = np.asarray(state.drafter.choosing.counts).sum(axis=2)
    assert counts[:, 0].tolist() == [1] * len(PROMPTS)
    assert (np.asarray(state.drafter.choosing.pause) == 0).all()


def test_drafting_pauses_for_as_many_steps_as_it_should(model):
    """A row that is new beside a paused one waits too; what failed long ago counts for little."""
    request = plan(model, PROMPTS[:2], drafter=st.NgramDrafter(), topology=ONE)
    decoder, drafter, state = request.decoder, request.drafter, started(model, request)
    parts = {"pause": [64, 0], "pause_left": [9, 0], "trial": [2, 0]}
    choosing = state.drafter.choosing._replace(**{k: jnp.array(v) for k, v in parts.items()})
    state = state._replace(drafter=state.drafter._replace(choosing=choosing))
    for steps, left in ((3, 6), (2, 4)):
        state = decoder.run(model, drafter, state, request.limits, request.sampling, steps)
        choosing = state.drafter.choosing
        plain_calls = choosing.counts[:, 0].sum(axis=1)
        counted = plain_calls, choosing.pause, choosing.pause_left, choosing.trial
        assert np.asarray(counted).tolist() == [[9 - left] * 2, [64] * 2, [left] * 2, [2] * 2]
    with pytest.raises(ValueError, match=r"is made by run: use run\(..., max_steps=1\)"):
        decoder.step(model, drafter, state, request.limits, request.sampling)
    none = jnp.zeros_like(choosing.trial)
    failed = choosing._replace(tried=choosing.tried + 50, pause_left=none, trial=none)
    ended = drafter.chosen(state._replace(drafter=state.drafter._replace(choosing=failed)), None)
    assert (np.asarray(ended.drafter.choosing.tried) == AGED).all()


@pytest.mark.parametrize("serving", [False, thorough(True)])
def test_a_good_draft_learns_nothing_from_a_bad_one(serving, model):
    """Of the same shapes, and in its place; it begins as in a process of its own."""
    options = {"max_new_tokens": 24, "eos_token": ()}

    def calls_of(drafter):
        way = st.Way(drafter, ONE)
        if not serving:
            return lambda: st.generate(model, PROMPTS, **way, **options).stats.calls_by_tree
        scheduler = st.Scheduler(model, rows=1, max_length=64, **way)

        def served():
            scheduler.submit(st.Request(PROMPTS[0], **options))
            return next(scheduler.completions()).stats.calls_by_tree

        return served

    want = calls_of(st.ModelDrafter(model))()
    tree_times._taught.clear()
    drafter = st.ModelDrafter(perturbed(model, 30.0, 1))
    calls = calls_of(drafter)
    assert calls() != want
    nnx.update(drafter.model, nnx.state(model))
    assert calls() == want


@pytest.mark.parametrize("name", ["prompt lookup", *map(thorough, ("model", "head"))])
def test_a_scheduler_chooses_for_the_rows_that_run(name, model):
    """More requests than rows, and a kept text that goes on."""
    drafter = drafters(model)[name]
    trees = [TREES[0], st.TreeTopology.chain(ONE_TREE[name])] if name in ONE_TREE else [*TREES]
    new = {"max_new_tokens": 12, "eos_token": ()}
    prompts = [*PROMPTS, PROMPTS[0][::-1], PROMPTS[1][::-1]]
    want = [st.generate(model, [each], **new).tokens[0].tolist() for each in prompts]
    scheduler = st.Scheduler(
        *(model,), rows=2, max_length=64, drafter=drafter, topology="auto", quantum=4
    )
    for each in prompts:
        scheduler.submit(st.Request(each, keep=True, **new))
    ended = sorted(scheduler.completions(), key=lambda each: each.request_id)
    assert [each.tokens for each in ended] == want
    for each in ended:
        calls = each.stats.calls_by_tree
        assert [*calls] == trees
        assert sum(calls.values()) == each.stats.num_target_calls
    longer = st.generate(model, prompts[:1], max_new_tokens=20, eos_token=()).tokens[0].tolist()
    more = st.Request([], max_new_tokens=8, eos_token=(), after=ended[0].prefix)
    scheduler.submit(more)
    (last,) = scheduler.completions()
    assert ended[0].tokens + last.tokens == longer


def test_a_draft_model_that_pauses_reads_a_prompt_when_it_is_tried(model):
    """Its prompt is longer than a window; as good as its target, it has all drafts accepted."""
    prompt = [(7 * i) % 11 + 1 for i in range(100)]
    options = {"max_new_tokens": 20, "eos_token": ()}
    want = st.generate(model, [prompt], **options)
    request = plan(model, [prompt], drafter=st.ModelDrafter(model), topology=ONE, **options)
    decoder, drafter = request.decoder, request.drafter
    structure, drafter.is_paused = jax.tree.structure(drafter), np.array(True)
    assert jax.tree.structure(drafter) == structure  # one program for both
    state = started(model, request)
    assert np.asarray(state.drafter.choosing.behind).tolist() == [99]
    state = decoder.run(model, drafter, state, request.limits, request.sampling)
    length = int(state.context.length[0])
    assert state.context.tokens[0, 100:length].tolist() == want.tokens[0].tolist()
    assert int(state.statistics.target_calls[0]) <= 8


def test_while_drafting_pauses_the_program_is_that_of_no_drafts(model, monkeypatch):
    monkeypatch.setattr(AutoDrafter, "run", None)
    options = {"max_new_tokens": 8, "eos_token": ()}
    auto = {"drafter": st.NgramDrafter(), "topology": "auto"} | options
    request, want = plan(model, PROMPTS, **auto), st.generate(model, PROMPTS, **options)
    history = tree_times.DraftHistory(model, request.drafter, len(PROMPTS), request.sampling)
    history._taught["pause_left"] = np.int32(20)
    out = st.generate(model, PROMPTS, **auto)
    assert out.tokens.tolist() == want.tokens.tolist()
    assert [*out.stats.calls_by_tree.values()] == [8 * len(PROMPTS), 0, 0, 0]
    none = [0] * request.decoder.topology.depth
    assert out.stats.accepted_per_depth.tolist() == out.stats.reached_per_depth.tolist() == none
    assert np.hstack([*st.stream(model, PROMPTS, **auto)]).tolist() == want.tokens.tolist()
    assert history._taught["pause_left"] == 4
    assert history.decoded(request) is request


def test_a_choice_goes_by_the_rows_that_run(model):
    """With one row of two running, the times are those of one."""
    auto = AutoDrafter(st.NgramDrafter(), costs=[[1, 1, 1, 1], [1, 9, 9, 9]])
    request = plan(model, PROMPTS[:2], drafter=st.NgramDrafter(), topology="auto", eos_token=())
    state = started(model, request)
    for done, drafts in (([False, True], True), ([False, False], False)):
        chosen = auto.chosen(state._replace(done=jnp.array(done)), None)
        assert bool(chosen.drafter.choosing.number[0] > 0) == drafts


@pytest.mark.parametrize(
    ("emitted", "ends", "drafts"),
    [([0, 0], False, True), ([0, 0], True, False), ([0, 90], True, True)],
)
def test_a_batch_ends_with_its_last_row(model, emitted, ends, drafts):
    """The first row has all drafts accepted and the second none."""
    auto = AutoDrafter(st.NgramDrafter(), costs=[[1, 1.4, 1.6, 1.6]] * 2)
    options = {"drafter": st.NgramDrafter(), "topology": "auto", "max_new_tokens": 96}
    request = plan(model, PROMPTS[:2], **options)
    state = started(model, request)
    choosing = state.drafter.choosing
    rates = {"tried": choosing.tried + 50, "accepted": choosing.accepted.at[0].set(50)}
    drafter = state.drafter._replace(choosing=choosing._replace(**rates))
    state = state._replace(drafter=drafter, emitted=jnp.array(emitted))
    chosen = auto.chosen(state, request.limits if ends else None)
    assert bool(chosen.drafter.choosing.number[0] > 0) == drafts


@pytest.mark.thorough
def test_trees_of_ones_own(model):
    """None of them is as large in all as the others."""
    wide, deep = st.TreeTopology.from_parents([-1, 0, 0, 0, 1]), st.TreeTopology.chain(3)
    drafter = drafters(model)["model"]
    options = {"max_new_tokens": 12, "eos_token": ()}
    want = st.generate(model, PROMPTS, **options)
    out = st.generate(model, PROMPTS, drafter=drafter, topology=[wide, deep], **options)
    assert out.tokens.tolist() == want.tokens.tolist()
    assert [*out.stats.calls_by_tree] == [TREES[0], wide, deep]
    report = st.bench(
        *(model, {"few": {"drafter": drafter, "topology": [wide, deep]}}, PROMPTS[:1]),
        rounds=1,
        max_new_tokens=8,
    )
    (calls,) = filter(None, (row["calls_by_tree"] for row in report.rows))
    assert [*calls] == ["no drafts", "tree of 5", "chain of 3"]
    assert "tree of 5" in str(report)


def test_what_it_refuses(model):
    drafter = drafters(model)["model"]

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            st.generate(model, PROMPTS, **{"drafter": drafter, "topology": "auto"} | options)

    refused("'best' is not a tree: use auto, chain:4", topology="best")
    refused(r'a list of them, "auto" or words such as "chain:4", got \[5\]', topology=[5])
    for trees in ("auto", [TREES[1]]):
        refused(r"topology = .* needs a drafter: pass drafter=", drafter=None, topology=trees)
    tested = {"drafter": st.ModelDrafter(model, child_sampling="iid"), "verifier": "multi_step"}
    refused("with verifier 'multi_step', whose texts depend on the tree", **tested, **SAMPLED)
    refused("DynamicDrafter chooses the shape", drafter=st.DynamicDrafter(model))
    with pytest.raises(ValueError, match="'best' is not a tree"):
        st.Scheduler(model, rows=2, max_length=32, drafter=drafter, topology="best")


def test_times_are_measured_once_and_kept_in_a_file(model, monkeypatch, tmp_path):
    monkeypatch.undo()
    for name in ("_times", "_taught"):
        monkeypatch.setattr(tree_times, name, {})
    monkeypatch.setattr(tree_times, "_file", lambda name: tmp_path / f"{name}.json")
    auto = {"drafter": st.NgramDrafter(), "topology": "auto", "max_new_tokens": 80}
    st.generate(model, PROMPTS, **auto)
    (path,) = tmp_path.iterdir()
    measured = json.loads(path.read_text())["seconds"]
    assert np.shape(measured) == (2, len(TREES))
    assert (np.array(measured) > 0).all()
    monkeypatch.setattr(tree_times, "_measured", lambda *_: None)
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]]
    for text, known in ((json.dumps({"seconds": times}), times), ("{", None), ("[1]", None)):
        path.write_text(text)
        tree_times._times.clear(), tree_times._taught.clear()
        if known:
            st.generate(model, PROMPTS, **auto)
        else:
            with pytest.warns(UserWarning, match="is damaged: the trees are timed again"):
                st.generate(model, PROMPTS, **auto)
        assert [each.tolist() for each in tree_times._times.values()] == ([known] if known else [])
