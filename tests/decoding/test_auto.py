"""`topology="auto"`: the text of no drafts, whatever trees runs take; and how programs come."""

import dataclasses
import gc
import itertools
import sys
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding import quanta
from stree_jax.decoding.plan import plan
from stree_jax.testing import (
    CONFIGS,
    PROMPTS,
    RandomChoice,
    assert_lossless,
    perturbed,
    random_model,
    random_mtp_head,
    tiny_model,
)
from tests.decoding.texts import in_native_sizes
from tests.helpers import COMPILED

TREES = st.TreeChoice().trees
NEW = 24
ONE_TREE = {"two heads": 2, "turns": 3}  # and the depth of the chain they fill
OTHERS = "prompt lookup", "head", *ONE_TREE
thorough = partial(pytest.param, marks=pytest.mark.thorough)
OPTIONS = {"max_new_tokens": NEW, "eos_token": ()}


class Script(st.TreeChoice):
    """Takes these trees, for as many steps; the last one for all others."""

    def __init__(self, *runs):
        super().__init__()
        self.runs = [*runs]

    def next(self, *_, **__):
        return self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    quanta._pair.cache_clear()
    quanta._known.cache_clear()


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


def waited(result=None):
    """The result, when nothing is compiled beside any more."""
    quanta.BESIDE.submit(int).result()
    return result


def random_choice(name):
    return RandomChoice([st.TreeTopology.chain(ONE_TREE[name])] if name in ONE_TREE else TREES)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("plain", "model"),
        *(thorough(family, "model") for family in CONFIGS if family != "plain"),
        *(thorough("plain", name) for name in OTHERS),
    ],
)
def test_the_text_is_that_of_no_drafts_with_any_tree_at_any_time(family, name):
    """To the bit, where native code runs; at temperatures 0 and 1."""
    model = random_model(in_native_sizes(CONFIGS[family])).packed()
    for out in assert_lossless(
        model, drafters(model)[name], topology=random_choice(name), max_new_tokens=2 * NEW
    ):
        assert min(out.stats.calls_by_tree.values()) > 0
        assert sum(out.stats.calls_by_tree.values()) == out.stats.num_target_calls
        assert (out.stats.accepted_per_depth <= out.stats.reached_per_depth).all()


@pytest.mark.parametrize("name", ["model", *map(thorough, OTHERS)])
def test_requests_of_a_scheduler_are_those_of_no_drafts_too(name, model):
    """More requests than rows, and a kept text that goes on."""
    prompts = [*PROMPTS, PROMPTS[0][::-1], PROMPTS[1][::-1]]
    want = [st.generate(model, [prompt], **OPTIONS).tokens[0].tolist() for prompt in prompts]
    choice = random_choice(name)
    options = {"rows": 2, "max_length": 64, "quantum": 4}
    scheduler = st.Scheduler(model, drafter=drafters(model)[name], topology=choice, **options)
    short = OPTIONS | {"max_new_tokens": NEW - 8}
    for prompt in prompts:
        scheduler.submit(st.Request(prompt, keep=True, **short))
    ended = sorted(scheduler.completions(), key=lambda completion: completion.request_id)
    for completion, tokens in zip(ended, want, strict=True):
        assert completion.tokens == tokens[: NEW - 8]
        calls = completion.stats.calls_by_tree
        assert (*calls,) == choice.trees
        assert sum(calls.values()) == completion.stats.num_target_calls
    scheduler.submit(st.Request([], after=ended[1].prefix, **OPTIONS | {"max_new_tokens": 8}))
    (last,) = scheduler.completions()
    assert ended[1].tokens + last.tokens == want[1]


