"""What holds for heads of every kind: against float64, and that drafts depend on the text alone.

No test of exactness can find a wrong head: a wrong order, state or cache only lowers acceptance.
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.decoding import slots
from stree_jax.decoding.plan import plan
from stree_jax.decoding.prefix.prefill import PREFILL_CHUNK
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.testing import PROMPTS, assert_lossless, random_model, tiny_model
from stree_jax.tuning.search import replay_tau
from stree_jax.tuning.trace import head_trace
from tests.extensions.heads import HEADS, KINDS, parts, states_of
from tests.helpers import assert_same_model, refusal, with_weight
from tests.numpy_parts import log_softmax

slow = pytest.mark.slow
thorough = pytest.mark.thorough

TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 3])
# One path, with branches beside it.
DEEP = st.TreeTopology.from_parents([*range(-1, 9), 0, 2, 2]).level_order()
MARKS = dict.fromkeys(("mtp, latent", "mtp, qwen, experts", "medusa, padded"), slow)
OTHERS = (
    "medusa, multipliers",
    "mtp",
    "mtp, ling",
    "eagle3",
    "eagle3, its own embedding",
    "dflash",
)
OTHERS += ("dflash, dspark, filled in",)
MARKS |= dict.fromkeys(OTHERS, thorough)


def kept(state):
    """What a drafter keeps of the text."""
    return getattr(state, "model_state", state)


def assert_caches(exact, caches, row, states):
    """Keys and values of the layers are those of the text's inner states; a ring has the last."""
    for layer, cache in enumerate(caches):
        length, size = len(states), cache.keys.shape[2]
        assert cache.length[row] == length
        places = np.arange(max(0, length - size), length)
        for got, want in zip(cache, exact.cached(layer, states), strict=False):
            got = got[row, :, places % size]
            assert_allclose(got, want[places], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        *(pytest.param(name, TREE, marks=MARKS.get(name, ()), id=name) for name in HEADS),
        pytest.param("mtp", DEEP, id="mtp, deep", marks=thorough),
    ],
)
def test_drafts_come_from_the_head_in_float64(name, topology):
    """Over several steps; and what is kept, also of rows that ended."""
    kind, target, head, make, exact = parts(name)
    drafter = make(target, head, child_sampling="iid")
    inner = head.config.inner_layers if kind in ("eagle3", "dflash") else ()
    options = dict(temperature=0.7, key=jax.random.key(2), max_new_tokens=60)
    request = plan(target, PROMPTS, drafter=drafter, topology=topology, **options)
    topology, limits = request.decoder.topology, jnp.array([2, 60, 60])  # the first row ends
    limits = request.limits._replace(max_new_tokens=limits)
    state = request.decoder.start(target, drafter, request.context, request.keys)
    for step in range(4):
        before = state.context, state.done, kept(state.drafter)
        context, done, reader = jax.tree.map(np.array, before)
        state, draft, _ = request.decoder.step(target, drafter, state, limits, request.sampling)
        draft = jax.tree.map(np.asarray, draft)
        for row in range(len(PROMPTS)):
            text = context.tokens[row, : context.length[row]].tolist()
            knows = len(text) > 1 or kind == "dflash"
            assert kind == "dflash" or reader.known[row] == knows
            assert done[row] or draft.tree.valid[row, 1:].all() == knows
            if not knows:
                assert draft.tree.valid[row].sum() == 1
                continue
            states = states_of(target, text, inner)
            last = states[len(text) - 2]
            if kind == "dflash":
                assert_caches(exact, reader.caches, row, states[: len(text) - 1])
            elif kind != "medusa":
                last = exact.state(last)
                entries = exact.entries(text[:-1], states)
                assert reader.kv.length[row] == len(entries) == len(text) - 2
                wanted = exact.qkv(np.array(entries))[1:] if entries else ()
                for got, want in zip(reader.kv, wanted, strict=False):
                    got = got[row, :, : len(entries)].swapaxes(0, 1)
                    assert_allclose(got, want, atol=2e-5)
            if kind != "dflash":
                assert_allclose(reader.hidden[row], last, atol=2e-5)
            for node, below in enumerate(topology.children):
                if done[row] or not below or (step and topology.depths[node] > 2):
                    continue
                path = draft.tokens[row, np.flatnonzero(topology.ancestor_mask[node])[1:]]
                logits = exact.logits(text, states, path)[-1][: target.config.vocab_size]
                want = log_softmax(logits / 0.7)
                got = draft.log_probs[row, draft.log_prob_row[node]]
                there = np.isfinite(want)
                assert_array_equal(np.isfinite(got), there)
                assert_allclose(got[there], want[there], atol=5e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("dflash", None), ("dflash, dspark", None), ("dflash, dspark", st.BeamDrafter)),
        *(("dflash, second", kind) for kind in (None, st.DynamicDrafter)),
        *(pytest.param(name, None, marks=thorough) for name in ("eagle3", "mtp, ling")),
        pytest.param("dflash, dspark", st.DynamicDrafter, marks=slow),
        pytest.param("eagle3", st.BeamDrafter, marks=slow),
        pytest.param("eagle3", st.DynamicDrafter, marks=slow),
    ],
)
def test_text_and_cache_are_those_of_autoregressive_decoding(name, kind):
    """In static trees and in those that heads choose; others: tests/decoding/test_lossless.py."""
    target, drafter, topology = parts(name).target, parts(name).drafter(), TREE
    if kind:
        drafter, topology = kind(drafter.model), st.TreeTopology.budget(5, 2)
    for out in assert_lossless(target, drafter, topology=topology, max_new_tokens=16):
        assert out.stats.num_accepted > 0


