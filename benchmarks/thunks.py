"""XLA's own account of what a compiled program puts on a GPU."""

import re
from collections import Counter
from typing import NamedTuple

# Thunks that only group others.
WRAPPERS = {"kSequential", "kCommandBuffer", "kWhile", "kConditional"}


class Thunks(NamedTuple):
    """How many thunks of each kind a program has."""

    outside: Counter[str]  # of any loop
    inside: Counter[str]  # the body of a loop

    @classmethod
    def parse(cls, text: str) -> "Thunks":
        """Reads the dump `*.thunk_sequence.txt`.

        A line is `006: kKernel [...] name ...`. What belongs to a `kWhile` follows it: `condition:`
        at its own indentation, `body:` deeper, and below each its thunks, deeper still.
        """
        outside: Counter[str] = Counter()
        inside: Counter[str] = Counter()
        loop: int | None = None  # indentation of the loop that lines belong to
        in_body = False
        for line in text.splitlines():
            words = line.strip()
            indent = len(line) - len(line.lstrip())
            if loop is not None and words and indent <= loop and words != "condition:":
                loop = None
            if loop is not None and words == "body:":
                in_body = True
            thunk = re.match(r"\d+:\s+(k\w+)", words)
            if thunk is None:
                continue
            kind = thunk.group(1)
            if loop is None:
                outside[kind] += 1
                if kind == "kWhile":
                    loop, in_body = indent, False
            elif in_body:
                inside[kind] += 1
        return cls(outside, inside)


def launches(kinds: Counter[str]) -> tuple[int, int]:
    """Kernels, library calls, copies and fills; and the copies and fills among them."""
    work = {kind: count for kind, count in kinds.items() if kind not in WRAPPERS}
    moves = sum(count for kind, count in work.items() if re.match(r"kCopy|kMem", kind))
    return sum(work.values()), moves