@pytest.mark.thorough
def test_streams_and_texts_that_go_on(model):
    drafter, want = drafters(model)["model"], st.generate(model, PROMPTS, **OPTIONS)
    auto = {"drafter": drafter, "topology": RandomChoice(), **OPTIONS, "max_new_tokens": NEW // 2}
    first = st.generate(model, PROMPTS, return_prefix=True, **auto)
    for topology in (RandomChoice(), "auto", "chain:3"):
        more = auto | {"topology": topology, "after": first.prefix}
        then = st.generate(model, [[] for _ in PROMPTS], **more)
        assert np.hstack([first.tokens, then.tokens]).tolist() == want.tokens.tolist()
    pieces = zip(*st.stream(model, PROMPTS, **auto), strict=True)
    assert [[*itertools.chain(*row)] for row in pieces] == first.tokens.tolist()


def test_a_draft_model_that_was_off_reads_what_it_missed(model):
    """As good as its target, it has all drafts accepted, also after more tokens than a piece."""
    prompt = [(7 * i) % 11 + 1 for i in range(100)]
    options = {"drafter": st.ModelDrafter(model), **OPTIONS, "max_new_tokens": 96}
    want = st.generate(model, [prompt], **OPTIONS | {"max_new_tokens": 96})
    for rests in (False, True):  # then it has not read the prompt
        script = Script((3, 2), (0, 70), (3, 99))
        script._taken, script._wait = (0, 9) if rests else (-1, 0)
        out = st.generate(model, [prompt], topology=script, **options)
        assert out.tokens.tolist() == want.tokens.tolist()
        # 2 calls of 5 tokens, 70 of one, and 16 tokens in steps of 5: all drafts are accepted.
        assert [*out.stats.calls_by_tree.values()] == [70, 0, 0, 2 + 4]
        assert out.stats.accepted_per_depth.tolist() == [6, 5, 5, 5]


@pytest.mark.thorough
@pytest.mark.parametrize(("noise", "often"), [(0.0, TREES[3]), (30.0, TREES[0])])
def test_a_good_draft_gets_a_long_tree_and_a_bad_one_nothing(noise, often, model, monkeypatch):
    """By simulated times: a step takes as long as its tree has nodes."""
    drafter = st.ModelDrafter(perturbed(model, noise, 1) if noise else model)
    told = st.TreeChoice.told

    def simulated(choice, number, steps, seconds, ends):
        told(choice, number, steps, steps * (1 + 0.15 * choice.trees[number].num_nodes), ends)

    monkeypatch.setattr(st.TreeChoice, "told", simulated)
    monkeypatch.setattr(quanta._Pair, "pays_to_compile", True)
    choice = st.TreeChoice()
    options = OPTIONS | {"max_new_tokens": 96, "topology": choice}
    for _ in range(6):
        out = st.generate(model, PROMPTS[:1], drafter=drafter, **options)
        waited()
    calls = out.stats.calls_by_tree
    assert calls[often] >= 0.8 * out.stats.num_target_calls


def test_a_clock_that_lies_changes_no_text(model, monkeypatch):
    draws = np.random.default_rng(0)
    monkeypatch.setattr(quanta.time, "perf_counter", lambda: draws.normal() * 1e3)
    monkeypatch.setattr(quanta._Pair, "pays_to_compile", False)
    want = st.generate(model, PROMPTS, **OPTIONS)
    for _ in range(3):
        out = st.generate(model, PROMPTS, drafter=st.NgramDrafter(), topology="auto", **OPTIONS)
        assert out.tokens.tolist() == want.tokens.tolist()


def test_a_tree_is_compiled_beside_and_then_compiles_no_more(model, monkeypatch):
    """Nor does what a draft model needs to read on."""
    monkeypatch.setattr(quanta._Pair, "pays_to_compile", True)
    trees = [st.TreeTopology.from_parents([-1, 0, 0, 0])]  # of no other test
    options = {"drafter": drafters(model)["model"], **OPTIONS, "max_new_tokens": 90}
    choice = st.TreeChoice(trees)
    out = waited(st.generate(model, PROMPTS[:1], topology=choice, **options))
    monkeypatch.setattr(choice, "next", Script((1, 4), (0, 70), (1, 4), (0, 4), (1, 99)).next)
    before = len(COMPILED)
    again = st.generate(model, PROMPTS[:1], topology=choice, **options)
    assert len(COMPILED) == before
    assert again.tokens.tolist() == out.tokens.tolist()


def test_a_program_that_fails_leaves_its_tree_out():
    """And Python's settings as they were."""
    gc.unfreeze()
    programs, before, inside = {}, settings_of_python(), []

    def fails():
        inside.append(settings_of_python())
        raise RuntimeError("no memory")

    with pytest.warns(UserWarning, match="a tree is left out: its program failed: no memory"):
        waited(quanta.compile_beside(programs, "tree", fails))
    assert programs == {"tree": False}
    assert settings_of_python() == before
    assert inside[0][0] < before[0]
    assert inside[0][1] > before[1] == 0
    gc.freeze()  # as conftest.py did


def settings_of_python():
    """How soon a thread gives way, and how many objects are not collected."""
    return sys.getswitchinterval(), gc.get_freeze_count()


def test_a_good_draft_learns_nothing_from_a_bad_one(model):
    """Of the same shapes, and in its place. But it has the same programs."""

    def begun(drafter):
        request = plan(model, PROMPTS, drafter=drafter, topology="auto")
        return quanta.Quanta(request, model, 3, ends=True)

    drafter = st.ModelDrafter(perturbed(model, 30.0, 1))
    bad = begun(drafter)
    assert begun(drafter)._choice is bad._choice
    nnx.update(drafter.model, nnx.state(model))
    good = begun(drafter)
    assert good._choice is not bad._choice
    assert good._pair is bad._pair


@pytest.mark.parametrize("name", ONE_TREE)
def test_it_takes_the_trees_that_a_drafter_can_fill(name, model):
    """A list is the user's word: what the drafter cannot fill is refused."""
    options = {"drafter": drafters(model)[name], "max_new_tokens": NEW}
    chain = st.TreeTopology.chain(ONE_TREE[name])
    request = plan(model, PROMPTS, topology="auto", **options)
    assert request.trees == (TREES[0], chain)
    assert request.decoder.topology == chain
    with pytest.raises(ValueError, match=r"leave topology out|needs as many Medusa heads"):
        plan(model, PROMPTS, topology=[chain, *TREES[1:]], **options)
    # Refused with its own reason, not for its trees.
    others = random_model(dataclasses.replace(model.config, vocab_size=90))
    options["drafter"] = drafters(others)[name]
    with pytest.raises(ValueError, match=r"vocabular|output_head"):
        plan(model, PROMPTS, topology="auto", **options)


def test_trees_of_ones_own(model):
    """None of them is as large in all as the others."""
    wide, deep = st.TreeTopology.from_parents([-1, 0, 0, 0, 1]), st.TreeTopology.chain(3)
    options = {"drafter": st.NgramDrafter(), "topology": [wide, deep]}
    want = st.generate(model, PROMPTS, **OPTIONS)
    out = st.generate(model, PROMPTS, **options, **OPTIONS)
    assert out.tokens.tolist() == want.tokens.tolist()
    assert [*out.stats.calls_by_tree] == [TREES[0], wide, deep]
    report = st.bench(model, {"few": options}, PROMPTS[:1], rounds=1, max_new_tokens=8)
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
    refused("no tree with drafts to choose from", topology=[TREES[0]])
    for trees in ("auto", [TREES[1]], st.TreeChoice()):
        refused(r"topology = .* needs a drafter: pass drafter=", drafter=None, topology=trees)
    tested = {"drafter": st.ModelDrafter(model, child_sampling="iid"), "verifier": "multi_step"}
    sampled = {"temperature": 1.0, "key": jax.random.key(3)}
    refused("with verifier 'multi_step', whose texts depend on the tree", **tested, **sampled)
    refused("DynamicDrafter chooses the shape", drafter=st.DynamicDrafter(model))
    with pytest.raises(ValueError, match="'best' is not a tree"):
        st.Scheduler(model, rows=2, max_length=32, drafter=drafter, topology="best")
    with pytest.raises(ValueError, match="a choice of trees is made on the host, between runs"):
        st.SpeculativeDecoder("auto", "greedy", 32)