# The text alone.

ZERO = Sampling(jnp.zeros(1), temperature_is_zero=True)


def assert_same_state(got, want, length):
    """Of rows of one text; entries past the length are unspecified."""
    is_dflash = hasattr(got, "caches")
    if not is_dflash:
        assert_array_equal(got.known, want.known)
        assert_allclose(got.hidden, want.hidden, atol=1e-4)
    entries = length - 2 + is_dflash
    both = (x.caches if is_dflash else [x.kv] if hasattr(x, "kv") else () for x in (got, want))
    for caches in zip(*both, strict=True):
        assert [cache.length.tolist() for cache in caches] == [[entries]] * 2
        for pair in zip(*(cache[:2] for cache in caches), strict=True):
            size = min(entries, *(part.shape[2] for part in pair))
            assert_allclose(*(part[:, :, :size] for part in pair), atol=2e-5)


@thorough
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[slow] * (kind in ("eagle3", "mtp, qwen", "mtp, ling", "dflash")))
        for kind in (*KINDS, "mtp, qwen", "mtp, ling", "dflash, dspark", "dflash, second")
    ],
)
def test_the_next_chain_depends_on_the_text_alone(kind):
    """However it was cut into prompt, pieces, chunks of a piece, steps and forks."""
    target, drafter = parts(kind).target, parts(kind).drafter()
    text = np.random.default_rng(0).integers(37, size=PREFILL_CHUNK + 8).tolist()
    limits = dict(max_new_tokens=40)
    request = plan(target, [text], drafter=drafter, topology=st.TreeTopology.chain(3), **limits)
    decoder, keys = request.decoder, request.keys

    def context(tokens):
        padded = np.pad(np.asarray(tokens, np.int32), (0, 768 - len(tokens)))[None]
        return Context(jnp.asarray(padded), jnp.array([len(tokens)], jnp.int32))

    @jax.jit
    def chain(drafter, state, tokens):
        context = Context(tokens, jnp.full(1, tokens.shape[1], jnp.int32))
        return drafter.propose(state, Step(context, keys, None, ZERO), decoder.topology)[0].tokens

    def next_chain(prefix, tokens):
        return chain(drafter, prefix.drafter, jnp.asarray([tokens[-1:]], jnp.int32)).tolist()

    # A pool with the prompt in it, after some steps; then continued by another turn.
    whole = decoder.read(target, drafter, context(text))
    for at in (1, 2, PREFILL_CHUNK + 3):
        prefix = decoder.read(target, drafter, context(text[:at]))
        assert kind[:6] == "dflash" or bool(kept(prefix.drafter).known[0]) == (at > 1)
        joined = decoder.read(target, drafter, context(text), prefix)
        assert_same_state(kept(joined.drafter), kept(whole.drafter), len(text))
        assert next_chain(joined, text) == next_chain(whole, text)
    state = slots.empty(decoder, target, drafter, rows=2)
    state = slots.insert(decoder, target, state, [1], joined, keys)
    arguments = target, drafter, state, request.limits, request.sampling
    state = decoder.run(*arguments, max_steps=3)
    assert int(state.statistics.drafted[1]) == 3 * 3  # from the first step on
    taken = slots.take(state, 1)
    length = int(taken.context.length[0])
    longer = np.asarray(taken.context.tokens)[0, :length].tolist()
    assert length > len(text) + 2
    both = [*longer, 7, 8, 9, 1, 2]
    forked = decoder.read(target, drafter, context(both), taken)
    for prefix, words in ((taken, longer), (forked, both)):
        want = decoder.read(target, drafter, context(words))
        assert_same_state(kept(prefix.drafter), kept(want.drafter), len(words))
        assert next_chain(prefix, words) == next_chain(want, words)


