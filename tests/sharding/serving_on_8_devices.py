"""Schedulers on meshes of 8 CPU devices; run by `test_on_8_devices.py`."""

import dataclasses
import gc
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import stree_jax as st
from tests.decoding.rules import random_walk
from tests.decoding.texts import broken_at
from tests.helpers import COMPILED, refusal
from tests.serving.requests import (
    WAYS,
    alone,
    in_families,
    mixed,
    orders_of,
    ragged,
    served,
    serves_beside_failures,
)
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import TREE, assert_same, drafts_on, mesh_of, model_of, sharded

slow = pytest.mark.slow
FAST = "one layer"
MESHES = ((2, 4), (8, 1))


def scheduler_of(name, mesh, kind="tree", **options):
    common = dict(max_length=128, quantum=3, rows=4) | drafts_on(name, mesh, kind)
    return st.Scheduler(sharded(name, *mesh), **common | options)


def texts_of(done):
    assert all(completion.error is None for completion in done)
    return [completion.tokens for completion in done]


def test_requests_share_the_rows_of_a_mesh():
    """In any order, with prefixes, texts that go on, and one that is cancelled; no new programs."""
    requests, order = mixed(ragged(8), WAYS[:2]), orders_of(8)[0]
    want, scheduler = alone(model_of(FAST), requests), scheduler_of(FAST, (2, 4))
    kept = [dataclasses.replace(requests[i], keep=i == 3) for i in order]
    done = served(scheduler, kept)
    assert texts_of(done) == [want[i] for i in order]
    # Stems, and one of them goes on: its text is that of all that was read.
    prefix, stem = done[order.index(3)].prefix, scheduler.read([4, 9])
    assert prefix.context.tokens.shape == stem.context.tokens.shape
    longer = scheduler.read([8, 1], after=prefix)
    text = dict(max_new_tokens=6, temperature=0.7, top_k=5)
    cancelled = scheduler.submit(st.Request([3], max_new_tokens=60))
    after = [scheduler.submit(st.Request([], after=a, key=7, **text)) for a in (stem, longer)]
    done = [next(scheduler.completions())]
    scheduler.cancel(cancelled)
    done = {completion.request_id: completion for completion in (*done, *scheduler.completions())}
    assert done[cancelled].finish_reason == "cancelled"
    texts = [4, 9], [*requests[3].prompt, *want[3], 8, 1]
    want = st.generate(model_of(FAST), texts, key=[7, 7], **text).tokens
    assert [done[i].tokens for i in after] == want.tolist()
    count = len(COMPILED)
    served(scheduler, requests[:5])
    assert len(COMPILED) == count


def collectives(program):
    """What a program sends: results and names."""
    names = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return re.findall(rf"= (.+?) ({names})(?:-start)?\(", program)


def test_programs_leave_the_rows_where_they_are():
    """A row is inserted inside a shard and in place, and nothing gathers a pool's caches."""
    jax.clear_caches()
    gc.collect()
    scheduler = scheduler_of(FAST, (2, 4), max_length=50)
    served(scheduler, [st.Request([1, 2, 3], max_new_tokens=9)])
    modules = [each.hlo_modules()[0] for each in jax.devices()[0].client.live_executables()]
    programs = {module.name: module.to_string() for module in modules}
    (insert,) = (text for name, text in programs.items() if "insert" in name)
    assert not collectives(insert)
    assert insert.count("may-alias") > 10  # the pool's arrays
    sent = collectives(programs["jit_run"])
    gathered = [shape for shape, name in sent if name != "all-reduce"]
    assert len(gathered) == 1  # logits of the 2 rows of a shard
    assert gathered[0].startswith(f"f32[2,{TREE.num_nodes},{CONFIGS[FAST].vocab_size}]")


def test_what_is_refused():
    refusal(r"rows = 5: the mesh has data = 2, .*; use 4 or 6", scheduler_of, FAST, (2, 4), rows=5)
    refusal(r"rows = 3: the mesh has data = 8, .*; use 8", scheduler_of, FAST, (8, 1), rows=3)
    scheduler = scheduler_of(FAST, (2, 4))
    prefix = st.Scheduler(model_of(FAST), rows=4, max_length=80).read([1, 2])
    refusal("another model", scheduler.submit, st.Request([1], after=prefix))


class Served(NamedTuple):
    """Requests that schedulers on a mesh serve in any order, each as it is alone on one device."""

    name: str
    mesh: tuple[int, int]
    requests: list[st.Request]
    schedulers: Sequence[dict[str, Any]]  # their options
    drafter: str = "tree"
    shows: Callable[[st.Scheduler, int], bool] = lambda scheduler, budget: True


