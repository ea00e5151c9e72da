"""DFlash and DSpark heads: dynamic trees, training, and files; beside test_heads.py."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import Fields
from stree_jax.decoding.plan import plan
from stree_jax.extensions.dflash import DFlashHead, conversion
from stree_jax.extensions.dflash.conversion import read_config
from stree_jax.extensions.dflash.training import dflash_loss
from stree_jax.names import flatten
from stree_jax.testing import PROMPTS, tiny_model
from tests.decoding.texts import dynamic_tree, paths_of, started, steps
from tests.extensions.dflash_files import RED_HAT, SECOND, SPECULATORS, Z_LAB, files, saved
from tests.extensions.heads import parts, states_of
from tests.helpers import by_message, refusal
from tests.numpy_parts import log_softmax

HIDDEN = {"confidence_head_with_markov": False}


def test_the_nodes_of_dynamic_trees_are_the_best_by_confidence_and_draft():
    """A node's chance is its parent's, times the confidence after that, times its own share."""
    _, target, head, make, exact = parts("dflash, dspark")
    drafter = st.DynamicDrafter(make(target, head).model, expand=4)

    def next_log_probs(text, states, level):
        for path in level:
            share = log_softmax(2.5 * exact.logits(text, states, path)[-1])
            yield np.log(exact.confidence(text, states, path)[-1]) + share

    options = dict(drafter=drafter, topology=st.TreeTopology.budget(7, 3), count=2)
    for before, draft, _, _ in steps(target, **options):
        for row in range(len(before.length)):
            text = before.tokens[row, : before.length[row]].tolist()
            after = partial(next_log_probs, text, states_of(target, text, head.config.inner_layers))
            tree = jax.tree.map(lambda part, row=row: part[row], draft.tree)
            best, _ = dynamic_tree(after, 7, 3, 4)
            assert {*paths_of(draft.tokens[row], tree.parents, tree.valid)} == {*best}


def test_the_head_runs_once_a_step(monkeypatch):
    """For its whole block, and so for trees of any shape."""
    _, target, head, make, _ = parts("dflash, second")
    runs, run = [], type(head).__call__
    monkeypatch.setattr(type(head), "__call__", lambda *given: runs.append(1) or run(*given))
    drafter = make(target, head)
    for way in (  # no other test has these: their programs would be cached
        dict(drafter=drafter, topology=st.TreeTopology.from_branching((2, 2, 2, 1))),
        dict(drafter=st.DynamicDrafter(drafter.model), topology=st.TreeTopology.budget(11, 4)),
    ):
        request = plan(target, PROMPTS, **way)
        state = jax.eval_shape(lambda request=request: started(target, request))
        arguments = target, request.drafter, state, request.limits, request.sampling
        assert not runs  # before the step
        jax.eval_shape(partial(type(request.decoder).step, request.decoder), *arguments)
        assert runs == [1]
        runs.clear()


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_types(how, tmp_path):
    """The text is the target's in bfloat16, and packed in 8 bits with a head in 8 bits."""
    st.save_pretrained(tiny_model("nemotron_h hybrid"), tmp_path / "model")
    target = st.from_pretrained(tmp_path / "model", **how)
    small = {} if "dtype" in how else how
    head = st.load_dflash(saved(tmp_path / "head", dspark=True), target, **small)
    drafter = st.DFlashDrafter(target, head)
    options = dict(max_new_tokens=8, eos_token=(), temperature=0.9, key=jax.random.key(1))
    out = st.generate(target, [[1, 2], [3]], drafter=drafter, **options)
    np.testing.assert_array_equal(out.tokens, st.generate(target, [[1, 2], [3]], **options).tokens)
    assert out.stats.num_accepted > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dflash", "dflash, dspark", "dflash, second"])
