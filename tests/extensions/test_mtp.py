"""Multi-token-prediction heads: against float64, and that drafts depend on the text alone.

No test of exactness can find a wrong head: a wrong order, state or cache only lowers acceptance.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stree_jax as st
from pallas_kernels import AttentionLayout
from stree_jax.decoding import head_reader, outputs_ahead, slots
from stree_jax.decoding.nodes import MAX_UNROLLED
from stree_jax.decoding.options import plan
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.extensions.mtp.conversion import rules_of as mtp_rules
from stree_jax.extensions.mtp.training import head_of, mtp_loss, new_head
from stree_jax.models import flatten
from stree_jax.testing import PROMPTS, apply, random_model, tiny_model
from stree_jax.training import Recipe, Training
from stree_jax.tuning import dynamic_tau, head_trace, replay_tau
from tests.extensions import eagle3_files
from tests.extensions.numpy_mtp import Head
from tests.helpers import mtp_head_of

TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 3])
# More levels than are unrolled: one path, with branches beside it.
DEEP = st.TreeTopology.from_parents([*range(-1, MAX_UNROLLED + 1), 0, 2, 2]).level_order()
LATENT = {"dense": None, "latent": 8}
MODEL = {"dense": "plain", "latent": "falcon_h1 hybrid"}  # the second has multipliers, tied


def oracle(target, head):
    """The head in float64."""
    weights = flatten(nnx.to_pure_dict(nnx.state(head)))
    tensors = {}
    for rule in mtp_rules(head.config):
        if rule.target in weights:
            parts = rule.transform.invert(np.asarray(weights.pop(rule.target)))
            tensors |= dict(zip(rule.sources, parts, strict=True))
    assert not weights
    config, experts, attention = target.config, head.config.feed_forward, head.config.attention
    tensors["embedding"] = config.embedding_multiplier * np.asarray(target.embedding[...])
    tensors["lm_head"] = config.logits_multiplier * np.asarray(target.output_head[...])
    return Head(
        tensors,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        groups=experts.num_router_groups,
        active_groups=experts.num_active_groups,
        active=experts.num_active,
        scale=experts.scale,
        eps=head.config.norm_eps,
    )


@functools.cache
def parts(kind):
    """Target, head, and the head in float64."""
    target = tiny_model(MODEL[kind])
    head = mtp_head_of(target, latent=LATENT[kind])
    return target, head, oracle(target, head)


@jax.jit
def _hidden(model, tokens):
    return model.hidden(tokens)


def hidden_of(model, text):
    """The target's states after its final norm: its output head makes them its logits."""
    padded = np.pad(np.asarray(text, np.int32), (0, 96 - len(text)))[None]
    hidden = np.asarray(_hidden(model, padded))[:, : len(text)]
    logits = np.asarray(apply(model, padded))[:, : len(text)]
    head = np.asarray(model.output_head[...])
    own = model.config.logits_multiplier * np.einsum("btm,vm->btv", hidden, head)
    np.testing.assert_allclose(own, logits, atol=1e-4)
    return hidden[0]


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.unrolled
@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("dense", TREE),
        pytest.param("latent", TREE, marks=pytest.mark.slow),
        ("dense", DEEP),
    ],
    ids=["dense", "latent", "looped"],
)
def test_drafts_come_from_the_head_in_float64(kind, topology):
    """Over several steps, given the whole path of each node; and what is kept of the text."""
    target, head, exact = parts(kind)
    drafter = st.MtpDrafter(target, head, child_sampling="iid")
    options = dict(temperature=0.7, key=jax.random.key(2), max_new_tokens=60)
    request = plan(target, PROMPTS, drafter=drafter, topology=topology, **options)
    topology = request.decoder.topology
    state = request.decoder.start(target, drafter, request.context, request.keys)
    for step in range(3):
        before = jax.tree.map(np.asarray, (state.context, state.drafter.reader))
        state, draft, _ = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        draft, (context, reader) = jax.tree.map(np.asarray, draft), before
        for row in range(len(PROMPTS)):
            text = context.tokens[row, : context.length[row]].tolist()
            assert reader.known[row] == (len(text) > 1)
            assert draft.tree.valid[row, 1:].all() == (len(text) > 1)
            if len(text) == 1:
                assert draft.tree.valid[row].sum() == 1
                continue
            hidden = hidden_of(target, text)
            entries = exact.text_entries(text[:-1], hidden)
            assert reader.kv.length[row] == len(entries) == len(text) - 2
            for i, kept in enumerate(reader.kv[:2]):
                want = np.array([entry[i] for entry in entries]).reshape(-1, *kept.shape[1::2])
                got = kept[row, :, : len(entries)].swapaxes(0, 1)
                np.testing.assert_allclose(got, want, atol=2e-5)
            np.testing.assert_allclose(reader.hidden[row], hidden[len(text) - 2], atol=2e-5)
            for node, below in enumerate(topology.children):
                if not below or (step and topology.depths[node] > 2):
                    continue
                path = draft.tokens[row, np.flatnonzero(topology.ancestor_mask[node])[1:]]
                logits = exact.logits(text, hidden, path)[-1][: target.config.vocab_size]
                got = draft.log_probs[row, draft.log_prob_row[node]]
                np.testing.assert_allclose(got, log_softmax(logits / 0.7), atol=5e-4)