def spends_its_budget(scheduler, budget):
    stats = scheduler.prefix_cache_stats
    few = (stats.evictions > 0) == (budget < 10**8)
    return few and stats.nbytes <= budget and stats.tokens_reused > 0


QUANTA = tuple(dict(quantum=quantum) for quantum in (1, 7, 32))
# In chunks, one text alone or several together, from entries of which few fit or all.
CACHES = tuple(
    dict(prefix_every=16, prefix_cache_bytes=budget, prefill_tokens=tokens, quantum=quantum)
    for budget, tokens, quantum in ((10**8, 512, 7), (40_000, 64, 1), (10**8, None, 32))
)
SERVED = {
    **{
        f"{name} on {mesh}, {kind}": Served(name, mesh, requests, QUANTA)
        for name in ("mamba2", "bamba", "mamba2attn", "nemotron_h", "zamba2")
        for mesh in MESHES
        for kind, requests in {
            "greedy": ragged(20, temperature=0.0),
            "sampled": ragged(20, temperature=1.0),
            "mixed": mixed(ragged(20)),
        }.items()
    },
    **{
        f"prefixes of {name} on {mesh}, {drafter}": Served(
            *(name, mesh, in_families(mixed(ragged(18), WAYS[:2])), CACHES, drafter),
            shows=spends_its_budget,
        )
        for name in ("mamba2", "bamba")
        for mesh in MESHES
        for drafter in ("tree", "ngram", "beam", "random trees")
    },
}


@slow
@pytest.mark.parametrize("case", SERVED)
def test_requests_are_what_they_are_alone_on_one_device(case):
    name, mesh, requests, schedulers, drafter, shows = SERVED[case]
    want = alone(model_of(name), requests)
    for turn, options in enumerate(schedulers):
        scheduler = scheduler_of(name, mesh, drafter, rows=8, **options)
        for order in orders_of(len(requests), seeds=(turn, turn + 1)):
            done = served(scheduler, [requests[i] for i in order])
            assert texts_of(done) == [want[i] for i in order]
        assert shows(scheduler, options.get("prefix_cache_bytes", 0))


@slow
def test_entries_stay_where_they_are():
    """An entry is cut as the target is, and every shard of the batch has it."""
    entry = scheduler_of("bamba", (2, 4), prefix_cache_bytes=10**8).read([*range(30)])
    for leaf in jax.tree.leaves(entry):
        assert len(leaf) == 1
        assert "data" not in leaf.sharding.spec
    whole = [leaf for leaf in jax.tree.leaves(entry.cache) if "model" in leaf.sharding.spec]
    assert len(whole) == 4  # state, conv window, keys and values


@slow
def test_options_of_requests():
    """Grammars, penalties, stops, filters and log-probabilities, some requests with each."""
    name = "mamba2"
    grammar = st.Automaton(np.asarray(random_walk(size=CONFIGS[name].vocab_size).table))
    free = st.generate(model_of(name), [[5, 9]], max_new_tokens=12).tokens[0].tolist()
    ruled = dict(processors=[grammar, st.RepetitionPenalty(1.4)], min_new_tokens=3)
    requests = [
        st.Request(prompt, max_new_tokens=12, eos_token=[0, 1], key=i, **options)
        for i, (prompt, options) in enumerate(
            (
                ([5, 9], dict(stop=[free[4:6]])),
                ([3], ruled),
                ([4, 5, 6], dict(temperature=0.9, **ruled)),
                ([7], dict(temperature=0.8, min_p=0.02)),
                ([8, 2], dict(log_probs=True, top_log_probs=2)),
                ([9], dict(temperature=1.1, log_probs="sampled")),
            )
        )
    ]
    whole = st.Scheduler(model_of(name), rows=4, max_length=80, quantum=3)
    for mesh, order in zip(MESHES, (requests, requests[::-1]), strict=True):
        want, scheduler = served(whole, order), scheduler_of(name, mesh, rows=8)
        for _ in range(2):
            for mine, expected in zip(served(scheduler, order), want, strict=True):
                assert_same(mine, expected)


@slow
def test_a_failed_request_ends_alone():
    """Of a shard of a shard."""
    target = st.shard(broken_at(35, model=model_of("mamba2")), mesh_of(2, 4))
    options = dict(rows=2, max_length=60, quantum=2, drafter=st.NgramDrafter())
    serves_beside_failures(st.Scheduler(target, **options), model_of("mamba2"))