def test_the_loss_is_that_of_blocks_at_some_tokens(name):
    """Against the head in float64, block by block, with the true tokens before each draft."""
    _, target, head, _, exact = parts(name)
    tokens = np.random.default_rng(0).integers(37, size=(2, 30)).astype(np.int32)
    deepest = head.config.num_drafts
    spacing = max(1, (30 - deepest - 1) // 16)
    places = (np.arange(16) * spacing + tokens.sum() % spacing) % (30 - deepest)
    total = np.zeros(deepest)
    for text in tokens.tolist():
        states = states_of(target, text, head.config.inner_layers)
        hidden = states_of(target, text)
        log_p = log_softmax(hidden.astype(np.float64) @ np.asarray(target.output_head[...]).T)
        for place in places:
            root = place + 1
            logits = exact.logits(text[: root + 1], states, text[root + 1 : root + deepest])
            log_q, unary = log_softmax(logits), logits
            if head.config.candidates:
                unary = exact.outputs(text[: root + 1], states) @ exact.w["lm_head"].T
                unary = log_softmax(unary)
            for ahead in range(deepest):
                want = log_p[root + ahead]
                loss = (np.exp(want) * (want - (log_q if unary is logits else unary)[ahead])).sum()
                if head.config.candidates:  # and among the candidates, the pairs
                    there = np.argsort(unary[ahead])[-head.config.candidates :]
                    among, scores = (log_softmax(row[there]) for row in (want, log_q[ahead]))
                    loss += (np.exp(among) * (among - scores)).sum()
                if head.config.confidence_head != "none":  # the rate of acceptance is its label
                    rate = 1 - np.abs(np.exp(want) - np.exp(log_q[ahead])).sum() / 2
                    path = text[root + 1 : root + 1 + ahead]
                    sure = exact.confidence(text[: root + 1], states, path)[-1]
                    loss -= rate * np.log(sure) + (1 - rate) * np.log(1 - sure)
                total[ahead] += loss / (2 * len(places))
    weights = 0.8 ** np.arange(deepest)
    got = jax.jit(dflash_loss)(head, target, jnp.asarray(tokens))
    np.testing.assert_allclose(got, (weights * total).sum() / weights.sum(), rtol=1e-4)


def test_the_confidence_head_learns_and_does_not_move_its_label():
    """Its part of the loss: no gradient of what only the drafts' probabilities depend on."""
    _, target, head, _, _ = parts("dflash, dspark")
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 37)
    graph, params = nnx.split(head)

    def of_confidence(params):
        plain = nnx.merge(graph, params)
        plain.config = dataclasses.replace(head.config, confidence_head="none")
        whole = dflash_loss(nnx.merge(graph, params), target, tokens)
        return whole - dflash_loss(plain, target, tokens)

    step, losses = jax.jit(jax.value_and_grad(of_confidence)), []
    for _ in range(10):
        loss, gradient = step(params)
        losses.append(float(loss))
        params = jax.tree.map(lambda value, each: value - 0.1 * each, params, gradient)
    sizes = {name: abs(leaf).max() for name, leaf in flatten(nnx.to_pure_dict(gradient)).items()}
    assert max(sizes["markov_head"], sizes["output_head"]) < 1e-6
    assert min(sizes["markov_embedding"], sizes["confidence_head.bias"]) > 1e-3
    assert losses[-1] < losses[0] - 0.04


OTHER_NAMES = dict(
    architectures=["DSparkDraftModel"],
    attention_mode="gqa",
    dflash_config=dict(markov_rank=6, projector_type="dspark", mask_token_id=3),
)


@pytest.mark.parametrize(
    ("dspark", "changes"),
    [
        (False, {}),
        (True, {}),
        (True, HIDDEN),
        (True, OTHER_NAMES),
        (True, SPECULATORS),
        (False, SECOND),
    ],
)
def test_there_and_back(dspark, changes, tmp_path):
    """The tensors are equal to the byte, and so are the configs that are read."""
    target = tiny_model("nemotron_h hybrid")
    head = st.load_dflash(saved(tmp_path / "head", dspark, **changes), target)
    (tmp_path / "back").mkdir()
    conversion.save(head, target, tmp_path / "back", num_target_layers=4)
    have, want = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("back", "head"))
    assert have == want
    assert st.load_dflash(tmp_path / "back", target).config == head.config


@pytest.mark.parametrize("anchor", [True, False])
def test_speculators_say_it_in_other_names(anchor):
    """The config is that of DeepSpec's file with the same block."""
    target = tiny_model("nemotron_h hybrid")
    same = dict(layer_types=["sliding_attention"] * 2, sliding_window=9, sample_from_anchor=anchor)
    plain, _ = files(True, num_target_layers=2, target_layer_ids=[0], is_causal=anchor, **same)
    ways = dict(sample_from_anchor=anchor, sliding_window_non_causal=not anchor)
    nested, _ = files(True, **SPECULATORS | ways)

    def read(values, target=target):
        return read_config(Fields(Path("x"), values), target, True)

    have, flat = read(nested), read(plain)
    assert have == flat
    assert (have.inner_layers, have.num_drafts) == ((2,), 7 + anchor)  # a mixer and an MLP
    refusal("the target has .'mamba2', 'att", read, nested, tiny_model("mixed hybrid"))


