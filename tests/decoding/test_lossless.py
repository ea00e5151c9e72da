"""Exactness as one table: text and cache of every family and method are those of autoregressive
decoding, at every temperature, and with filters.

A cell is a family of models, a method and "zero", "mixed" or "ruled": temperature 0, where programs
have no noise; a batch of all ways of sampling, temperature 0 among them; or that batch with logits
processors and end tokens of each row. Autoregressive texts are computed once for each family. Cells
of a family stand together, since a process that runs them shares its programs.
"""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.models import AttentionConfig
from stree_jax.testing import (
    CONFIGS,
    HYBRIDS,
    PROMPTS,
    assert_lossless,
    assert_same_text,
    perturbed,
    random_model,
    tiny_model,
)
from tests.decoding import rules
from tests.decoding.texts import (
    NEW_TOKENS,
    ROWS,
    autoregressive,
    decoded,
    greedy,
    model_of,
    planned,
    steps,
)
from tests.drafters import KnownText
from tests.methods import DEEP, KEY, METHODS, RAGGED, Topology, drafts, of_target


def told(target):
    """The texts of `ROWS` that this target gives."""
    family = next(name for name, config in CONFIGS.items() if config is target.config)
    texts = autoregressive(family).tokens
    return KnownText([row.prompt for row in ROWS], texts, target.config.vocab_size)


METHODS = METHODS | {"told": of_target(told, RAGGED)}
PURE = ("groups", "mamba_in_llama", "repeated_first", "branch")
OF_HEADS = tuple(f"mtp head, {tree}" for tree in ("chain", "ragged", "wide", "paper A"))
# Cells that mix all ways of sampling, or another family, stand for these at temperature 0.
MIXED = ("chain of 1", "paper A", "dynamic", "lookup tree")
ELSEWHERE = ("best of heads", "mtp head", *OF_HEADS, "told", *MIXED)
RARE = (
    *("paper B", "paper C", "paper D", "paper E", "best tokens"),
    *("mtp head, deep", "mtp head, beam", "mtp head, dynamic"),
)
# One method of each kind of drafter.
OF_EACH_DRAFTER = (
    *("chain of 6", "deep", "beam", "dynamic", "lookup tree", "heads", "mtp head", "turns"),
)
TABLE = [
    *(("plain", method, "zero") for method in METHODS if method not in ELSEWHERE + RARE),
    *(("plain", method, "mixed") for method in (*MIXED, "beam", "turns", "best of heads")),
    # A draft model of each family takes most of the time to compile, and cannot change the text.
    *((family, "told", "mixed") for family in PURE),
    *((f"{family} hybrid", "told", "mixed") for family in HYBRIDS),
    ("mamba2attn hybrid", "dynamic", "zero"),
    ("falcon_h1 hybrid", "heads", "mixed"),  # with multipliers
    ("falcon_h1 hybrid", "mtp head", "mixed"),
    ("nemotron_h hybrid", "mtp head", "mixed"),  # the family whose checkpoints have such heads
    ("nemotron_h hybrid", "mtp head, dynamic", "zero"),
    ("plain", "ragged", "ruled"),
    ("qwen3_5 hybrid, int8", "ragged", "mixed"),
    ("qwen3_5 hybrid, int4", "ragged", "mixed"),
]
# More of the same, run by `make test-slow`.
SLOW = [
    *((family, "ragged", "mixed") for family in PURE),
    *((f"{family} hybrid", "ragged", "mixed") for family in HYBRIDS),
    *(("plain", method, "zero") for method in RARE),
    *(("plain", method, "mixed") for method in (*RARE, "chain of 6", "deep")),
    ("mamba2attn hybrid", "one wide level", "zero"),
    ("falcon_h1 hybrid", "best of heads", "mixed"),
    ("falcon_h1 hybrid", "another family", "zero"),
    ("falcon_h1 hybrid", "dynamic", "mixed"),
    ("nemotron_h hybrid", "dynamic", "mixed"),
    *(("nemotron_h hybrid", method, "mixed") for method in OF_HEADS),
    *(("nemotron_h hybrid", f"mtp head, {tree}", "mixed") for tree in ("deep", "beam", "dynamic")),
    *((f"{family} hybrid", "paper A", "zero") for family in HYBRIDS),
    *(("qwen3_5 hybrid", method, "mixed") for method in OF_EACH_DRAFTER),
    *((f"{family} hybrid, int8", "ragged", "mixed") for family in HYBRIDS if family != "qwen3_5"),
    *((f"{family} hybrid, int4", "ragged", "mixed") for family in HYBRIDS if family != "qwen3_5"),
    *(("plain, int8", method, "mixed") for method in OF_EACH_DRAFTER),
    ("nemotron_h hybrid, int8", "ragged", "ruled"),
    # All trees but "ragged" have a shape that the loop has to find out.
    *(("plain", method, "ruled") for method in ("deep", "beam", "dynamic", "lookup tree", "heads")),
    *(("plain", method, "ruled") for method in ("mtp head, ragged", "turns")),
    *((f"{family} hybrid", "ragged", "ruled") for family in ("mamba2attn", "falcon_h1")),
    *((f"{family} hybrid", "ragged", "ruled") for family in ("qwen3_5", "qwen3_next")),
    ("nemotron_h hybrid", "dynamic", "ruled"),
]
# Cells that `.ci/run` has time for, where the table runs as released; other cells stand for them.
RELEASED = [
    *((family, "told", "mixed") for family in ("repeated_first", "branch", "mamba_in_llama")),
    *(("plain", method, "zero") for method in ("another family", "deep dynamic", "deep beam")),
    ("plain", "turns", "zero"),
    ("plain", "a padded vocabulary", "zero"),
    *(("plain", method, "mixed") for method in ("dynamic", "beam", "turns")),
    *(("falcon_h1 hybrid", method, "mixed") for method in ("heads", "mtp head")),
    ("nemotron_h hybrid", "mtp head, dynamic", "zero"),
]