@thorough
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("mtp", 1.0),
        ("dflash, dspark", 1.0),
        ("dflash, second", 1.0),
        *(pytest.param(kind, 0.0, marks=slow) for kind in KINDS),
        *(pytest.param(kind, 1.0, marks=slow) for kind in ("medusa", "eagle3")),
    ],
)
def test_ranks_by_depth_give_the_tau_of_a_tree(kind, temperature):
    """Without decoding with the tree; texts end inside paths, too."""
    target, drafter = parts(kind).target, parts(kind).drafter()
    prompts = np.random.default_rng(0).integers(37, size=(16, 5)).tolist()
    options = dict(max_new_tokens=23, temperature=temperature, key=jax.random.key(0))
    request, texts = plan(target, prompts, **options), st.generate(target, prompts, **options)
    asked = target, request, list(texts.tokens), 6
    trace = head_trace(drafter, getattr(drafter, "model", drafter), *asked)
    deepest = {"medusa": 4, "dflash, second": 5}.get(kind, 8)
    assert trace.ranks[0].shape == (23, deepest)
    topology = st.TreeTopology.from_branching((3, 2, 1))
    out = st.generate(target, prompts, drafter=drafter, topology=topology, **options)
    assert out.stats.tau > 1.02
    assert_allclose(replay_tau(topology, trace), out.stats.tau, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "load", "other", "missing"),
    [
        ("medusa", st.load_medusa, "with another target; load that one, or", "has no Medusa heads"),
        ("mtp", st.load_mtp, "head in .* is for another target", "has no multi-token prediction"),
        ("eagle3", st.load_eagle3, "in .* is for another target; load", "is not an EAGLE-3 head"),
        ("dflash", st.load_dflash, "DFlash head in .* is for another target", "not a DFlash head"),
    ],
)
def test_a_saved_head_is_for_one_target(kind, load, other, missing, tmp_path):
    _, target, head, _, _ = parts(kind)
    path = tmp_path / "head"
    st.save_head(head, target, path)
    assert (path / CHECKSUMS).is_file()
    assert_same_model(load(path, target), head)
    assert_same_model(st.load_head(kind, path, target), head)
    rounded = load(path, tiny_model(NAMES[kind], dtype="bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(rounded))} >= {"bfloat16"}
    for other_target in (
        with_weight(target, "embedding", lambda rows: rows.at[-2:].set(rows[:-3:-1])),
        random_model(target.config, seed=1),
        tiny_model("bamba hybrid"),
    ):
        refusal(other, load, path, other_target)
    refusal(f"of kind '{kind}' and no model; load_head", st.from_pretrained, path)
    refusal("exists; pass overwrite=True|exists", st.save_head, head, target, path)
    st.save_pretrained(target, tmp_path / "model")
    others = {*KINDS} - {kind}
    for other_kind in others:
        st.save_head(parts(other_kind).head, parts(other_kind).target, tmp_path / other_kind)
    for wrong in (tmp_path / name for name in ("model", *others)):
        refusal(missing, load, wrong, target)
    header = json.loads((path / "config.json").read_text())
    older = {"target_identity": None}, "saved by an older version"
    for change, message in (*DAMAGED[kind], older):
        (path / "config.json").write_text(json.dumps(header | change))
        refusal(message, load, path, target)


NAMES = {"medusa": "plain", "mtp": "plain", "eagle3": "nemotron_h hybrid"}
NAMES |= {"dflash": "nemotron_h hybrid"}
DAMAGED = {
    "medusa": [
        ({"num_heads": 3}, "the weights of .* disagree with its config"),
        ({"num_heads": True}, r"config\.json is damaged: num_heads must be .* got True"),
    ],
    "mtp": [
        ({"head": None}, "config.json is damaged: MtpConfig needs a table of fields, got None"),
        ({"head": {"feed_forward": {"kind": "rwkv"}}}, "damaged: unknown feed_forward 'rwkv'"),
    ],
    "eagle3": [({"head": {"layers": 3}}, "damaged: Eagle3Config has no fields .'layers'")],
    "dflash": [({"head": {"block": 3}}, "damaged: DFlashConfig has no fields .'block'")],
}


# What is refused.

WIDTHS = {
    "medusa": ("Medusa heads has width 16, and the target width 32", "37, 16"),
    "mtp": ("the head has width 16 and dtype float32, and the target width 32", "37, 16"),
    "eagle3": ("the head has width 16 and tokens 37 and dtype float32", "tokens 37 .* tokens 40"),
    "dflash": ("the head has width 16 and tokens 37 and dtype float32", "tokens 37 .* tokens 40"),
}


def refused():
    """Messages, and the calls that are refused with them."""
    target, wider = tiny_model(), st.HybridLM.abstract(st.ModelConfig.tiny(d_model=32))
    unknown = partial(st.load_head, "eagle", "", target)
    yield "the kinds of heads are medusa, .* got 'eagle'", unknown
    yield "head must be one of the kinds medusa, .* got", partial(st.save_head, target, target, "")
    for number in (0, 17, True):
        make = partial(st.MedusaHeads, target, num_heads=number, rngs=nnx.Rngs(0))
        yield "num_heads must be an integer, from 1 to 16", make
    for options in (dict(window=4), dict(qkv_bias=True), dict(key_multiplier=2.0)):
        layers = st.AttentionConfig(4, 2, 8, **options), st.MlpConfig(8)
        yield "an AttentionConfig with no options but", partial(st.MtpConfig, 16, *layers)
    layers = st.AttentionConfig(4, 2, 8), st.Mamba2Config(4, 8, 8)
    yield "feed_forward of a head is an MlpConfig or", partial(st.MtpConfig, 16, *layers)
    for kind, (wide, elsewhere) in WIDTHS.items():
        _, target, head, make, _ = parts(kind)
        drafter = make(target, head)
        other = random_model(dataclasses.replace(target.config, vocab_size=40))
        asked = partial(plan, other, PROMPTS, drafter=drafter)
        yield f"{elsewhere}.*with the target that generate gets", asked
        yield wide, partial(make, nnx.merge(*wider), head)
        yield "child_sampling must be 'auto' or", partial(make, target, head, child_sampling="best")
        yield f"must be a HybridLM.*{type(head).__name__}", partial(st.ModelDrafter, head)


def test_what_is_refused():
    for message, call in refused():
        refusal(message, call)


@thorough
@pytest.mark.parametrize("name", ["plain", "mamba_in_llama"], ids=["untied", "tied"])
def test_embedding_and_output_head_are_not_copied(name):
    target = tiny_model(name)
    own, model = (parts(kind).make(target, parts(kind).head) for kind in ("medusa", "mtp"))
    assert own.output_head[...] is target.output_head[...]
    assert model.model.embedding[...] is target.embedding[...]
    assert (model.model.output_head is None) == (target.head is None)
