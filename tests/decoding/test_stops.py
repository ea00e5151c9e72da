"""Stops: a text ends at the first that appears, and is cut right before it."""

import functools

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.results import Piece, Pieces
from stree_jax.decoding.stops import Stopping
from stree_jax.decoding.token_bytes import token_bytes
from stree_jax.testing import tiny_model
from tests.decoding.texts import of_rows
from tests.helpers import refusal, word_tokenizer
from tests.methods import KEY, PROMPTS, drafts

NEW_TOKENS = 24
SAMPLED = dict(max_new_tokens=NEW_TOKENS, temperature=1.5, key=KEY, eos_token=())


@functools.cache
def letters():
    """A tokenizer of the tiny models' 37 tokens: letters and short words of a and b, a euro sign in
    two parts, and a special token."""
    words = ["a", "b", "ab", "ba", "aab", "bba", "abab", "aba", "bab", "c"]
    words += [f"{first}{second}" for first in "cde" for second in "fghijklm"]
    pieces = [*words, "â", "Ĥ¬"]  # 0xE2, and 0x82 0xAC in byte-level BPE
    tokenizer = word_tokenizer(pieces, "c")
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.get_vocab_size() == 37
    return tokenizer


def chain():
    """A step emits up to 7 tokens, so stops lie inside of accepted paths."""
    return drafts(tiny_model(), "chain of 6", 0.02)


@functools.cache
def free():
    """Texts without stops."""
    return st.generate(tiny_model(), PROMPTS, **SAMPLED)


def searched(tokens, ids=(), texts=()):
    """A plain search, token by token: how many come before the stop, their text, and if there is
    a stop."""
    pieces = [piece or b"" for piece in pieces_of(tokens)]
    for count in range(1, len(tokens) + 1):
        data = b"".join(pieces[:count])
        starts = [data.find(stop.encode()) for stop in texts if stop.encode() in data]
        start = min(starts, default=len(data))
        kept = max(n for n in range(count + 1) if len(b"".join(pieces[:n])) <= start)
        cut = [count - len(stop) for stop in ids if tuple(tokens[:count][-len(stop) :]) == stop]
        if starts or cut:
            until = min([kept, *cut])
            data = data[:start] if until == kept else b"".join(pieces[:until])
            return until, data.decode(errors="replace"), True
    return len(tokens), b"".join(pieces).decode(errors="replace"), False


def pieces_of(tokens):
    known = token_bytes(letters())
    return [known[token] for token in tokens]


def check(ids, texts, drafting=chain):
    """Against a search; returns the result."""
    named = dict(tokenizer=letters()) if texts else {}
    ways = dict(stop=[*texts, *map(list, ids)], log_probs=True) | SAMPLED | named | drafting()
    out = st.generate(tiny_model(), PROMPTS, **ways)
    for i, row in enumerate(free().tokens.tolist()):
        count, text, found = searched(row, ids, texts)
        assert out.tokens[i, :count].tolist() == row[:count]
        assert (out.tokens[i, count:] == st.PAD).all()
        assert out.lengths[i] == count
        assert not texts or out.texts[i] == text
        assert out.finish_reasons[i] == ("stop" if found else "length")
        assert np.isfinite(out.log_probs[i, :count]).all()
        assert np.isnan(out.log_probs[i, count:]).all()
    return out


def test_stops_of_tokens():
    """Of several in the middle of a text, of one, and one that no text has."""
    rows = free().tokens.tolist()
    out = check([tuple(rows[0][6:9]), (rows[1][4],), (36, 36, 36)], [])
    assert out.finish_reasons.count("stop") >= 2
    assert out.texts is None
    assert out.stats.tau > 2


@pytest.mark.thorough
@pytest.mark.parametrize("drafting", [dict, chain])
def test_stops_of_text(drafting):
    """They begin and end inside of tokens, and span several of them."""
    rows = free().tokens.tolist()
    for chosen, text in enumerate(map(letters().decode, rows)):
        middle = len(text) // 2
        stops = [text[middle : middle + 5], "zzz", "€"]
        assert check([(rows[1][5],)], stops, drafting).finish_reasons[chosen] == "stop"
    # A stream holds back what a stop may cut.
    options = dict(stop=stops, tokenizer=letters()) | SAMPLED | drafting()
    pieces = [*st.stream(tiny_model(), PROMPTS, **options)]
    for i, row in enumerate(rows):
        assert of_rows(pieces, i) == row[: searched(row, texts=stops)[0]]


def read(stopping, tokens):
    """Runs the automaton on the host: where a stop ends."""
    machine, state = stopping.machine(37), 0
    for count, token in enumerate(tokens, 1):
        code = int(machine.next_state[state, machine.class_of[token]])
        if code < 0:
            return count
        state = code
    return None


def test_the_automaton_finds_what_a_search_finds():
    """Stops that overlap, repeat and contain each other, in random texts."""
    rng, num_found = np.random.default_rng(0), 0
    for i in range(60):
        ids = tuple(tuple(rng.integers(0, 3, rng.integers(2, 5)).tolist()) for _ in range(3))
        texts = tuple("".join(rng.choice([*"abc"], rng.integers(3, 12))) for _ in range(3))
        texts = (*texts, "€a", "fc") if i % 2 else ()
        tokens = rng.choice([0, 1, 2, 3, 4, 5, 6, 9, 10, 34, 35, 36], 40).tolist()
        stopping = Stopping(ids, texts, letters())
        kept, text, found = searched(tokens, ids, texts)
        end = read(stopping, tokens)
        assert (end is not None) == found
        if end is not None:
            num_found += 1
            assert stopping.cut(tokens[:end]) == (kept, text)
            pieces, shown = Pieces(stopping), Piece((), "")
            for token in tokens[: end - 1]:  # what is shown before the end is not cut
                piece = pieces.take([token])
                shown = Piece([*shown, *piece], shown.text + piece.text)
                assert tokens[: len(shown)] == shown
                assert len(shown) <= kept
                assert text.startswith(shown.text)
            last = pieces.last(tokens[:kept], text)
            assert [*shown, *last] == tokens[:kept]
            assert shown.text + last.text == text
    assert 20 < num_found < 60


def test_stops_that_are_too_long():
    stopping = Stopping((), ("a" * 30,), letters())
    refusal("have 30 bytes in all; with 2000000 tokens at most 15", stopping.machine, 2_000_000)
