"""Automata: compressed tables against the table that they were made of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.extensions.grammar.api import automaton_of_pattern
from stree_jax.extensions.grammar.token_tree import TokenTree
from stree_jax.measuring.clock import num_bytes
from tests.helpers import by_message, refusal


def table(num_states, vocab_size, seed=0):
    """`[S, V]`: most tokens of a state lead to one other, some elsewhere, some are not allowed."""
    rng = np.random.default_rng(seed)
    size = num_states, vocab_size
    usual = np.broadcast_to(rng.integers(0, num_states, (num_states, 1)), size)
    next_state = np.where(rng.random(size) < 0.7, usual, rng.integers(0, num_states, size))
    next_state = np.where(rng.random(size) < 0.6, next_state, -1)
    next_state[0, 0] = 0
    return next_state


def check(automaton, next_state, shift=0, seed=0):
    """Masks and next states of random states and tokens, those after a forbidden token included."""
    rng = np.random.default_rng(seed)
    num_states, vocab_size = next_state.shape
    states = rng.integers(-1, num_states, (3, 40))
    tokens = rng.integers(0, vocab_size, (3, 40))
    in_table = np.where(states < 0, -1, states + shift)
    logits = rng.normal(size=(3, 40, vocab_size + 3)).astype(np.float32)

    @jax.jit
    def both(automaton, logits, states, tokens):
        return automaton.advance(states, tokens), automaton(logits, states)

    after, masked = both(automaton, logits, jnp.asarray(in_table), jnp.asarray(tokens))
    wanted = np.where(states < 0, -1, next_state[states, tokens])
    assert_array_equal(after, np.where(wanted < 0, -1, wanted + shift))
    allowed = (states >= 0)[..., None] & (next_state[states] >= 0)
    allowed = np.pad(allowed, ((0, 0), (0, 0), (0, 3)))  # more tokens in the model: not allowed
    assert_array_equal(masked, np.where(allowed, logits, -np.inf))


@pytest.mark.parametrize(("num_states", "vocab_size"), [(1, 1), (30, 70), (5, 64), (70, 33)])
def test_tables(num_states, vocab_size):
    next_state = table(num_states, vocab_size)
    automaton = st.Automaton(next_state)
    check(automaton, next_state)
    sizes = dict(num_states=num_states, vocab_size=vocab_size)
    states, tokens = np.random.default_rng(1).permutation(np.argwhere(next_state >= 0)).T
    same = st.Automaton.from_edges(states, tokens, next_state[states, tokens], **sizes)
    jax.tree.map(assert_array_equal, *map(jax.tree.leaves, (automaton, same)))


def test_similar_states_are_stored_once():
    """A text of up to 1,000 tokens, any of 3,000: all states but the last allow the same."""
    states = np.arange(1000)
    next_state = np.broadcast_to(np.append(states[1:], -1)[:, None], (1000, 3000))
    automaton = st.Automaton(next_state)
    assert len(np.unique(automaton.next_state.kind)) == 2
    assert num_bytes(automaton.next_state) < 100_000
    check(automaton, next_state)


def test_joined_automata():
    """Each has the transitions that it had alone; all have the same arrays."""
    tables = [table(6, 40), table(9, 40, seed=1), table(30, 40, seed=2)]
    joined = st.Automaton.joined([st.Automaton(one) for one in tables])
    for one, next_state in zip(joined, tables, strict=True):
        check(one, next_state, shift=one.start)
        for leaf, first in zip(
            jax.tree.leaves(one.next_state), jax.tree.leaves(joined[0].next_state), strict=True
        ):
            assert leaf is first


TWO = dict(num_states=2, vocab_size=2)
MANY = TWO | {"num_states": 2**31}
# A function, its arguments and options, and what the message says.
REFUSALS = [
    (st.Automaton, [5], {}, "next_state must be integers [S, V], got 5"),
    (st.Automaton, [[[0], [0, 1]]], {}, "next_state must be integers [S, V]"),
    (st.Automaton, [[[0.5]]], {}, "next_state must be an array of integers"),
    (st.Automaton, [[[0, 1]]], {}, "next_state has 1, outside -1 to 0"),
    (st.Automaton, [[[-1]]], {}, "start = 0 is no state that allows a token"),
    (st.Automaton, [[[0]], -1], {}, "start must be an integer, at least 0; got -1"),
    (st.Automaton([[1, 0], [-1, 1]]).check, [1], {}, "has 2 tokens, and the model 1: in some"),
    (st.Automaton.from_edges, [[[0], []], [0], [0]], TWO, "states must be an array of integers"),
    (st.Automaton.from_edges, [[0], [0], [0]], MANY, "from 1 to 16777216; got 2147483648"),
    (st.Automaton.from_edges, [[0, 0], [1, 1], [0, 1]], TWO, "0 has two transitions with token 1"),
    (st.Automaton.from_edges, [[0], [1, 1], [0]], TWO, "must be arrays of one length"),
    (st.Automaton.from_edges, [[0], [2], [0]], TWO, "tokens has 2, outside 0 to 1"),
    (st.Automaton.joined, [[5]], {}, "automata must be a list of Automaton, got 5 in it"),
    (st.Automaton.joined, [[st.Automaton([[0]]), st.Automaton([[0, 0]])]], {}, "different vocab"),
]


@by_message(("make", "arguments", "options", "message"), REFUSALS)
def test_refusals(make, arguments, options, message):
    refusal(re.escape(message), make, *arguments, **options)


@jax.jit
def walk(tables, states, tokens):
    return tables.after(states, tokens), tables.mask(states, tables.vocab_size)


def texts_of_tokens(automaton, texts):
    """All texts of up to 5 bytes, with every way to spell them; token 0 ends one, and no way may
    lead nowhere."""
    tables, tokens = automaton.next_state, np.arange(len(texts))
    found, waiting = [], [(automaton.start, ())]
    for state, path in waiting:
        states = jnp.full((1, len(texts)), state)
        after, allowed = walk(tables, states, jnp.asarray(tokens[None]))
        after, allowed = np.asarray(after)[0], np.asarray(allowed)[0, 0]
        assert_array_equal(allowed, after >= 0)
        assert allowed.any()
        for token in np.flatnonzero(allowed):
            if token == 0:
                found.append(path)
            elif len(b"".join(texts[each] for each in (*path, token))) <= 5:
                waiting.append((after[token], (*path, int(token))))
    return found


# The texts, and tokens that spell them: all bytes are tokens, or some are in longer ones only.
SPELLINGS = {
    "a loop": ("(ab)*c?", [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"x", b"", b"ab"]),
    "counts": ("[ab]{1,4}c", [b"a", b"b", b"c", b"ab", b"aab", b"bc", b"aaaaa", b"abac"]),
    "counts from 2 on": ("[ab]{2,}", [b"a", b"b", b"ba", b"bbb"]),
    "counts in a row": ("[ab]{0,2}c[ab]{1,3}", [b"a", b"b", b"c", b"ac", b"bca", b"abcab", b"cc"]),
    "counts that overlap": ("[ab]{0,3}b", [b"a", b"b", b"ab", b"bb", b"abab"]),
    "characters of two bytes": ("é{1,2}[ê-î]?", [b"\xc3", b"\xa9", b"\xaa", "éé".encode()]),
    "two bytes together": ("(ab)*c?", [b"a", b"c", b"ab", b"bab"]),
    "counts by twos": ("[ab]{1,4}c", [b"aa", b"b", b"c", b"ac"]),
}


def leads(of_bytes, text):
    """Whether some text begins so."""
    state = 0
    for byte in text:
        state = int(of_bytes.table[state, of_bytes.class_of[byte]])
        if state < 0:
            return False
    return True


@pytest.mark.parametrize("name", SPELLINGS)
def test_tokens_spell_the_texts(name):
    """All spellings of all texts, each once, and no token leads nowhere."""
    pattern, words = SPELLINGS[name]
    of_bytes, texts = automaton_of_pattern(pattern), [None, *words]
    found = texts_of_tokens(TokenTree(texts, [0]).automaton(of_bytes), texts)
    assert len(found) == len(set(found))
    wanted = set()
    waiting = [((), b"")]
    for path, text in waiting:
        if of_bytes.matches(text):
            wanted.add(path)
        for token, word in enumerate(texts):
            if word and len(text + word) <= 5 and leads(of_bytes, text + word):
                waiting.append(((*path, token), text + word))
        assert len(waiting) < 200_000
    assert set(found) == wanted


def test_after_the_end_come_ends_only():
    nothing = TokenTree([None, b"a", b"ba"], [0]).automaton(automaton_of_pattern("ab"))
    assert nothing is None  # no text that tokens spell
    of_bytes = automaton_of_pattern("a*")
    automaton = TokenTree([b"a", None, None], [1, 2]).automaton(of_bytes)
    states = jnp.array([[automaton.start]])
    assert automaton.next_state.mask(states, 3).tolist() == [[[True, True, True]]]
    ended = automaton.advance(states, jnp.array([[2]]))
    assert automaton.next_state.mask(ended, 3).tolist() == [[[False, True, True]]]
    assert automaton.advance(ended, jnp.array([[1]])) == ended
    assert automaton.end_tokens == (1, 2)


def test_grammars_with_counts_are_joined():
    """States of strings move, and so do codes that are states themselves."""
    texts = [None, b"a", b"b", b"c", b"ab", b"aab", b"bc"]
    tree = TokenTree(texts, [0])
    alone = [tree.automaton(automaton_of_pattern(p)) for p in ("[ab]{0,3}c", "b*c", "[ab]{2}c?")]
    for one, joined in zip(alone, st.Automaton.joined(alone), strict=True):
        assert texts_of_tokens(joined, texts) == texts_of_tokens(one, texts)


def test_lists_and_states_that_allow_nothing():
    next_state = [[1, -1, 0], [-1, -1, -1], [2, 2, 2]]
    check(st.Automaton(next_state, start=2), np.array(next_state))