# A row of each idea, for `make test`.
QUICK = [
    ("falcon_h1 hybrid", "told", "mixed"),
    ("mamba2attn hybrid", "dynamic", "zero"),
    ("nemotron_h hybrid", "mtp head", "mixed"),
    ("qwen3_5 hybrid", "told", "mixed"),
    *(("plain", method, "zero") for method in ("chain of 6", "heads", "turns")),
    *(("plain", method, "mixed") for method in ("paper A", "lookup tree")),
    ("plain", "ragged", "ruled"),
]


def cells():
    assert {*QUICK} <= {*TABLE}
    left = SLOW if os.environ.get("STREE_JAX_TESTS") == "as released" else SLOW + RELEASED
    # Those of "plain" last, because the tests after the table share their programs.
    for cell in sorted(TABLE + SLOW, key=lambda cell: (cell[0] == "plain", cell)):
        marks = [pytest.mark.slow] if cell in left else []
        marks += [pytest.mark.thorough] if cell not in QUICK else []
        yield pytest.param(*cell, id=" | ".join(cell), marks=marks)


def full_depth(topology):
    """The depth that the first children reach."""
    node, depth = 0, 0
    while topology.children[node]:
        node, depth = topology.children[node][0], depth + 1
    return depth


@pytest.mark.parametrize(("family", "name", "temperature"), [*cells()])
def test_text_and_cache_are_those_of_autoregressive_decoding(family, name, temperature):
    target, method = model_of(family), METHODS[name]
    models = {
        "itself": lambda: target,
        "alike": lambda: perturbed(target, 0.1 if method.topology is not DEEP else 0.02),
        "unrelated": lambda: model_of(family, seed=1),
    }
    taus = []
    for draft in method.drafts:
        options = dict(drafter=method.make(models[draft]()), topology=method.topology)
        if temperature == "ruled":
            request, want = rules.ruled(target, **options), rules.autoregressive(family)
            out = decoded(target, request)
        elif temperature == "mixed":
            request, want = planned(target, ROWS, **options), autoregressive(family)
            out = decoded(target, request)
        else:
            request, want = plan(target, PROMPTS, **options), greedy(family)
            out = st.generate(
                target, PROMPTS, max_new_tokens=NEW_TOKENS, return_cache=True, **options
            )
        assert_same_text(target, request, out, want)
        taus.append(out.stats.tau)
        assert name != "told" or out.stats.accepted_per_depth.all()
        assert (out.stats.num_accepted > 0) == (name != "root alone")
        most = (request.decoder.topology.num_nodes - 1) * out.stats.num_target_calls
        # Lookup finds nothing, and heads have to see a hidden state first.
        fewer = any(kind in name for kind in ("lookup", "head"))
        if fewer:
            assert out.stats.num_drafted < most
        elif temperature == "zero":
            assert out.stats.num_drafted == most
        else:  # filters may leave fewer tokens than children
            assert out.stats.num_drafted <= most
    if method.follows and temperature != "ruled":  # where rows end early
        calls = -(-NEW_TOKENS // (full_depth(request.decoder.topology) + 1))
        assert taus[0] == NEW_TOKENS / calls
    if len(taus) > 1:
        assert taus == sorted(taus, reverse=True)
        assert taus[1] > 1.3
        assert taus[0] > taus[-1] or len(taus) == 2


def test_a_row_does_not_depend_on_its_place_in_the_batch():
    target, order = tiny_model(), np.random.default_rng(0).permutation(len(ROWS))
    out = decoded(target, rules.ruled(target, order, **drafts(target, "ragged")))
    assert_array_equal(out.tokens, rules.autoregressive().tokens[order])


def test_a_single_key_is_folded_with_the_index_of_the_row():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(len(PROMPTS)))
    common = dict(max_new_tokens=6, temperature=1.0)
    want = st.generate(tiny_model(), PROMPTS, key=KEY, **common)
    backwards = st.generate(tiny_model(), PROMPTS[::-1], key=keys[::-1], **common)
    assert_array_equal(backwards.tokens[::-1], want.tokens)


