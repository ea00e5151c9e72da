"""`TreeChoice`: which tree the next steps take, decided on the host from what steps before did.

A text does not depend on its tree, so the tree may change between runs of a few steps. Taken is the
tree that promises the most tokens for its time:

- Tokens: how often drafts of each depth and rank were accepted, a moving average for each row.
  Where another text takes the place of one that ends, the sum of the rows decides. A batch ends
  with its last row, so there the row that needs the most steps does.
- Times: runs of two trees, one after the other, give the ratio of their times, since other work on
  the machine changes both. Medians of the ratios of pairs count, and a guess a little.

Now and then another tree is tried for a few steps, after a run that was timed: the one that is
worth most if its time is overestimated. The time until the next trial doubles while trials change
nothing. A run takes time beside its steps, so runs are long where steps are fast.
"""

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from stree_jax.messages import shown
from stree_jax.tree import TreeTopology

# What "auto" chooses from, beside no drafts.
TREES = TreeTopology.chain(2), TreeTopology.default(), TreeTopology.chain(4)
NO_TOPOLOGY = (
    'topology must be a TreeTopology, a list of them, "auto" or words such as "chain:4", got '
)
KEPT = 0.98  # of an average, when a draft was accepted or not
KNOWN = 16.0  # drafts of a depth and rank, of texts before, that count
SURE = 4.0  # drafts that count as much as what is expected before any
FIRST_RATE = 0.6  # expected of the best draft for the next token; deeper ones are like those above
NEXT_RATE = 0.3  # of the others, relative to how often the best is wrong
BETTER = 1.05  # the value of the best tree, relative to no drafts, below which there are no drafts
DOUBT = 2.0  # a tree that was never timed may be as many times faster than it seems
WORTH = 1.2  # what a tree may be worth, relative to those that are compiled, to be compiled too
SHARE = 0.02  # of the time until the next trial is what one may cost
TRIAL = 4, 8.0  # steps, and times what a run takes beside its steps, which blurs them
FEW = 3  # times of a pair of trees, up to which trials wait for the shortest time only
GUESSED = 0.25  # of a time, which a guess counts
AGED = 5.0  # drafts before a trial that count in it, of each depth and rank
SHORTEST, LONGEST = 16, 1024  # steps until the next trial; more if one costs more
QUANTUM = 16, 64  # steps of a run with drafts, at first and then, where steps are slow
READING = 3.0  # steps without drafts in the time in which a draft model reads a piece of a text


