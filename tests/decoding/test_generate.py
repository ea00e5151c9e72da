import concurrent.futures
import dataclasses
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import plan
from stree_jax.decoding.step import NO_ROOM, TARGET_FAILED
from stree_jax.mesh.hosts import on_host
from stree_jax.testing import random_model, tiny_model
from tests.decoding.texts import broken_at, ended, of_rows
from tests.helpers import rows, with_weight
from tests.methods import KEY, PROMPTS, SAMPLED, TREE, drafts

thorough = pytest.mark.thorough


def test_statistics_add_up():
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=17, **drafts(tiny_model()))
    stats = out.stats
    assert stats.num_tokens == out.lengths.sum()
    assert stats.tau == stats.num_tokens / stats.num_target_calls
    assert stats.num_target_calls == stats.target_calls_per_row.sum()
    assert stats.num_drafted == stats.num_target_calls * (TREE.num_nodes - 1)
    assert stats.accepted_per_depth.sum() == stats.num_accepted
    assert stats.accepted_per_depth[0] >= stats.accepted_per_depth[1]
    reached = [stats.num_target_calls, *stats.accepted_per_depth[:-1]]
    assert stats.reached_per_depth.tolist() == reached
    lengths = out.lengths.tolist()
    said = f"<Generation: tokens (3, 17), lengths {lengths}, tau {stats.tau:.2f}>"
    assert repr(dataclasses.replace(out, cache=("all of it",))) == said
    # A call emits its accepted drafts and one more token, unless the limit cuts that one.
    missing = stats.num_accepted + stats.num_target_calls - stats.num_tokens
    assert 0 <= missing <= len(PROMPTS)
    assert_allclose(stats.tau_per_row, out.lengths / stats.target_calls_per_row)


@thorough
def test_five_steps_per_sync_change_nothing():
    """Rows end between two termination checks, one of them at an end of sequence."""
    model, options = tiny_model(), dict(max_new_tokens=17, **drafts(tiny_model()))
    end = int(st.generate(model, PROMPTS, max_new_tokens=17).tokens[0, 4])
    want = st.generate(model, PROMPTS, return_cache=True, eos_token=end, **options)
    request = plan(model, PROMPTS, eos_token=end, **options)
    decoder = dataclasses.replace(request.decoder, steps_per_sync=5)
    state = ended(model, request, decoder)
    assert_array_equal(state.emitted, want.lengths)
    for row, prompt, tokens in zip(state.context.tokens, PROMPTS, want.tokens, strict=True):
        kept = tokens[tokens >= 0]
        assert_array_equal(row[len(prompt) : len(prompt) + len(kept)], kept)
    assert_array_equal(state.statistics.target_calls, want.stats.target_calls_per_row)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.cache, want.cache)


@thorough
def test_padded_vocabulary_is_never_emitted():
    """Not if its rows are large, and it means nothing if they are NaN."""
    model = tiny_model("groups")  # 37 tokens, 40 rows
    large = with_weight(model, "head", lambda head: head.at[37:].set(100.0 * head[0]))
    damaged = with_weight(model, "head", lambda head: head.at[37:].set(np.nan))
    for drafting in (False, True):
        texts = []
        for target in (large, model, damaged):
            options = dict(max_new_tokens=30)
            if drafting:
                options |= dict(temperature=5.0, key=KEY, topology=TREE)
                options |= dict(drafter=st.ModelDrafter(target))
            texts.append(st.generate(target, PROMPTS, **options).tokens)
        assert texts[0].max() < 37
        assert_array_equal(texts[2], texts[1])


@thorough
def test_what_changes_nothing():
    """A large top-k; a verifier without drafts; a drafter whose tree is the root alone."""
    common = dict(max_new_tokens=6, **SAMPLED)
    want = st.generate(tiny_model(), PROMPTS, **common)
    root = drafts(tiny_model()) | dict(topology=st.TreeTopology.chain(0))
    for options in (
        dict(top_k=2**40),
        dict(verifier="multi_step"),
        *(root | dict(verifier=rule) for rule in (None, "multi_step", "traversal", "target_only")),
    ):
        out = st.generate(tiny_model(), PROMPTS, **common, **options)
        assert_array_equal(out.tokens, want.tokens)


