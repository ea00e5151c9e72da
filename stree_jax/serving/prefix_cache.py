"""Prefixes of texts that were read, by their tokens, within a budget of bytes."""

import bisect
import collections
import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from stree_jax.decoding.prefix.prefix import Prefix


@dataclasses.dataclass(frozen=True)
class PrefixCacheStats:
    """Counts of a scheduler's prefix cache since the scheduler was made, or got other weights.

    Attributes:
        lookups: texts whose prefill began.
        hits: lookups that found an entry.
        tokens_reused: tokens that entries saved.
        tokens_prefilled: tokens of prompts that were prefilled, with or without a cache.
        nbytes: bytes of the entries' arrays now.
        num_entries: entries now.
        evictions: entries removed because the budget was spent.
        sizes: tokens and bytes of each entry now, the least recently used first.
    """

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    tokens_prefilled: int = 0
    nbytes: int = 0
    num_entries: int = 0
    evictions: int = 0
    sizes: tuple[tuple[int, int], ...] = ()


class PrefixCache:
    """Keeps prefixes by their tokens, the latest used ones within `budget` bytes."""

    def __init__(self, budget: int):
        self._budget = budget
        # By their tokens, the least recently used first; and the tokens of all in order.
        self._entries: collections.OrderedDict[tuple[int, ...], Prefix] = collections.OrderedDict()
        self._sorted: list[tuple[int, ...]] = []
        self._nbytes = self._evictions = 0

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of entries, see `PrefixCacheStats`."""
        sizes = tuple((len(text), entry.nbytes) for text, entry in self._entries.items())
        return dict(
            nbytes=self._nbytes,
            num_entries=len(sizes),
            evictions=self._evictions,
            sizes=sizes,
        )

    def find(self, tokens: Sequence[int], longer_than: int = 0) -> tuple[int, Prefix] | None:
        """Returns the longest entry that a text begins with, and its length."""
        key = self._longest(tokens)
        if key is None or len(key) <= longer_than:
            return None
        self._entries.move_to_end(key)
        return len(key), self._entries[key]

    def shared(self, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix of a text and any entry."""
        at = bisect.bisect(self._sorted, tuple(tokens))
        neighbours = self._sorted[max(at - 1, 0) : at + 1]
        return max((num_shared(tokens, entry) for entry in neighbours), default=0)

    def has(self, tokens: Sequence[int]) -> bool:
        """True if exactly these tokens have an entry, which counts as used."""
        key = tuple(tokens)
        if is_known := key in self._entries:
            self._entries.move_to_end(key)
        return is_known

    def keep(self, tokens: Sequence[int], prefix: Prefix) -> None:
        """Adds an entry unless it exceeds the budget; evicts others for it."""
        changed = copy.copy(self)
        changed._entries, changed._sorted = self._entries.copy(), [*self._sorted]
        changed._keep(tuple(tokens), prefix)
        vars(self).update(vars(changed))  # all at once, or nothing if an interrupt came before

    def _keep(self, key: tuple[int, ...], prefix: Prefix) -> None:
        if key in self._entries:
            self._remove(key)
        if prefix.nbytes > self._budget:
            return
        self._entries[key] = prefix
        bisect.insort(self._sorted, key)
        self._nbytes += prefix.nbytes
        while self._nbytes > self._budget:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _longest(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The longest key that a text begins with.

        It comes before the text in the order, and what lies between them begins with it too.
        """
        text = tuple(tokens)
        while at := bisect.bisect(self._sorted, text):
            before = self._sorted[at - 1]
            text = text[: num_shared(text, before)]
            if text == before:
                return before
        return None

    def _remove(self, key: tuple[int, ...]) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, key)]
        self._nbytes -= self._entries.pop(key).nbytes


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
