"""Requests as a server gets them: mixed ones, shared prefixes, trees of thoughts."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import stree_jax as st
from benchmarks.prompts import examples

Path = tuple[int, ...]  # (i,) is the request that arrives as the i-th, (i, j) continues its text

LIMITS = (8, 192)  # new tokens of a mixed request
SYSTEM_PROMPT = 1000  # tokens
SHOTS = 8  # examples before a question
THOUGHTS, LEVELS = 3, 2  # continuations of a text, and how often it is continued


class Workload(NamedTuple):
    """Requests by path, and those that follow when a request has ended."""

    name: str
    first: list[st.Request]
    max_length: int  # of any request
    following: Callable[[Path, Sequence[int]], Mapping[Path, st.Request]] = lambda path, text: {}
    known: Any = None  # a text that a prefix cache has read before, and the positions that it keeps


def workloads(prompts: Sequence[list[int]], encode: Callable[[str], list[int]]) -> list[Workload]:
    """All workloads, of as many requests as prompts; trees are fewer."""
    shots = encode("".join(examples(SHOTS)))
    repeated = itertools.cycle(encode("".join(examples(2 * SHOTS)[SHOTS:])))
    system = [*itertools.islice(repeated, SYSTEM_PROMPT)]
    turns = [*itertools.accumulate([system, *prompts[:8]])]  # texts up to the end of each
    few = prompts[: -(-len(prompts) // 8)]
    return [
        Workload("mixed requests", _mixed(prompts), _longest(prompts, LIMITS[1])),
        _shared(f"a system prompt of {SYSTEM_PROMPT:,} tokens", [system], prompts, 32),
        _shared(f"{SHOTS} examples of GSM8K", [shots], prompts, 64),
        _thoughts(few, shots),
        _shared("branches of a chat", turns, prompts, 24, []),
        _shared("branches of a chat, turns kept", turns, prompts, 24, [*map(len, turns)]),
    ]


def _longest(prompts: Sequence[list[int]], more: int) -> int:
    return max(map(len, prompts)) + more


def _request(prompt: list[int], new: int, *, keep: bool = False) -> st.Request:
    return st.Request(prompt, max_new_tokens=new, eos_token=(), keep=keep)


def _mixed(prompts: Sequence[list[int]]) -> list[st.Request]:
    """Prompts cut to random lengths of 8 to 64; limits are geometric, as lengths of answers are."""
    rng, (low, high) = np.random.default_rng(0), LIMITS
    lengths = rng.integers(8, 64, len(prompts), endpoint=True)
    limits = np.clip(rng.geometric(3 / high, len(prompts)), low, high)
    return [
        _request(prompt[:length], int(limit))
        for prompt, length, limit in zip(prompts, lengths, limits, strict=True)
    ]


def _shared(
    name: str, stems: list[list[int]], prompts: Sequence[list[int]], new: int, keep: Any = None
) -> Workload:
    """Prompts after one text, or in turn after the turns of a chat that was read before."""
    pairs = zip(itertools.cycle(stems), prompts, strict=False)
    first = [_request([*stem, *prompt], new) for stem, prompt in pairs]
    known = None if keep is None else (stems[-1], keep)
    return Workload(name, first, len(stems[-1]) + _longest(prompts, new), known=known)


def _thoughts(prompts: Sequence[list[int]], shots: list[int]) -> Workload:
    """Every thought is a request with the whole text before it, and ends the text by its number."""
    new = 24
    first = [_request([*shots, *prompt], new, keep=True) for prompt in prompts]

    def following(path: Path, text: Sequence[int]) -> Mapping[Path, st.Request]:
        if len(path) > LEVELS:
            return {}
        return {(*path, i): _request([*text, i], new, keep=True) for i in range(THOUGHTS)}

    longest = len(shots) + _longest(prompts, (LEVELS + 1) * (new + 1))
    name = f"trees of {THOUGHTS} x {THOUGHTS} thoughts after {SHOTS} examples"
    return Workload(name, first, longest, following)
