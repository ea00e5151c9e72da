"""From a regular expression to an automaton over bytes, by outlines-core.

outlines-core makes automata over tokens as well. Version 0.2.14 loses texts that continue after a
match (`(ab)+` is "ab" only, and `a|ab` is "a"), and a dictionary of all transitions of a large
vocabulary is slow. So its tokens are bytes here, and `TokenTree` does the rest.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from stree_jax.checkpoint import first_line
from stree_jax.decoding.grammar.token_tree import ByteAutomaton
from stree_jax.messages import shown

# Follows the pattern, so that no match ends before the text does. No text has this character.
_END = "\U0010ffff"
_END_LETTER, _UNUSED = 256, 257  # letters beside the bytes
_MOST_REPEATS = 10_000  # outlines-core takes all memory for a{1000000}


def byte_automaton(pattern: str) -> ByteAutomaton:
    """The automaton over bytes of the texts that a pattern matches as a whole.

    Raises:
        ValueError: a bad pattern, one that matches nothing, or outlines-core is not installed.
    """
    outlines_core = import_outlines_core()
    most = max((int(count) for count in re.findall(r"[{,](\d+)\}", pattern)), default=0)
    if most > _MOST_REPEATS:
        raise ValueError(
            f"pattern {shown(pattern)} repeats a part {shown(most)} times; at most {_MOST_REPEATS}"
            " are possible"
        )
    whole = without_anchors(pattern)
    if re.search(r"[$^]", re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]", "", whole)):
        raise ValueError(
            f"pattern {shown(pattern)} has anchors inside; it matches whole texts, so write it"
            " without ^ and $"
        )
    letters = {bytes([byte]): [byte] for byte in range(256)}
    vocabulary = outlines_core.Vocabulary(_UNUSED, letters | {_END.encode(): [_END_LETTER]})
    try:
        index = outlines_core.Index(f"(?:{whole}){_END}", vocabulary)
    except ValueError as error:
        raise ValueError(_refusal(pattern, first_line(error))) from None
    # After some states the pattern itself matches `_END`: that is no end of the text.
    finals = index.get_final_states()
    transitions = index.get_transitions()
    accepting = {state for state, after in transitions.items() if after.get(_END_LETTER) in finals}
    return _numbered(index.get_initial_state(), transitions, accepting)


def import_outlines_core() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import outlines_core
    except ImportError:
        raise ValueError("grammars need outlines-core: pip install 'stree-jax[grammar]'") from None
    return outlines_core


def without_anchors(pattern: str) -> str:
    """The pattern without a ^ at its start and a $ at its end: it matches whole texts anyway."""
    pattern = pattern.removeprefix("^")
    return pattern[:-1] if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) else pattern


def _refusal(pattern: str, error: str) -> str:
    try:
        re.compile(pattern)
        why = "look-around, references and word boundaries are not supported"
    except re.error as wrong:
        why = str(wrong)
    return f"pattern {shown(pattern)} cannot be used: {why} (outlines-core: {error:.80})"


def _numbered(
    start: int, transitions: Mapping[int, Mapping[int, int]], accepting: set[int]
) -> ByteAutomaton:
    """Numbers the states level by level, and leaves out those that lead to no end."""
    before: dict[int, list[int]] = {}
    for state, following in transitions.items():
        for letter, after in following.items():
            if letter < _END_LETTER:
                before.setdefault(after, []).append(state)
    useful, waiting = {*accepting}, [*accepting]
    while waiting:
        new = {state for state in before.get(waiting.pop(), ()) if state not in useful}
        useful |= new
        waiting += new
    numbers = {start: 0}
    for state in (order := [start]):
        for letter, after in sorted(transitions.get(state, {}).items()):
            if letter < _END_LETTER and after in useful and after not in numbers:
                numbers[after] = len(order)
                order.append(after)
    next_state = np.full((len(order), 256), -1, np.int32)
    accepts = np.array([state in accepting for state in order])
    for number, state in enumerate(order):
        for letter, after in transitions.get(state, {}).items():
            if letter < _END_LETTER and after in numbers:
                next_state[number, letter] = numbers[after]
    return ByteAutomaton(next_state, accepts)
