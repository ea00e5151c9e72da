"""Counts in the text of a program that is compiled for a TPU, and what must not be in it."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from stree_jax.measuring.clock import memory_of

# Instructions that name, group or wait for what others compute.
_NAMES = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota"),
    *("while", "conditional", "call", "opt-barrier", "partition-id", "add-dependency"),
}
_BUFFER = r'custom_call_target="(AllocateBuffer|ConcatBitcast)"'  # of prefetched slices
_TO_HOST = {"infeed", "outfeed", "send", "recv"}
_LONGEST_SORT = 4096  # numbers; vocabularies have more
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w-]*)\("
)


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    type: str  # with layout; of several results in parentheses
    opcode: str
    line: str

    @property
    def shapes(self) -> list[list[int]]:
        """Of its results."""
        found = re.findall(r"\[([\d,]*)\]", self.type)
        return [[int(size) for size in each.split(",") if size] for each in found]

    @property
    def numbers(self) -> int:
        """Of its largest result."""
        return max(map(math.prod, self.shapes), default=0)

    @property
    def cycles(self) -> int:
        """XLA's estimate; 0 where it has none, as for gathers and sorts."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else 0

    @property
    def sorted(self) -> int:
        """Numbers that are sorted together, where it sorts."""
        (axis,) = re.findall(r"dimensions=\{(\d+)\}", self.line)
        return self.shapes[0][int(axis)]

    def called(self) -> list[str]:
        """Computations that it runs, but for those of fusions."""
        if self.opcode not in ("while", "conditional", "call"):
            return []
        named = re.findall(r"(?:body|condition|to_apply|\w+_computation)=%?([\w.-]+)", self.line)
        several = re.findall(r"branch_computations=\{([^}]*)\}", self.line)
        return [*named, *re.findall(r"[\w.-]+", " ".join(several))]


class Text:
    """The text of a compiled program, by computation."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                own = self.computations.setdefault(found["name"], [])
                self.entry = found["name"] if found["entry"] else ""
            elif found := _INSTRUCTION.match(line):
                own.append(Instruction(found["name"], found["type"], found["opcode"], line))

    def run(self, computation: str) -> Iterator[Instruction]:
        """Yields what a computation runs, with the bodies of loops in it, once each."""
        for each in self.computations[computation]:
            is_name = each.opcode in _NAMES or re.search(_BUFFER, each.line)
            if not is_name and not each.opcode.endswith("-done"):
                yield each
            for name in each.called():
                yield from self.run(name)

    def body(self) -> str:
        """The body of the program's loop."""
        (loop,) = (each for each in self.computations[self.entry] if each.opcode == "while")
        return re.search(r"body=%?([\w.-]+)", loop.line)[1]  # type: ignore[index]


class Program(NamedTuple):
    """A program for a TPU."""

    counts: dict[str, float]  # of a step: operations; those that copy; XLA's estimate of cycles
    kernels: Counter[str]  # operations by kind; "copy-start" and "slice-start" are prefetches
    memory: dict[str, int]  # see `memory_of`
    bytes: float  # that XLA counts, over those of all arguments
    problems: list[str]

    @classmethod
    def of(cls, compiled: Any, weights: Collection[int], *, in_loop: bool = False) -> "Program":
        """From a compiled program, or the body of its loop, and numbers of its large weights."""
        text = Text(compiled.as_text())
        operations = [*text.run(text.body() if in_loop else text.entry)]
        kinds = Counter(each.opcode for each in operations)
        memory = memory_of(compiled)
        return cls(
            counts={
                "operations": len(operations),
                "copies": kinds["copy"],
                "cycles": sum(each.cycles for each in operations),
            },
            kernels=kinds,
            memory=memory,
            bytes=compiled.cost_analysis()["bytes accessed"] / memory["arguments"],
            problems=problems(text, weights),
        )


def problems(text: Text, weights: Collection[int]) -> list[str]:
    """Returns transfers to the host, long sorts, and other copies of weights.

    `weights` are the sizes of those that must be multiplied as they are.
    """
    found = []
    for each in text.run(text.entry):
        if each.opcode in _TO_HOST:
            found.append(f"{each.name}: a transfer to the host")
        elif each.opcode == "sort" and each.sorted > _LONGEST_SORT:
            found.append(f"{each.name} sorts {each.sorted} numbers")
        elif each.numbers in weights and not each.opcode.endswith("-start"):  # a prefetch
            found.append(f"{each.name} writes {each.type}, as large as a weight")
    for computation in text.computations.values():
        types = {each.name: each.type for each in computation}
        for each in computation:
            if each.opcode in ("convolution", "dot"):
                operands = re.findall(r"%([\w.-]+)", each.line.split(f" {each.opcode}(")[1])[:2]
                for name in operands:
                    size = Instruction(name, types[name], "", "").numbers
                    if types[name].startswith("f32") and size in weights:
                        found.append(f"{each.name} multiplies {types[name]}, a weight in float32")
    return found
