"""EAGLE-3 heads: from files, against float64, and exact."""

import functools

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.testing import PROMPTS, assert_lossless, tiny_model
from stree_jax.tuning import head_trace, replay_tau
from tests.extensions.eagle3_files import CONFIG, OWN, VOCAB, WIDTH, saved, tensors
from tests.extensions.numpy_eagle3 import Head


@pytest.fixture(scope="module")
def target():
    return tiny_model("nemotron_h hybrid")


def exact(target, changes=(), embedding=None):
    weights = tensors() | {"embedding": target.embedding[...] if embedding is None else embedding}
    fields = CONFIG | dict(changes)
    return Head(
        weights,
        num_heads=4,
        num_kv_heads=2,
        theta=50.0,
        eps=1e-3,
        norm_before_residual=fields.get("norm_before_residual", False),
    )


@functools.partial(jax.jit, static_argnames="inner")
def _inner(model, tokens, inner):
    return model.hidden(tokens, inner)


def inner_of(model, text):
    padded = np.pad(np.asarray(text, np.int32), (0, 96 - len(text)))[None]
    return np.asarray(_inner(model, padded, (1, 2, 4)))[0, : len(text), WIDTH:]


@pytest.mark.parametrize("own", [False, True], ids=["the target's embedding", "its own"])
def test_drafts_come_from_the_head_in_float64(own, target, tmp_path):
    """Over several steps, which include prompts, paths and rows that have ended."""
    embedding = np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    changes = dict(norm_before_residual=True) if own else {}
    path = saved(tmp_path / "head", changes, {"embed_tokens.weight": embedding} if own else {})
    drafter = st.Eagle3Drafter(target, st.load_eagle3(path, target), child_sampling="iid")
    oracle = exact(target, changes, embedding if own else None)
    topology = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 3])
    options = dict(temperature=0.7, key=jax.random.key(2), max_new_tokens=60)
    request = plan(target, PROMPTS, drafter=drafter, topology=topology, **options)
    state = request.decoder.start(target, drafter, request.context, request.keys)
    for _ in range(3):
        before = jax.tree.map(np.asarray, state.context)
        state, draft, _ = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        draft = jax.tree.map(np.asarray, draft)
        for row in range(len(PROMPTS)):
            text = before.tokens[row, : before.length[row]].tolist()
            assert draft.tree.valid[row, 1:].all() == (len(text) > 1)
            if len(text) == 1:
                continue
            inner = inner_of(target, text)
            for node, below in enumerate(topology.children):
                if not below:
                    continue
                path = draft.tokens[row, np.flatnonzero(topology.ancestor_mask[node])[1:]]
                logits = oracle.logits(text, inner, path)[-1] / 0.7
                want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                got = draft.log_probs[row, draft.log_prob_row[node]]
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
                there = np.isfinite(want)
                np.testing.assert_allclose(got[there], want[there], atol=5e-4)


def test_the_inner_states_are_the_stream_after_so_many_layers(target):
    """The last one, normed, is what the output head takes."""
    text = np.array([[5, 9, 2, 30]], np.int32)
    layers = len(target.config.layers)
    both = _inner(target, text, (2, layers))
    last = both[..., 2 * WIDTH :]
    normed = target._final_norm(last)
    np.testing.assert_allclose(both[..., :WIDTH], normed, atol=1e-5)
    assert np.abs(both[..., WIDTH : 2 * WIDTH] - last).max() > 0.1


def test_text_and_cache_are_those_of_autoregressive_decoding(target, tmp_path):
    head = st.load_eagle3(saved(tmp_path / "head"), target)
    (greedy, sampled) = assert_lossless(
        target,
        st.Eagle3Drafter(target, head),
        topology=st.TreeTopology.from_branching((3, 2)),
        max_new_tokens=16,
    )
    assert greedy.stats.num_accepted + sampled.stats.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [st.BeamDrafter, st.DynamicDrafter])
def test_trees_whose_shape_the_head_chooses(kind, target, tmp_path):
    head = st.load_eagle3(saved(tmp_path / "head"), target)
    drafter = kind(st.Eagle3Model(target, head))
    assert_lossless(target, drafter, topology=st.TreeTopology.budget(5, 2), max_new_tokens=8)


@pytest.mark.slow
def test_ranks_by_depth_give_the_tau_of_every_tree(target, tmp_path):
    """Positions, tokens that the head has not, and states of inner layers among them."""
    drafter = st.Eagle3Drafter(target, st.load_eagle3(saved(tmp_path / "head"), target))
    prompts = np.random.default_rng(0).integers(37, size=(12, 5)).tolist()
    options = dict(max_new_tokens=16, temperature=1.0, key=jax.random.key(0))
    request, texts = plan(target, prompts, **options), st.generate(target, prompts, **options)
    trace = head_trace(drafter, drafter.model, target, request, list(texts.tokens), 6)
    topology = st.TreeTopology.from_branching((3, 2))
    out = st.generate(target, prompts, drafter=drafter, topology=topology, **options)
    assert out.stats.tau > 1.02
    np.testing.assert_allclose(replay_tau(topology, trace), out.stats.tau, rtol=1e-12)


D2T = np.zeros(OWN, np.int64)
REFUSED = [
    (dict(architectures=["LlamaForCausalLM"]), {}, "not an EAGLE-3 head: its architectures are"),
    (dict(architectures=[]), {}, r"not an EAGLE-3 head: its architectures are \[\]"),
    (dict(norm_before_fc=True), {}, "norm_before_fc = true is not supported"),
    (dict(attention_bias=True), {}, "biases in an EAGLE-3 head are not supported"),
    (dict(num_hidden_layers=2), {}, "num_hidden_layers = 2, elsewhere 1"),
    (dict(target_hidden_size=32), {}, "target_hidden_size = 32, elsewhere 16"),
    (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 9]}), {}, "the target's 4 layers"),
    (dict(surprise=1), {}, "unknown fields .*surprise"),
    (dict(vocab_size=40), {}, "d2t|t2d|of a model of width 16 with 40 tokens"),
    ({}, {"fc.weight": None}, "fc.weight .* is missing"),
    ({}, {"norm.bias": np.ones(4, np.float32)}, "norm.bias' .* is not expected"),
    ({}, {"d2t": None}, "d2t is missing, and the head has 20 of the target's 37 tokens"),
    ({}, {"d2t": D2T - 1}, "d2t maps tokens of the head twice, or outside the vocabulary"),
    ({}, {"t2d": np.full(VOCAB, np.nan, np.float32)}, "t2d must be true or false for each of the"),
    ({}, {"t2d": np.full(VOCAB, 2, np.int64)}, "t2d must be true or false for each of the 37"),
    ({}, {"d2t": D2T}, "t2d and d2t contradict each other"),
]


@pytest.mark.parametrize(("changes", "own", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_is_refused(changes, own, message, target, tmp_path):
    path = saved(tmp_path / "head", changes, own)
    with pytest.raises(ValueError, match=message) as error:
        st.load_eagle3(path, target)
    assert "\n" not in str(error.value)


def test_a_head_is_no_model(target, tmp_path):
    path = saved(tmp_path / "head")
    for load in (st.from_pretrained, lambda path: st.load_mtp(path, target)):
        with pytest.raises(ValueError, match="is an EAGLE-3 head and no model; load it with"):
            load(path)
