"""A simulator of Blocksworld: parses states and actions in English, and applies actions.

The domain with four actions of PlanBench (Valmeekam et al., 2023, arXiv:2206.10498).
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ON = re.compile(r"the (\w+) block is on top of the (\w+) block")
_ON_TABLE = re.compile(r"the (\w+) block is on the table")
_HOLDING = re.compile(r"holding the (\w+) block")
_ACTIONS = (
    "pick up the {} block",
    "put down the {} block",
    "stack the {} block on top of the {} block",
    "unstack the {} block from on top of the {} block",
)


class World(NamedTuple):
    """A state of the blocks.

    Attributes:
        below: for each block except the held one, the block that it stands on; None: the table.
        held: the block in the hand.
    """

    below: dict[str, str | None]
    held: str | None = None

    @classmethod
    def read(cls, text: str) -> "World":
        """Parses sentences such as "the red block is on top of the blue block"; ignores others.

        Raises:
            ValueError: no blocks, or a block in two places.
        """
        held = _HOLDING.findall(text)
        places: list[tuple[str, str | None]] = [*_ON.findall(text)]
        places += [(block, None) for block in _ON_TABLE.findall(text)]
        blocks = [*held, *(block for block, _ in places)]
        if not blocks or len({*blocks}) < len(blocks) or len(held) > 1:
            raise ValueError(f"not a state of blocks: {text!r}")
        return cls(dict(places), held[0] if held else None)

    def is_clear(self, block: str) -> bool:
        """Whether a block is not held and nothing is on top of it."""
        return block in self.below and block not in self.below.values()

    def after(self, action: str) -> "World | None":
        """The world after an action in English; None if the action is unknown or impossible."""
        text = action.strip().rstrip(".").lower()
        for kind, sentence in enumerate(_ACTIONS):
            if match := re.fullmatch(sentence.replace("{}", r"(\w+)"), text):
                return self._after(kind, *match.groups())
        return None

    def _after(self, kind: int, block: str, under: str | None = None) -> "World | None":
        if kind in (0, 3):  # pick up, unstack
            if self.held or not self.is_clear(block) or self.below[block] != under:
                return None
            return World({b: u for b, u in self.below.items() if b != block}, block)
        if self.held != block or (under is not None and not self.is_clear(under)):
            return None
        return World(self.below | {block: under})

    def actions(self) -> Iterator[str]:
        """All possible actions."""
        blocks = sorted({*self.below, *([self.held] if self.held else [])})
        for sentence in _ACTIONS:
            choices = itertools.permutations(blocks, sentence.count("{}"))
            yield from filter(self.after, (sentence.format(*names) for names in choices))

    def has(self, goal: str) -> bool:
        """Whether all "block on top of block" statements of a goal hold."""
        wanted = _ON.findall(goal)
        return bool(wanted) and all(self.below.get(block) == under for block, under in wanted)

    def reaches(self, goal: str, plan: Iterable[str]) -> bool:
        """Whether the plan reaches the goal without an impossible action."""
        world = self
        for action in plan:
            following = world.after(action)
            if world.has(goal) or following is None:
                break
            world = following
        return world.has(goal)
