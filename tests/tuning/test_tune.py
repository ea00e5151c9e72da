"""`tune` as a whole; what it measures is replaced where its decisions are tested."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.measuring import Costs, costs, methods
from stree_jax.measuring.methods import PLAIN
from stree_jax.models.moe import MixtureOfExperts
from stree_jax.testing import HYBRIDS, apply, perturbed, random_model, randomised, tiny_model
from stree_jax.tuning import tune, tuner
from stree_jax.tuning.tuner import SHARPNESS

PROMPTS = [[5, 9, 2], [3], [1, 2, 3, 4], [7, 8]]


def drafter(amount=0.05):
    return st.ModelDrafter(perturbed(tiny_model(), amount))


@pytest.fixture(scope="module")
def report():
    """Of a tuner whose clock says 5 s for a call of a part, and 1 ms for each of its iterations."""
    steps, timed = [], costs.seconds_of

    def fake(part, count):
        assert timed(part, count) > 0
        return 5.0 + 1e-3 * count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "seconds_of", fake)
        report = tune(
            tiny_model(),
            drafter(),
            PROMPTS,
            max_nodes=3,
            max_depth=2,
            max_new_tokens=12,
            progress=lambda *step: steps.append(step),
        )
    assert all(0 <= done <= total for _, done, total in steps)
    return report


@pytest.mark.thorough
def test_the_report(report):
    names = [row.name for row in report.rows]
    assert {PLAIN, "chain of 1", "chain of 2"} <= set(names)
    decoded = [row for row in report.rows if row.record is not None]
    assert {PLAIN} < {row.name for row in decoded}
    assert all(row.record["identical"] for row in decoded)
    speeds = [row.record["tokens_per_second"]["median"] for row in decoded]
    assert speeds == sorted(speeds, reverse=True)
    assert min(speeds) > 0
    assert all(row.tau == row.record["tau"] for row in decoded)
    assert max(row.tau for row in decoded) > 1.5
    # What a call costs beside its iterations cancels.
    assert report.costs.target.keys() == {1, 2, 3}
    found = [*report.costs.target.values(), report.costs.first_level]
    assert found == pytest.approx([1e-3] * 4)
    # Dynamic trees are timed, but are not the best tree.
    dynamic = [row for row in report.rows if row.sharpness is not None]
    assert {row.sharpness for row in dynamic} == {*SHARPNESS}
    assert all(row.name.startswith("dynamic ") for row in dynamic)
    assert report.sharpness == dynamic[0].sharpness  # the fastest
    assert report.best in {row.topology for row in decoded if row.sharpness is None}
    is_none = report.best is None  # a matter of luck on a busy machine
    assert report.way == (st.Way() if is_none else st.Way(report.drafter, report.best))
    # It prints a table and advice.
    text, timed = str(report), [row.name for row in decoded]
    assert report.advice in text.splitlines()[-1]
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert re.findall(r"^│ (.+?) +│", text, re.MULTILINE) == timed
    assert f"... and {len(report.rows) - len(timed)} trees that were not timed" in text


@pytest.mark.thorough
def test_slow_drafts_give_no_draft(monkeypatch):
    """Whatever is predicted: here, that drafts cost nothing."""
    monkeypatch.setattr(tuner, "measure_costs", lambda *_, **__: Costs({1: 1.0}, 0.0, {1: 0.0}))

    def slow_drafts(ways, requests, rounds, _):
        outputs = {name: [way(each) for each in requests] for name, way in ways.items()}
        seconds = {name: 1.0 if name == PLAIN else 9.0 for name in ways}
        yield outputs, {name: np.full((rounds, 1), each) for name, each in seconds.items()}

    monkeypatch.setattr(methods, "timed_rounds", slow_drafts)
    options = dict(max_nodes=3, max_depth=1, max_new_tokens=6, thorough=False)
    report = tune(tiny_model(), drafter(), PROMPTS[:2], **options)
    assert report.best is None
    assert report.way == st.Way()
    assert report.advice.endswith(" needs tau 18.0 here, and reaches 2.0.")
    assert report.rows[0].name == PLAIN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(drafter=None), "drafter is None; tune chooses a tree for a drafter"),
        (dict(drafter="beam"), "BeamDrafter chooses its trees itself"),
        (dict(prompts=PROMPTS[:1]), "at least 2 prompts.*got 1"),
        (dict(max_nodes=1), "max_nodes must be an integer, at least 2; got 1"),
        (dict(temperature=1.0), "temperature > 0 needs a random key"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = dict(drafter=drafter(), prompts=PROMPTS) | change
    if arguments["drafter"] == "beam":
        arguments["drafter"] = st.BeamDrafter(tiny_model())
    with pytest.raises(ValueError, match=message):
        tune(tiny_model(), **arguments)


class Timed(Exception):
    """Ends `tune` with what it would time."""


@pytest.mark.thorough
def test_timed_nodes_read_as_many_experts_as_different_tokens_do(monkeypatch):
    """Nodes with one token and one path would choose the same experts."""
    experts = st.MoeConfig(96, 2, 12, router="sigmoid")
    config = HYBRIDS["nemotron_h"].with_layers(("attention", experts))
    model = random_model(dataclasses.replace(config, vocab_size=200))
    head = st.MtpConfig(16, st.AttentionConfig(4, 2, 8), experts)
    drafter = st.MtpDrafter(model, randomised(st.MtpHead(head, rngs=nnx.Rngs(0)), 1))
    seen, routed = [], MixtureOfExperts._route

    def count(*both):
        seen.append([len(np.unique(each, axis=0)) for each in both])

    def counted(self, tokens):
        weights, chosen = routed(self, tokens)
        if len(tokens) == 16:
            jax.debug.callback(count, tokens, chosen.reshape(-1))
        return weights, chosen

    def states_and_experts(calls, *arguments):
        """Numbers of different ones in each call."""
        seen.clear()
        jax.block_until_ready(calls(*arguments))
        jax.effects_barrier()
        return np.array(seen).T

    def medians(parts, _):
        raise Timed(*(states_and_experts(parts[part, 16], 8) for part in ("target", "draft")))

    monkeypatch.setattr(MixtureOfExperts, "_route", counted)
    monkeypatch.setattr(costs, "medians", medians)
    sizes = dict(max_nodes=40, max_depth=2, sizes=(16,), widths=(16,))
    with pytest.raises(Timed) as timed:
        costs.measure_costs(model, drafter, PROMPTS[0], st.Options(), **sizes)
    target, level = timed.value.args
    texts = jnp.asarray(np.random.default_rng(0).permutation(192).reshape(12, 1, 16))
    experts = states_and_experts(lambda: [apply(model, text) for text in texts])[1]
    assert (target[0] == 16).all()
    assert target[1].mean() > 0.8 * experts.mean()
    assert (level[0] == 16).all()
