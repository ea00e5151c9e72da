"""Multi-token-prediction heads: mutations that are found, dynamic trees, recipes and training."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from pallas_kernels import AttentionLayout
from stree_jax.decoding import head_model
from stree_jax.decoding.types import Context, Sampling, Step
from stree_jax.extensions.mtp.training import head_of
from stree_jax.models.attention import AttentionMixer
from stree_jax.testing import tiny_model
from stree_jax.training import Recipe, Training
from tests.extensions import qwen_files
from tests.extensions.heads import parts, states_of
from tests.numpy_parts import log_softmax

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


def gap(name="mtp"):
    """The largest difference of a chain of three drafts from float64."""
    _, target, head, _, exact = parts(name)
    text = np.array([5, 9, 2, 30, 11, 7], np.int32)
    hidden = states_of(target, text)
    run = jax.jit(lambda *arguments: chain_after(*arguments))  # traced again
    drafts, log_probs = run(target, st.MtpModel(target, head), text[None])
    want = exact.logits(text, hidden, np.asarray(drafts)[:-1])
    return max(np.abs(a - log_softmax(b)).max() for a, b in zip(log_probs, want, strict=True))


def before_the_final_norm(monkeypatch):
    monkeypatch.setattr(st.HybridLM, "_final_normed", lambda self, stream: stream.hidden())


def swapped(monkeypatch):
    joined = st.MtpHead.joined
    monkeypatch.setattr(st.MtpHead, "joined", lambda self, e, h: joined(self, h, e))


def rotated(monkeypatch):
    config = parts("mtp").head.config.attention
    turned = AttentionLayout(
        config.num_heads, config.num_kv_heads, config.head_dim, config.score_scale, (1.0, 0.1)
    )
    monkeypatch.setattr(st.AttentionConfig, "layout", property(lambda self: turned))
    monkeypatch.setattr(parts("mtp").head.attention, "_layout", turned)


def no_cache(monkeypatch):
    monkeypatch.setattr(head_model, "replay_kv", lambda cache, entries, path: cache)


def not_normed(monkeypatch):
    """The head's output goes to the next level before its final norm."""
    monkeypatch.setattr(st.MtpHead, "finished", lambda self, x: x)
    logits = st.MtpModel.logits
    monkeypatch.setattr(
        st.MtpModel,
        "logits",
        lambda self, x: logits(self, self.head.norm(x, self.head.final_norm_scale)),
    )


def plain_norms(monkeypatch):
    """Norms multiply by w, not by 1 + w."""
    head = parts("mtp, qwen").head
    for module in (head, head.attention):
        for name in [name for name in vars(module) if name.endswith("norm_scale")]:
            monkeypatch.setattr(module, name, nnx.Param(getattr(module, name)[...] - 1))


def not_rotated(monkeypatch):
    """Of the entries alone: the nodes of the tree are."""
    split = AttentionLayout.split

    def unturned(self, qkv, positions):
        return split(self, qkv, positions if self.num_heads else 0 * positions)

    monkeypatch.setattr(AttentionLayout, "split", unturned)


def one_place_late(monkeypatch):
    """Entries are one position after where the tree takes them to be."""
    entries = st.MtpHead.entries
    late = lambda self, embedded, states, at: entries(self, embedded, states, at + 1)  # noqa: E731
    monkeypatch.setattr(st.MtpHead, "entries", late)


def keys_not_normed(monkeypatch):
    normed = AttentionMixer.normed
    monkeypatch.setattr(
        AttentionMixer, "normed", lambda self, x, heads: normed(self, x, heads) if heads else x
    )


OF_BOTH = (before_the_final_norm, no_cache)
MUTATIONS = {"mtp": (*OF_BOTH, swapped, rotated, not_normed)}
# Its traps are other ones: norms of 1 + w, rotation, norms of keys.
MUTATIONS["mtp, qwen"] = (plain_norms, one_place_late, not_rotated, keys_not_normed, *OF_BOTH)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        pytest.param(
            *(name, mutation), marks=[pytest.mark.slow] if number > 1 and name != "mtp" else []
        )
        for name, mutations in MUTATIONS.items()
        for number, mutation in enumerate(mutations)
    ],
)
def test_a_wrong_head_is_found(name, mutation, monkeypatch):
    assert gap(name) < 1e-4
    mutation(monkeypatch)
    assert gap(name) > 0.01


HEADS = {"attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"\[model\] has steps, \[model.attention\], .*: got \[\]"),
        (HEADS | {"mlp": {"hidden_size": 8}, "moe": {}}, "got"),
        (HEADS | {"mlp": {"hidden_size": 8}, "steps": 0}, "steps must be an integer, from 1 to 16"),
        (HEADS | {"mlp": {"width": 8}}, "hidden_size|width"),
        (HEADS | {"mlp": 8}, "mapping"),
    ],
)
def test_recipes_that_are_refused(table, message):
    recipe = Recipe(table, Training(1), ())
    with pytest.raises(ValueError, match=message):
        head_of(recipe, tiny_model())


@pytest.mark.thorough
def test_without_tables_a_head_is_as_the_targets_layers():
    config, target = qwen_files.model_config(), parts("mtp, qwen").target
    own, steps = head_of(Recipe({}, Training(1), ()), target)
    assert own == st.MtpConfig(16, config.attention, config.mlp, 1e-6, norm_float32=True)
    assert own == parts("mtp, qwen").head.config
    assert steps == 4
    smaller = {"mlp": {"hidden_size": 8}}
    own, _ = head_of(Recipe(smaller, Training(1), ()), target)
    assert (own.attention, own.feed_forward) == (config.attention, st.MlpConfig(8))


@pytest.mark.thorough
def test_no_gradient_flows_through_recycled_outputs():
    """Of a head that is one number: its drafts are powers of it, and have the same values."""

    class Power(head_model.HeadModel):
        def __init__(self, number):
            self.head = types.SimpleNamespace(
                init_cache=lambda *sizes: None,
                tree=lambda embedded, above, *others: (number * above, None),
            )

        def embedded(self, tokens):
            return None

    def drafts(number, detached):
        tokens, hidden = jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 5, 1))
        outputs = Power(number).outputs_ahead(tokens, hidden, 3, detached=detached)
        return jnp.stack([output[0, 0, 0] for output in outputs])

    for detached, slopes in ((False, [1, 6, 27]), (True, [1, 3, 9])):
        np.testing.assert_array_equal(drafts(3.0, detached), [3, 9, 27])
        np.testing.assert_array_equal(jax.jacobian(drafts)(3.0, detached), slopes)