# Mutations that no exactness test sees.

CHAIN = st.TreeTopology.chain(3)


def chain_after(target, model, text):
    """A chain of drafts after a text `[1, T]`, and its log-probabilities."""
    read, count = text[:, :-1], jnp.array([text.shape[1] - 1], jnp.int32)
    hidden, _ = target.prefill_hidden(read, count, target.init_cache(*read.shape))
    drafter = st.ModelDrafter(model, child_sampling="iid")
    context = Context(text[:, -1:], jnp.ones(1, jnp.int32))
    state = drafter.read(drafter.init(1, CHAIN, 16), read, hidden, count)
    keys = jax.random.split(jax.random.key(0), 1)
    draft, _ = drafter.propose(state, Step(context, keys, None, Sampling(jnp.ones(1))), CHAIN)
    return draft.tokens[0, 1:], draft.log_probs[0]


def gap():
    """The largest difference of a chain of three drafts from float64."""
    target, head, exact = parts("dense")
    text = np.array([5, 9, 2, 30, 11, 7], np.int32)
    hidden = hidden_of(target, text)
    run = jax.jit(lambda *arguments: chain_after(*arguments))  # traced again
    drafts, log_probs = run(target, st.MtpModel(target, head), text[None])
    want = exact.logits(text, hidden, np.asarray(drafts)[:-1])
    return max(np.abs(a - log_softmax(b)).max() for a, b in zip(log_probs, want, strict=True))


def before_the_final_norm(monkeypatch):
    monkeypatch.setattr(st.HybridLM, "_final_norm", lambda self, hidden: hidden)


def swapped(monkeypatch):
    joined = st.MtpHead.joined
    monkeypatch.setattr(st.MtpHead, "joined", lambda self, e, h: joined(self, h, e))


def rotated(monkeypatch):
    config = parts("dense")[1].config.attention
    turned = AttentionLayout(
        config.num_heads, config.num_kv_heads, config.head_dim, config.score_scale, (1.0, 0.1)
    )
    monkeypatch.setattr(st.AttentionConfig, "layout", property(lambda self: turned))
    monkeypatch.setattr(parts("dense")[1].attention, "_layout", turned)


def no_cache(monkeypatch):
    monkeypatch.setattr(head_reader, "replay_kv", lambda cache, entries, path: cache)


def not_normed(monkeypatch):
    """The head's output goes to the next level before its final norm."""
    monkeypatch.setattr(st.MtpHead, "finished", lambda self, x: x)
    logits = st.MtpModel.logits
    monkeypatch.setattr(
        st.MtpModel,
        "logits",
        lambda self, x: logits(self, self.head.norm(x, self.head.final_norm_scale)),
    )