FAILING = [[1, 2], [3, 35], [4]]  # the second row reads what is not finite


@pytest.mark.parametrize("drafter", [None, pytest.param(st.NgramDrafter(), marks=thorough)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_fails_ends_alone(value, drafter):
    model, options = broken_at(35, value), dict(max_new_tokens=7, drafter=drafter)
    fine = st.generate(model, [FAILING[0], FAILING[2]], **options).tokens
    message = "the target model's logits .* in row 1, after 0 new tokens"
    with pytest.raises(st.NonFiniteLogitsError, match=message) as caught:
        st.generate(model, FAILING, **options)
    assert isinstance(caught.value, FloatingPointError)
    assert caught.value.rows == [1]
    generation = caught.value.generation
    assert_array_equal(generation.tokens[[0, 2]], fine)
    assert (generation.tokens[1] == st.PAD).all()
    # A stream yields the other rows to their end, then raises.
    pieces = []
    with pytest.raises(st.NonFiniteLogitsError, match=message):
        pieces.extend(st.stream(model, FAILING, **options))
    assert [of_rows(pieces, row) for row in range(3)] == [fine[0].tolist(), [], fine[1].tolist()]


@thorough
def test_a_row_that_does_not_fit_its_buffer_fails():
    """With the right tokens up to its end; before, later ones were written over them."""
    model, prompts, new = tiny_model(), [[1], [2, 3, 4], [5] * 8, [6] * 9], [7, 6, 1, 1]
    drafts = dict(drafter=st.ModelDrafter(model), topology=TREE)
    request = plan(model, prompts, rows(max_new_tokens=new), **drafts)
    arguments = model, request.drafter
    prompts = st.Context(request.context.tokens[:, :9], request.context.length)

    def texts(max_length):
        decoder = dataclasses.replace(request.decoder, max_length=max_length)
        state = decoder.start(*arguments, prompts, request.keys)
        return decoder.run(*arguments, state, request.limits, request.sampling)

    fine, short = texts(64), texts(8)
    assert fine.failed.tolist() == [0, 0, 0, 0]
    assert short.failed.tolist() == [0, NO_ROOM, NO_ROOM, NO_ROOM]
    assert short.emitted.tolist() == [7, 5, 0, 0]
    same = short.context.tokens[:2, :8], fine.context.tokens[:2, :8]
    assert_array_equal(*same)


@thorough
@pytest.mark.parametrize(
    ("drafting", "temperature"),
    [(None, 0.0), (st.ModelDrafter, 1.0), (st.BeamDrafter, 0.0), (st.DynamicDrafter, 1.0)],
)
def test_one_logit_that_is_nan_ends_the_row(drafting, temperature):
    """One damaged row of the head: every other logit, and so the best one, is a number."""
    # So many tokens that XLA vectorizes the maximum, which then ignores NaN.
    config = st.ModelConfig.tiny(num_layers=1, vocab_size=4096, tie_embeddings=False)
    model = random_model(config)
    damaged = with_weight(model, "head", lambda head: head.at[1700, 3].set(jnp.nan))
    options = dict(max_new_tokens=4, temperature=temperature, key=KEY)
    if drafting is not None:
        options |= dict(topology=TREE)
        with pytest.raises(FloatingPointError, match="the draft model's logits .* in row 0"):
            st.generate(model, PROMPTS, drafter=drafting(damaged), **options)
        options |= dict(drafter=drafting(model))
    with pytest.raises(st.NonFiniteLogitsError, match="the target model's logits") as error:
        st.generate(damaged, PROMPTS, **options)
    assert error.value.rows == [0, 1, 2]
    assert error.value.generation.lengths.tolist() == [0, 0, 0]


def test_a_cold_temperature_takes_the_best_token():
    want = st.generate(tiny_model(), PROMPTS, max_new_tokens=6)
    for options in ({}, drafts(tiny_model())):
        cold = dict(max_new_tokens=6, temperature=1e-37, key=KEY)
        out = st.generate(tiny_model(), PROMPTS, **cold, **options)
        assert_array_equal(out.tokens, want.tokens)


@thorough
def test_a_draft_model_that_is_not_finite_names_the_row():
    draft = st.ModelDrafter(broken_at(4))
    with pytest.raises(FloatingPointError, match="the draft model's logits .* in row 2"):
        st.generate(tiny_model("groups"), [[1, 2], [3], [4]], max_new_tokens=1, drafter=draft)


@thorough
def test_a_failure_in_the_first_of_two_steps_is_reported():
    request = plan(broken_at(35), FAILING, max_new_tokens=4)
    decoder = dataclasses.replace(request.decoder, steps_per_sync=2)
    state = ended(broken_at(35), request, decoder)
    assert state.failed.tolist() == [0, TARGET_FAILED, 0]
    assert state.emitted[1] == 0


def test_streaming_yields_what_generate_returns_and_copies_no_more(monkeypatch):
    copied = []

    def recorded(tree, *rows):
        arrays = on_host(tree, *rows)
        copied.append(sum(np.size(leaf) for leaf in jax.tree.leaves(arrays)))
        return arrays

    options = dict(max_new_tokens=13, **drafts(tiny_model()))
    want = st.generate(tiny_model(), PROMPTS, **options)
    monkeypatch.setattr("stree_jax.decoding.generate.on_host", recorded)
    pieces = [*st.stream(tiny_model(), PROMPTS, **options)]
    assert [of_rows(pieces, row) for row in range(3)] == want.tokens.tolist()
    assert len(pieces) == want.stats.target_calls_per_row.max()
    assert max(copied) == 3 * (TREE.depth + 1) + 3  # tokens and lengths, not the buffers of 64


def ways():
    """Two ways to decode with one model and one drafter."""
    common = dict(max_new_tokens=24, **drafts(tiny_model()))
    return common, common | SAMPLED


@thorough
def test_two_threads_with_one_model_give_the_right_tokens():
    """They compile at the same time, and then run in turn with a stream of the other one."""
    model, together = tiny_model(), threading.Barrier(2)

    def decode(way):
        together.wait(timeout=600)
        texts = [st.generate(model, PROMPTS, **way).tokens for _ in range(3)]
        together.wait(timeout=600)
        pieces = [*st.stream(model, PROMPTS, **way)]
        return [*texts, np.array([of_rows(pieces, row) for row in range(3)])]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [*pool.map(decode, ways())]
    for way, texts in zip(ways(), found, strict=True):
        want = st.generate(model, PROMPTS, **way | dict(drafter=None, topology=None)).tokens
        for tokens in texts:
            assert_array_equal(tokens, want)


@thorough
@pytest.mark.usefixtures("_ctrl_c_raises")
@pytest.mark.parametrize("when", ["before a step", "after a step", "between pieces"])
def test_ctrl_c_in_a_stream_and_again(when, monkeypatch):
    """The interrupted stream is lost, and nothing else: after a step its state is donated."""
    model, way = tiny_model(), ways()[1]
    want = st.generate(model, PROMPTS, **way).tokens
    step, calls = SpeculativeDecoder.step, []

    def interrupted(*arguments):
        calls.append(1)
        if when == "before a step" and len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        result = step(*arguments)
        if when == "after a step" and len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(SpeculativeDecoder, "step", interrupted)
    seen = []

    def read():
        for piece in st.stream(model, PROMPTS, **way):
            seen.append(piece)
            if when == "between pieces" and len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        read()
    assert len(seen) == 2
    again = [*st.stream(model, PROMPTS, **way)]
    assert [of_rows(again, row) for row in range(3)] == want.tolist()
    assert_array_equal(st.generate(model, PROMPTS, **way).tokens, want)
