"""Threads that share a model, and Ctrl-C in the middle of a stream."""

import concurrent.futures
import signal
import threading

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.testing import tiny_model
from tests.decoding.texts import of_rows
from tests.methods import PROMPTS, SAMPLED, drafts

pytestmark = pytest.mark.thorough


def ways():
    """Two ways to decode with one model and one drafter."""
    common = dict(max_new_tokens=24, **drafts(tiny_model()))
    return common, common | SAMPLED


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
            np.testing.assert_array_equal(tokens, want)


@pytest.fixture
def _ctrl_c_raises():
    """As in a program; a test's process may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    np.testing.assert_array_equal(st.generate(model, PROMPTS, **way).tokens, want)