def test_the_head_is_that_of_float64():
    assert gap() < 1e-4


@pytest.mark.parametrize(
    "mutation", [before_the_final_norm, swapped, rotated, no_cache, not_normed]
)
def test_a_wrong_head_is_found(mutation, monkeypatch):
    hidden_of(parts("dense")[0], [1])  # compiled before the mutation
    mutation(monkeypatch)
    assert gap() > 0.01


# The text alone.

ZERO = Sampling(jnp.zeros(1), temperature_is_zero=True)


def drafter_of(kind, folder):
    """A target, and a drafter with a head for it."""
    if kind == "mtp":
        target, head, _ = parts("dense")
        return target, st.MtpDrafter(target, head)
    target = tiny_model("nemotron_h hybrid")
    return target, st.Eagle3Drafter(target, st.load_eagle3(eagle3_files.saved(folder), target))


def assert_same_state(got, want, length):
    """Of rows of one text; entries past the length are unspecified."""
    np.testing.assert_array_equal(got.kv.length, want.kv.length)
    np.testing.assert_array_equal(got.known, want.known)
    for mine, other in zip(got.kv[:2], want.kv[:2], strict=True):
        mine, other = mine[:, :, : length - 2], other[:, :, : length - 2]
        np.testing.assert_allclose(mine, other, atol=2e-5)
    np.testing.assert_allclose(got.hidden, want.hidden, atol=2e-5)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_next_chain_depends_on_the_text_alone(kind, monkeypatch, tmp_path):
    """However it was cut into prompt, pieces, steps and forks."""
    prefill = importlib.import_module("stree_jax.decoding.prefill")
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)
    jax.clear_caches()
    target, drafter = drafter_of(kind, tmp_path)
    text, limits = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], dict(max_new_tokens=40)
    request = plan(target, [text], drafter=drafter, topology=st.TreeTopology.chain(3), **limits)
    decoder, keys = request.decoder, request.keys

    def context(tokens):
        padded = np.pad(np.asarray(tokens, np.int32), (0, 64 - len(tokens)))[None]
        return Context(jnp.asarray(padded), jnp.array([len(tokens)], jnp.int32))

    @jax.jit
    def chain(drafter, state, tokens):
        context = Context(tokens, jnp.full(1, tokens.shape[1], jnp.int32))
        return drafter.propose(state, Step(context, keys, None, ZERO), decoder.topology)[0].tokens

    def next_chain(prefix, tokens):
        return chain(drafter, prefix.drafter, jnp.asarray([tokens[-1:]], jnp.int32)).tolist()

    # A pool with the prompt in it, after some steps; then continued by another turn.
    whole = decoder.read(target, drafter, context(text))
    for at in (1, 2, 6):
        prefix = decoder.read(target, drafter, context(text[:at]))
        joined = decoder.read(target, drafter, context(text), prefix)
        assert_same_state(joined.drafter.reader, whole.drafter.reader, len(text))
        assert next_chain(joined, text) == next_chain(whole, text)
    state = slots.empty(decoder, target, drafter, rows=2)
    state = slots.insert(decoder, target, state, [1], joined, keys)
    arguments = target, drafter, state, request.limits, request.sampling
    state = decoder.run(*arguments, max_steps=3)
    taken = slots.take(state, 1)
    length = int(taken.context.length[0])
    longer = np.asarray(taken.context.tokens)[0, :length].tolist()
    assert length > len(text) + 2
    both = [*longer, 7, 8, 9, 1, 2]
    forked = decoder.read(target, drafter, context(both), taken)
    for prefix, words in ((taken, longer), (forked, both)):
        want = decoder.read(target, drafter, context(words))
        assert_same_state(prefix.drafter.reader, want.drafter.reader, len(words))
        assert next_chain(prefix, words) == next_chain(want, words)

    # Other trees and drafters with the head keep what was read.
    for other in (drafter, st.BeamDrafter(drafter.model), st.DynamicDrafter(drafter.model)):
        tree = dataclasses.replace(decoder, topology=st.TreeTopology.budget(4, 3))
        own = tree.read(target, other, context(text[:1]))
        prefix = taken._replace(drafter=own.drafter._replace(reader=taken.drafter.reader))
        switched = tree.read(target, other, taken.context, prefix)
        assert_same_state(switched.drafter.reader, taken.drafter.reader, length)
    jax.clear_caches()