@pytest.mark.parametrize(
    ("values", "count"),
    [(Z_LAB, 1_924_404_480), (RED_HAT, 1_988_431_617)],
    ids=["second", "dspark"],
)
def test_published_heads_have_their_number_of_parameters(values, count):
    """All of the published files is read: others count as many in them."""
    target = nnx.merge(*st.HybridLM.abstract(st.ModelConfig.preset("Qwen3.8-27B")))
    config = read_config(Fields(Path("x"), values), target, False)
    head = nnx.eval_shape(lambda: nnx.state(DFlashHead(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(head)) == count


UNSURE = dict(enable_confidence_head=False)
IDS = {"mask_token_id": 36}
LAYER = SPECULATORS["transformer_layer_config"]
ROPE = LAYER | {"rope_parameters": {"partial_rotary_factor": 0.25}}
REFUSED = [
    (False, dict(architectures=["DFlash3DraftModel"]), {}, "no DFlash head: its architectures are"),
    (False, dict(architectures=["DFlash2DraftModel"]), {}, "conv_kernel_size is missing"),
    (False, SECOND | dict(sliding_window=5), {}, "a window of 5 is less than a block of 6"),
    (False, SECOND | dict(selector_top_k=6), {}, "selector_top_k"),
    (True, dict(architectures=["Gemma4DSparkModel"]), {}, "'Gemma4DSparkModel'. are not supported"),
    (True, dict(markov_head_type="rnn"), {}, "markov_head_type is 'rnn', not one of .'vanilla'"),
    (True, UNSURE | dict(markov_rank=0, markov_head_type="absent"), {}, "markov_head.markov_w1"),
    (True, dict(markov_rank=0, markov_head_type="absent"), {}, "must be one of .'none', 'hidden'"),
    (True, UNSURE, {}, "confidence_head.proj.bias"),
    (True, {}, {"confidence_head.proj.bias": None}, "confidence_head.proj.bias .* is missing"),
    (True, {}, {"confidence_head.proj.weight": np.zeros((1, 16), np.float32)}, "head.proj.weight"),
    (False, dict(attention_bias=True), {}, "biases in a head are not supported"),
    (False, dict(is_causal=True), {}, "is_causal = True is not supported"),
    (True, dict(sliding_window=None), {}, "sliding_window is missing"),
    (False, dict(draft_vocab_size=20), {}, "draft_vocab_size = 20, elsewhere 37"),
    (False, dict(num_target_layers=3), {}, "num_target_layers = 3 does not fit the target's 4"),
    (False, dict(dflash_config=IDS), {}, "target_layer_ids is missing"),
    (False, dict(dflash_config=IDS | {"target_layer_ids": [3]}), {}, "layers from 0 to 2, got .3."),
    (False, dict(dflash_config=IDS | {"target_layer_ids": [2, 0]}), {}, "must be ascending"),
    (True, dict(mask_token_id=37), {}, "from 0 to 36"),
    (False, dict(block_size=1), {}, "block_size must be an integer, from 2"),
    (False, dict(use_swa=True), {}, "use_swa"),
    (False, dict(vocab=40), {}, "width 16 and tokens 40, and the target"),
    (True, SPECULATORS | {"speculators_model_type": "dflash"}, {}, "type is 'dflash', not one of"),
    (True, SPECULATORS | {"sample_from_anchor": "absent"}, {}, "is missing, and readers disagree"),
    (
        True,
        SPECULATORS | {"transformer_layer_config": LAYER | {"block": 3}},
        {},
        "unknown fields .'block'.",
    ),
    (
        True,
        SPECULATORS | {"transformer_layer_config": ROPE},
        {},
        "partial_rotary_factor = 0.25, elsewhere 1",
    ),
    (False, {}, {"fc.weight": None}, "fc.weight .* is missing"),
    (False, {}, {"markov_head.markov_w1.weight": np.zeros((37, 6), np.float32)}, "markov_w1"),
]


@by_message(("dspark", "changes", "replaced", "message"), REFUSED)
def test_files_that_are_refused(dspark, changes, replaced, message, tmp_path):
    path = saved(tmp_path / "head", dspark, replaced, **changes)
    refusal(message, st.load_dflash, path, tiny_model("nemotron_h hybrid"))


def test_what_is_refused():
    target, drafter = parts("dflash").target, parts("dflash").drafter()
    refusal(
        "of depth 9 is too deep for DFlashModel, which drafts 8",
        st.generate,
        target,
        [[1]],
        max_new_tokens=2,
        drafter=drafter,
        topology=st.TreeTopology.chain(9),
    )