def test_every_family_and_every_method_is_in_the_table():
    assert {family for family, _, _ in TABLE if ", int" not in family} == {*CONFIGS}
    assert {method for _, method, _ in TABLE + SLOW} == {*METHODS}
    assert len({*TABLE} | {*SLOW}) == len(TABLE + SLOW)


@pytest.mark.thorough
def test_no_drafts_after_a_step_that_accepted_several():
    """The text repeats, then stops. Other implementations left a stale state in this case."""
    # With tied embeddings a random model repeats itself, for a while.
    model, lookup = tiny_model("mamba_in_llama"), st.NgramDrafter()
    prompts = np.random.default_rng(0).integers(37, size=(24, 5)).tolist()
    found = []
    options = dict(prompts=prompts, drafter=lookup, topology=Topology.chain(4))
    for before, _, verdict, state in steps(model, **options):
        drafted = np.asarray(state.statistics.drafted) - before.drafted
        found.append((verdict.num_accepted, drafted, ~before.done))
    assert any(
        ((accepted >= 2) & (drafted == 0) & running).any()
        for (accepted, _, _), (_, drafted, running) in itertools.pairwise(found)
    )
    tokens = np.asarray(state.context.tokens)[:, 5 : 5 + NEW_TOKENS]
    want = st.generate(model, prompts, max_new_tokens=NEW_TOKENS).tokens
    assert_array_equal(tokens, want)


@pytest.mark.gpu
def test_on_the_gpu_with_kernels():
    """Greedy losslessness in float32 with the Pallas kernels, on the device."""
    config = st.ModelConfig.tiny(head_dim=16, state_size=16, d_model=64)
    config = config.with_layers(("mamba2", AttentionConfig(4, 2, 16, rotary_dim=16)) * 2)
    model = random_model(config, implementation="pallas")
    for method in METHODS.values():
        if method.follows:
            drafter = st.ModelDrafter(perturbed(model, 0.05))
            assert_lossless(model, drafter, topology=method.topology)