# What tuning and training see.


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_ranks_by_depth_give_the_tau_of_every_tree(temperature):
    """Without decoding with the tree; texts end inside paths, too."""
    target, head, _ = parts("dense")
    drafter = st.MtpDrafter(target, head)
    prompts = np.random.default_rng(0).integers(37, size=(16, 5)).tolist()
    options = dict(max_new_tokens=23, temperature=temperature, key=jax.random.key(0))
    request = plan(target, prompts, **options)
    texts = st.generate(target, prompts, **options)
    trace = head_trace(drafter, drafter.model, target, request, list(texts.tokens), 6)
    assert trace.ranks[0].shape == (23, 8)
    topology = st.TreeTopology.from_branching((3, 2, 1))
    out = st.generate(target, prompts, drafter=drafter, topology=topology, **options)
    assert out.stats.tau > 1.05
    np.testing.assert_allclose(replay_tau(topology, trace), out.stats.tau, rtol=1e-12)


def test_dynamic_trees_of_a_head_replay_decoding():
    target, head, _ = parts("dense")
    prompts = np.random.default_rng(1).integers(37, size=(4, 5)).tolist()
    options = dict(max_new_tokens=12)
    texts, size = st.generate(target, prompts, **options), st.TreeTopology.budget(6, 2)
    model = st.MtpModel(target, head)
    made_by = plan(target, prompts, **options)
    taus = dynamic_tau(model, target, made_by, list(texts.tokens), [size], expand=4, grid=(2.5,))
    out = st.generate(
        target, prompts, drafter=st.DynamicDrafter(model, expand=4), topology=size, **options
    )
    assert out.stats.num_accepted > 0
    assert taus[size][2.5] == pytest.approx(out.stats.tau, abs=1e-12)


def test_what_is_refused():
    target, head, _ = parts("dense")
    wide = nnx.merge(*st.HybridLM.abstract(st.ModelConfig.tiny(d_model=32)))
    more = random_model(st.ModelConfig.tiny(vocab_size=40))
    with pytest.raises(ValueError, match="the head has width 16 and dtype float32, and the target"):
        st.MtpDrafter(wide, head)
    with pytest.raises(ValueError, match="child_sampling must be 'auto' or one of"):
        st.MtpDrafter(target, head, child_sampling="best")
    drafter = st.MtpDrafter(target, head)
    with pytest.raises(ValueError, match=r"embedding of shape .37, 16., and the target's is"):
        plan(more, PROMPTS, drafter=drafter)
    with pytest.raises(ValueError, match="drafts from its target's hidden states; a cascade has"):
        st.CascadeDrafter(target, drafter)
    with pytest.raises(ValueError, match="without rotation and other options"):
        st.MtpConfig(16, st.AttentionConfig(4, 2, 8, rotary_dim=4), st.MlpConfig(8))
    with pytest.raises(ValueError, match="feed_forward of a head is an MlpConfig or a MoeConfig"):
        st.MtpConfig(16, st.AttentionConfig(4, 2, 8), st.Mamba2Config(4, 8, 8))