class TreeChoice:
    """Chooses among no drafts and some trees.

    It may be passed as `topology`: then it keeps what it learns for the next text. A subclass with
    a method `next` of its own is another policy; no policy changes a text.

    Attributes:
        trees: what it chooses from; the first is the root alone, no drafts.
        costs: `[K]`, the time of a step with each tree, relative to no drafts.
        beside: seconds that the run took beside its steps which is told next.
        reading: seconds in which a draft model reads a piece of a text, once that is known.

    Args:
        trees: the draft trees; the first run takes `TreeTopology.default()`, or the first of them.

    Raises:
        ValueError: no trees.
    """

    def __init__(self, trees: Sequence[TreeTopology] | Any = TREES):
        if not all(isinstance(tree, TreeTopology) for tree in trees):
            raise ValueError(NO_TOPOLOGY + shown(trees))
        drafted = [tree.level_order() for tree in trees]
        self.trees = tuple(dict.fromkeys([TreeTopology.chain(0), *drafted]))
        if len(self.trees) == 1:
            raise ValueError("topology has no tree with drafts to choose from; leave topology out")
        default = TreeTopology.default()
        self._first = self.trees.index(default) if default in self.trees else 1
        depth = self.largest.depth
        widest = max(1, *(len(children) for tree in self.trees for children in tree.children))
        self._paths = [_paths(tree, depth, widest) for tree in self.trees]
        # Drafts of each depth and rank below an accepted node, decaying.
        self.tried = self.accepted = np.zeros((1, depth, widest))
        # By pairs of trees, the larger number first: logarithms.
        self._ratios: dict[tuple[int, int], collections.deque[float]] = {}
        self.costs = self._solved()
        self._last: Any = None  # tree, steps and seconds of the last run
        self.beside = self._beside = 0.0  # the same in steps
        self.reading: float | None = None
        self._reading = READING
        self._taken, self._steps = -1, QUANTUM[0]
        self._wait = self._pause = 0  # steps until the next trial, and how many they were

    @property
    def largest(self) -> TreeTopology:
        """A tree with as many nodes, levels and inner nodes as any of the trees."""
        return TreeTopology.chain(max(tree.num_nodes for tree in self.trees) - 1)

    @property
    def rests(self) -> bool:
        """True if the next text begins without drafts."""
        return self._taken == 0 and self._wait > 0

    def begin(self, num_rows: int, rows: Sequence[int] | None = None) -> None:
        """Texts begin in these rows of all, knowing what texts before did; None: in all rows."""
        tried, accepted = (part.mean(axis=0, keepdims=True) for part in (self.tried, self.accepted))
        kept = np.minimum(1, KNOWN / np.maximum(tried, 1e-9))
        new = kept * tried, kept * accepted
        if rows is None or len(self.tried) != num_rows:
            self._last = None
            self.tried, self.accepted = (np.repeat(part, num_rows, axis=0) for part in new)
        else:
            self.tried[rows], self.accepted[rows] = new

    def told(self, number: int, steps: int, seconds: float | None, ends: np.ndarray) -> None:
        """A run has ended.

        Args:
            number: of its tree.
            steps: how many.
            seconds: of all of them; None: unknown, since a program was compiled.
            ends: `[B, N]`, how many steps of each row had a path that ended at each node.
        """
        tried, accepted = (np.tensordot(ends, part, 1) for part in self._paths[number])
        kept = KEPT**tried
        self.tried, self.accepted = kept * self.tried + tried, kept * self.accepted + accepted
        self._wait = max(0, self._wait - steps)
        if seconds is None or steps < TRIAL[0]:
            self._last = None
            self._wait = max(self._wait, SHORTEST if seconds is None else 0)  # nothing to compare
            return
        last, self._last = self._last, (number, max(seconds / steps, 1e-9))
        self._beside = max(self.beside, 0) / self._last[1]
        if self.reading is not None:
            self._reading = self.reading / self._last[1]
        if last is not None and last[0] != number:
            (second, slow), (first, fast) = sorted([last, self._last], reverse=True)
            ratios = self._ratios.setdefault((second, first), collections.deque(maxlen=15))
            ratios.append(float(np.log(slow / fast)))
            self.costs = self._solved()

    def next(
        self,
        active: np.ndarray,
        left: np.ndarray | None = None,
        ready: np.ndarray | None = None,
        unread: int = 0,
    ) -> tuple[int, int]:
        """The number of the tree that the next run takes, and its steps.

        Args:
            active: `[B]`, rows that have not ended; one at least.
            left: `[B]`, tokens that they still need, of a batch that ends with its last row; None:
                another text takes the place of one that ends.
            ready: `[K]`, trees whose programs are compiled; None: all.
            unread: pieces of a text that a draft model has to read before it drafts.
        """
        if ready is None or not ready.any():
            ready = np.ones(len(self.trees), bool)
        if self._taken < 0:
            self._taken = self._first
            return self._first, self._steps
        values = self.values(active, left)
        possible = np.where(ready, values, 0)
        drafted = 1 + int(possible[1:].argmax())
        pays = possible[drafted] >= BETTER * possible[0]
        best = drafted if pays and ready[drafted] else 0
        trial, is_open = self._trial(best, values, ready)
        steps = int(np.clip(TRIAL[1] * self._beside, TRIAL[0], QUANTUM[0]))
        if best != self._taken:
            self._pause = 0 if best else self._pause
        if trial == best or is_open:
            pause = SHORTEST
        else:  # a trial makes two runs more
            loss = steps * max(values[best] / values[trial] - 1, 0) + 2 * self._beside
            loss += self._reading * unread * (best == 0)
            pause = int(np.clip(2 * self._pause, SHORTEST, LONGEST))
            pause = max(pause, int(min(loss / SHARE, 4 * LONGEST)))
        if best != self._taken:
            self._taken, self._steps = best, QUANTUM[0]
            self._wait = self._pause = pause
        elif self._wait == 0 and (trial == best or self._last is None):
            self._wait = TRIAL[0] if self._last is None else SHORTEST
        elif self._wait == 0:
            self._pause = pause
            self._wait = self._pause + steps
            if best == 0:
                aged = np.minimum(1, AGED / np.maximum(self.tried, 1))
                self.tried, self.accepted = aged * self.tried, aged * self.accepted
            return trial, steps
        steps = self._wait
        if best:
            longest = max(self._steps, int(self._beside / SHARE))
            steps, self._steps = min(steps, longest), min(2 * self._steps, QUANTUM[1])
        return best, steps

    def wanted(
        self,
        active: np.ndarray,
        left: np.ndarray | None,
        ready: np.ndarray,
        tried: np.ndarray | None = None,
    ) -> int | None:
        """The tree to compile next: it may be faster than all that are; None: no tree may be.

        No drafts come first: how slow drafts are, a guess does not tell. Others come when those
        that are compiled were timed. `tried` are those and trees whose programs failed.
        """
        tried = ready if tried is None else tried
        if not tried[0]:
            return 0
        values = self.values(active, left)
        best = int(np.where(ready, values, 0).argmax())
        *_, is_open = self._trial(best, values, ready)
        hopes = np.where(tried | is_open, 0, self._hopes(best, values))
        return int(hopes.argmax()) if hopes.max() > WORTH * values[best] else None

    def values(self, active: np.ndarray, left: np.ndarray | None = None) -> np.ndarray:
        """Tokens that each tree promises for the time of a step without drafts, `[K]`."""
        tokens = self.expected()[active]
        if left is None:
            speed = tokens.mean(axis=0)
        else:
            left = np.maximum(left[active], 1)
            speed = (tokens / left[:, None]).min(axis=0) * left.max()
        return speed / self.costs

    def expected(self) -> np.ndarray:
        """Tokens that a step of each row with each tree is expected to emit, `[B, K]`."""
        rates = []  # [B, R] of each depth
        best = np.full(len(self.tried), FIRST_RATE)
        for depth in range(self.tried.shape[1]):
            tried, accepted = self.tried[:, depth], self.accepted[:, depth]
            best = (accepted[:, 0] + SURE * best) / (tried[:, 0] + SURE)
            others = SURE * NEXT_RATE * (1 - best)[:, None]
            of_ranks = (accepted + others) / (tried + SURE)
            of_ranks[:, 0] = best
            rates.append(of_ranks)
        totals = []
        for tree in self.trees:
            reached = [np.ones_like(best)]
            for parent, depth, rank in _drafts(tree):
                reached.append(reached[parent] * rates[depth][:, rank])
            totals.append(np.sum(reached, axis=0))
        return np.stack(totals, axis=1)

    def _solved(self) -> np.ndarray:
        """The costs."""
        guesses = [
            np.log(1 + 0.06 * (tree.num_nodes - 1) + 0.15 * tree.depth) for tree in self.trees
        ]
        # Logarithms: least squares of their differences, and of a guess.
        matrix, right = GUESSED * np.eye(len(guesses)), GUESSED * np.array(guesses)
        for pair, ratios in self._ratios.items():
            matrix[np.ix_(pair, pair)] += len(ratios) * np.array([[1, -1], [-1, 1]])
            right[[*pair]] += len(ratios) * statistics.median(ratios) * np.array([1, -1])
        without = np.linalg.solve(matrix[1:, 1:], right[1:])
        return np.maximum(1, np.exp([0.0, *without]))

    def _hopes(self, best: int, values: np.ndarray) -> np.ndarray:
        """What trees are worth if their times are wrong: the less they were timed, the more."""
        timed = np.array([self._timed(best, number) for number in range(len(self.trees))])
        limits = [DOUBT, *self.costs[1:]]  # a step with drafts never takes less than one without
        return values * np.minimum(DOUBT ** (1 / (1 + timed)), limits)

    def _timed(self, *pair: int) -> int:
        """How many times of a pair of trees are known."""
        return len(self._ratios.get((max(pair), min(pair)), ()))

    def _trial(self, best: int, values: np.ndarray, ready: np.ndarray) -> tuple[int, bool]:
        """The tree to try next, or the best if there is no other; and if it may be better.

        A tree that was timed a few times is no better than it seems.
        """
        hopes = np.where(ready, self._hopes(best, values), 0)
        hopes[best] = 0
        trial = int(hopes.argmax()) if hopes.any() else best
        return trial, bool(hopes[trial] > values[best]) and self._timed(best, trial) < FEW


def _drafts(tree: TreeTopology) -> list[tuple[int, int, int]]:
    """The parent of each node but the root, its depth, and the node's rank among its children."""
    return [
        (parent, tree.depths[parent], tree.children[parent].index(node))
        for node, parent in enumerate(tree.parents[1:], 1)
    ]


def _paths(tree: TreeTopology, depth: int, widest: int) -> Any:
    """For a path to each node: drafts of each depth and rank below its nodes, and those on it."""
    tried, accepted = np.zeros((2, tree.num_nodes, depth, widest))
    for node, (parent, at, rank) in enumerate(_drafts(tree), 1):
        accepted[node] = accepted[parent]
        accepted[node, at, rank] += 1
    for node, children in enumerate(tree.children):
        tried[node] = tried[max(tree.parents[node], 0)]
        if children:
            tried[node, tree.depths[node], : len(children)] += 1
    return tried, accepted
