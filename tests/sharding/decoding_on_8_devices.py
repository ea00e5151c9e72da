"""Texts on meshes of 8 CPU devices are those of one device. Run by `test_on_8_devices.py`."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import stree_jax as st
from stree_jax.decoding.prefix.prefill import PREFILL_CHUNK
from stree_jax.models.cache import cache_specs
from tests.decoding.rules import random_walk
from tests.helpers import DOCS, python_blocks, rows, saved_pair
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import (
    PROMPTS,
    assert_same,
    decode,
    draft_of,
    drafts,
    drafts_on,
    model_of,
    replicated_draft,
    sharded,
)

slow = pytest.mark.slow


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    if not DOCS.is_dir():
        pytest.skip("the tests run without a checkout")
    monkeypatch.setattr(st, "demo_path", saved_pair(tmp_path).joinpath)
    names: dict = {}
    ((_, code),) = python_blocks(DOCS / "sharding.md")
    exec(compile(code, "sharding.md", "exec"), names)
    assert names["out"].tokens.shape == (3, 16)


def sampled(seed, temperature=0.7, **options):
    return dict(temperature=temperature, key=jax.random.key(seed), **options)


class Run(NamedTuple):
    """A call of `generate` on a mesh, which gives what it gives on one device without drafts."""

    name: str
    mesh: tuple[int, int] = (2, 4)
    drafter: str = "tree"
    options: Any = MappingProxyType({})
    prompts: list[list[int]] = PROMPTS
    fast: bool = False
    shows: Callable = lambda out: True  # what the case is for


def grammar(name):
    return st.Automaton(np.asarray(random_walk(size=CONFIGS[name].vocab_size).table))


def ruled(temperature):
    """Processors: their numbers are cut by rows, and the tables of a grammar are everywhere."""
    rules = [grammar("one layer"), st.RepetitionPenalty(1.4)]
    ends = dict(min_new_tokens=3, eos_token=[0, 1, 2, 3])
    return sampled(2, temperature, processors=rules, **ends)


def ragged(count):
    return [[(7 * i + j) % 37 for j in range(2 + i)] for i in range(count)]


FAMILIES = ("bamba", "mamba_in_llama")
OF_ROWS = dict(
    options=rows(
        temperature=[0.0, 1.0, 0.7],
        filters=[[], [st.MinP(0.01)], []],
        max_new_tokens=[5, 12, 9],
        stop=[[], [[9, 30]], [[1]]],
        key=[1, 2, 3],
        log_probs=["sampled"] * 3,
    )
)
RUNS = {
    # Of these texts no two best logits are as close as another order of summation moves them. The
    # fast ones have 3 rows on 2 shards of the batch, 4 of the model.
    **{
        f"{kind or 'no drafts'} of {name} on {mesh}": Run(
            *(name, mesh, kind),
            fast=(name, mesh) == ("one layer", (2, 4)),
            shows=lambda out, kind=kind: (out.stats.num_accepted > 0) == bool(kind),
        )
        for name in CONFIGS
        for mesh in ((2, 4), (8, 1), (1, 2), (1, 8))
        for kind in ("", "tree", "chain")
        # More shards than groups.
        if mesh != (1, 8) or name in ("mamba_in_llama", "mamba2attn", "mamba2", "qwen3_next")
    },
    **{
        f"{kind} of {name}": Run(name, drafter=kind)
        for name in FAMILIES
        for kind in ("ngram", "beam", "dynamic", "deep", "turns", "random trees")
    },
    **{
        f"{kind} of {name}, sampled": Run(name, drafter=kind, options=options)
        for name in FAMILIES
        for kind, options in {
            "without replacement": sampled(3, 0.8),
            "tree": sampled(3, 0.8, top_k=9),
            "beam": sampled(4, top_p=0.9),
            "turns": sampled(5),
            "random trees": sampled(5),
        }.items()
    },
    **{
        f"{count} rows on {data} shards": Run(
            "mamba2", (data, 2), "chain", sampled(5, 0.9), ragged(count)
        )
        for count in (1, 3, 5)
        for data in (2, 4)
    },
    # Shards of the batch leave the loop on their own.
    "rows end": Run(
        *("mamba2", (4, 2), "chain", dict(eos_token=[*range(9)]), [*PROMPTS, [8, 8]]),
        shows=lambda out: len({*out.lengths.tolist()}) > 1,
    ),
    # Read in pieces, of which shards of the batch need different numbers.
    "long prompts": Run("mamba2", drafter="", prompts=[[3, 4, 5] * (PREFILL_CHUNK // 3 + 13), [9]]),
    **{
        f"log-probabilities of {name}, {how}": Run(
            name, options=sampled(4, 0.8, top_k=7, log_probs=how, top_log_probs=2)
        )
        for name in ("tied", "bamba")
        for how in (True, "sampled")
    },
    **{
        f"processors at temperature {t}": Run(
            "one layer", options=ruled(t), fast=not t, shows=lambda out: out.lengths.min() > 3
        )
        for t in (0.0, 0.9)
    },
    # With a row that pads the batch.
    "options of rows": Run(
        "mamba2", (2, 2), options=OF_ROWS, shows=lambda out: "stop" in out.finish_reasons
    ),
    **{
        f"several texts on {mesh}": Run("mamba2", mesh, "chain", sampled(2, 1.0, n=3))
        for mesh in ((2, 2), (1, 2))
    },
}


@pytest.mark.parametrize(
    "run", [pytest.param(k, marks=() if r.fast else slow) for k, r in RUNS.items()]
)
def test_a_run_is_that_of_one_device(run):
    name, mesh, kind, options, prompts, _, shows = RUNS[run]
    got = decode(sharded(name, *mesh), prompts, **drafts_on(name, mesh, kind), **options)
    # These drafts change the texts, though not their distribution.
    drafting = drafts(kind, draft_of(name)) if kind == "without replacement" else {}
    want = decode(model_of(name), prompts, **drafting, **options)
    assert_same(got, want)
    assert got.stats.num_tokens == want.stats.num_tokens
    assert len(got.stats.tau_per_row) == len(got.tokens)
    assert shows(got)


def uneven(draft):
    """A replicated model whose copies differ from shard to shard, and much more than they might."""

    def spoil(leaf):
        copies = [
            jax.device_put(np.asarray(leaf) * np.float32(1 + 0.1 * (shard.device.id % 4)), device)
            for shard in leaf.addressable_shards
            for device in [shard.device]
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)

    return jax.tree.map(spoil, draft)


@slow
@pytest.mark.parametrize(
    ("kind", "options"), [("tree", {}), ("without replacement", sampled(3, 0.8))]
)
def test_what_shards_branch_on_is_decided_once(kind, options):
    """With different drafts or verdicts they would diverge, and wait for each other for ever."""
    model, even = sharded("one layer", 2, 4), replicated_draft("one layer", 2, 4)
    got, want = (decode(model, **drafts(kind, draft), **options) for draft in (uneven(even), even))
    assert_same(got, want)
    np.testing.assert_array_equal(got.stats.target_calls_per_row, want.stats.target_calls_per_row)


@slow
def test_scores():
    scores = (st.score(model, PROMPTS) for model in (sharded("mamba2", 2, 2), model_of("mamba2")))
    for on_mesh, alone in zip(*scores, strict=True):
        np.testing.assert_allclose(on_mesh, alone, atol=1e-4)


@slow
def test_the_cache_that_is_returned():
    out = decode(sharded("bamba", 2, 4), return_cache=True)
    want = decode(model_of("bamba"), return_cache=True)
    got, one = jax.tree.leaves(out.cache), jax.tree.leaves(want.cache)
    specs = jax.tree.leaves(cache_specs(CONFIGS["bamba"], "model"))
    for leaf, whole, spec in zip(got, one, specs, strict=True):
        assert len(leaf) == 4  # a row was added
        if spec == PartitionSpec("data", "model") and leaf.shape[1:] == whole.shape[1:]:
            np.testing.assert_allclose(leaf[:3], whole, atol=1e-4)