HEADS = {"attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"\[model\] has steps, boost_after, \[model.attention\], .*: got \[\]"),
        (HEADS, r"got \['attention'\]"),
        (HEADS | {"mlp": {"hidden_size": 8}, "moe": {}}, "got"),
        (HEADS | {"mlp": {"hidden_size": 8}, "layers": 2}, "got"),
        (HEADS | {"mlp": {"hidden_size": 8}, "steps": 0}, "steps must be an integer, from 1 to 16"),
        (
            HEADS | {"mlp": {"hidden_size": 8}, "boost_after": 2},
            "boost_after must be .* from 0 to 1",
        ),
        (HEADS | {"mlp": {"width": 8}}, "hidden_size|width"),
        (HEADS | {"mlp": 8}, "mapping"),
        (
            {"attention": {**HEADS["attention"], "rotary_dim": 4}, "mlp": {"hidden_size": 8}},
            "rotat",
        ),
    ],
)
def test_recipes_that_are_refused(table, message):
    recipe = Recipe(table, Training(1), ())
    with pytest.raises(ValueError, match=message):
        head_of(recipe, tiny_model())


def test_no_gradient_flows_through_recycled_outputs():
    """Of a head that is one number: its drafts are powers of it, and have the same values."""

    class Power(head_reader.HeadModel):
        def __init__(self, number):
            self.number = number

        def init_cache(self, batch, max_length):
            return None

        def outputs(self, tokens, above, tree, cache, prefix):
            return self.number * above, None

    def drafts(number, detached):
        tokens, hidden = jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 5, 1))
        outputs = outputs_ahead(Power(number), tokens, hidden, 3, detached=detached)
        return jnp.stack([output[0, 0, 0] for output in outputs])

    for detached, slopes in ((False, [1, 6, 27]), (True, [1, 3, 9])):
        np.testing.assert_array_equal(drafts(3.0, detached), [3, 9, 27])
        np.testing.assert_array_equal(jax.jacobian(drafts)(3.0, detached), slopes)


def test_embedding_and_output_head_are_not_copied():
    for name in ("plain", "mamba_in_llama"):  # untied, tied
        target = tiny_model(name)
        model = st.MtpModel(target, mtp_head_of(target))
        assert model.embedding[...] is target.embedding[...]
        assert (model.output_head is None) == (target.head is None)


def test_acceptance_of_a_trained_head():
    """Half a second of training; the drafts of decoding are those that it was trained for.

    All seeds are fixed. Relative noise of 1e-6 in the first weights changed no count; of the
    mutations above, each that applies here, made after training, changed one by more than 1.
    """
    target = tiny_model()
    config = st.MtpConfig(16, st.AttentionConfig(2, 1, 8), st.MlpConfig(32))
    prompts = np.random.default_rng(3).integers(37, size=(48, 4)).tolist()
    written = st.generate(target, prompts, max_new_tokens=20).tokens
    texts = jnp.asarray(np.concatenate([prompts, written], axis=1), jnp.int32)
    head = new_head(config, target, texts, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(head)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def trained(weights):
        def loss(weights):
            return mtp_loss(nnx.merge(graph, weights), target, texts, 3)

        def step(carry, _):
            weights, state = carry
            value, gradient = jax.value_and_grad(loss)(weights)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(weights, updates), state), value

        (weights, _), losses = jax.lax.scan(step, (weights, optimizer.init(weights)), None, 60)
        return weights, losses

    after, losses = trained(weights)
    new = np.random.default_rng(4).integers(37, size=(16, 4)).tolist()
    untrained, drafted = (
        st.generate(
            target,
            new,
            max_new_tokens=24,
            drafter=st.MtpDrafter(target, nnx.merge(graph, each)),
            topology=CHAIN,
        ).stats
        for each in (weights, after)
    )
    assert losses[0] == pytest.approx(0.4436, rel=0.01)
    assert losses[-1] == pytest.approx(0.0585, rel=0.05)
    np.testing.assert_allclose(untrained.accepted_per_depth, [13, 1, 1], atol=1)
    np.testing.assert_allclose(drafted.accepted_per_depth, [95, 49, 26], atol=1)
    assert drafted.tau == pytest.approx(1.73, abs=0.02)
