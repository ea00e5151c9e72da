"""Counts launches in XLA's dump of a program compiled for a GPU."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stree_jax.measuring.clock import memory_of

if TYPE_CHECKING:
    from benchmarks.static.deviceless import Compiled

# Thunks that only group or wait for others.
WRAPPERS = {
    *("kSequential", "kCommandBuffer", "kWhile", "kConditional"),
    *("kAsyncStart", "kAsyncDone", "kDynamicSliceFusion"),
}


class Thunk(NamedTuple):
    """One line of the dump."""

    kind: str
    name: str  # without the number that XLA adds
    shared_memory: int  # bytes per block


class Thunks(NamedTuple):
    """The thunks of a program."""

    outside: list[Thunk]  # outside of loops
    inside: list[Thunk]  # in the bodies of loops

    @classmethod
    def parse(cls, text: str) -> "Thunks":
        """Reads the dump `*.thunk_sequence.txt`.

        A line is `006: kKernel [...] name ...`. A `kWhile` is followed by its parts: `condition:`
        at the same indentation, `body:` deeper, and the thunks of each deeper still.
        """
        outside: list[Thunk] = []
        inside: list[Thunk] = []
        loop: int | None = None  # indentation of the current loop
        in_body = False
        for line in text.splitlines():
            words = line.strip()
            indent = len(line) - len(line.lstrip())
            if loop is not None and words and indent <= loop and words != "condition:":
                loop = None
            if loop is not None and words == "body:":
                in_body = True
            found = re.match(r"\d+:\s+(k\w+)\s+\[[^\]]*\]\s*(\w*)", words)
            if found is None:
                continue
            kind, name = found.groups()
            shared = re.search(r"shared_memory: (\d+)", words)
            name = re.sub(r"_+\d+$", "", name) or kind
            thunk = Thunk(kind, name, int(shared.group(1)) if shared else 0)
            if loop is None:
                outside.append(thunk)
                if kind == "kWhile":
                    loop, in_body = indent, False
            elif in_body:
                inside.append(thunk)
        return cls(outside, inside)


def work(thunks: Sequence[Thunk]) -> list[Thunk]:
    """Thunks that put work on the device."""
    return [thunk for thunk in thunks if thunk.kind not in WRAPPERS]


def launches(thunks: Sequence[Thunk]) -> tuple[int, int]:
    """The number of kernels, library calls, copies and fills; and of copies and fills alone."""
    put = work(thunks)
    return len(put), sum(re.match(r"kCopy|kMem", thunk.kind) is not None for thunk in put)


def by_name(thunks: Sequence[Thunk]) -> Counter[str]:
    """Launches of each kernel or kind of call."""
    return Counter(thunk.name for thunk in work(thunks))


def num_loops(thunks: Sequence[Thunk]) -> int:
    """The number of loops."""
    return sum(thunk.kind == "kWhile" for thunk in thunks)


def bodies(text: str) -> Counter[str]:
    """How many loops have which body: the kinds of its thunks, but for those inside of others.

    The text is `Compiled.captured`. A body should be one `kCommandBuffer`, a graph that the device
    runs as a whole. Whatever else is there is launched by the host, one by one.
    """
    # Loops are inside of loops, whose "condition:" is not indented.
    loops = re.findall(r"^( *)body:\n(?=((?:(?:\1 .*|condition:)\n)*))", text, re.MULTILINE)
    return Counter(
        " ".join(re.findall(rf"^{indent}  \d+:\s+(k\w+)", lines, re.MULTILINE))
        for indent, lines in loops
    )


class Program(NamedTuple):
    """A program for a GPU."""

    counts: dict[str, float]  # of a step: kernels, library calls, copies and fills; the last two
    kernels: Counter[str]  # launches of a step by name
    shared_memory: int  # bytes, of the largest block
    spills: bool
    bodies: Counter[str]  # of its loops, see `bodies`
    memory: dict[str, int]  # see `memory_of`

    @classmethod
    def of(cls, compiled: "Compiled", thunks: Sequence[Thunk], steps: int = 1) -> "Program":
        """From a compiled program and the thunks of its steps."""
        put, copies = launches(thunks)
        return cls(
            {"launches": put / steps, "copies": copies / steps},
            Counter({name: count / steps for name, count in by_name(thunks).items()}),
            shared_memory=max(thunk.shared_memory for thunk in thunks),
            spills=compiled.spills,
            bodies=bodies(compiled.captured),
            memory=memory_of(compiled.program),
        )

    def as_row(self) -> dict[str, Any]:
        """A whole model's row."""
        return {
            **self.counts,
            "spills": self.spills,
            "temporary_bytes": self.memory["temporary"],
            "argument_bytes": self.memory["arguments"],
            "all_bytes": sum(self.memory.values()),
        }
