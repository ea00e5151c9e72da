"""`topology="auto"`: in each step of the loop a choice between no drafts and a few trees.

A text does not depend on the tree, so the tree may change at every step. A step takes the tree with
the most expected tokens for its time: expected by how often drafts of each depth and rank were
accepted, a moving average for each row; times are measured once for a pair, a machine and a number
of rows. On a step that rows share their sum decides.

Each tree has a loop of its own, which ends when another tree is chosen: branches inside of one loop
copied all caches in each step. What depends on the tree's size has that of the largest. Without
drafts a draft model does not run; when it is asked again it reads what it missed. While no
tree pays one is tried for some steps, after pauses that double.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.drafters.base import Drafter, root_only
from stree_jax.decoding.step import decode_step
from stree_jax.decoding.types import (
    DecodeState,
    DraftTree,
    Drawn,
    Limits,
    Sampling,
    Step,
    Verdict,
)
from stree_jax.decoding.verifiers import Verifier
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

# The first without drafts, the last with as many nodes, levels and inner nodes as any. A program
# has a loop for each.
TREES = TreeTopology.chain(0), TreeTopology.chain(2), TreeTopology.default(), TreeTopology.chain(4)
KEPT = 0.98  # of an average, when a draft was accepted or not
SURE = 4.0  # drafts that count as much as what is expected before any
FIRST_RATE = 0.6  # expected of the best draft for the next token; deeper ones are like those above
NEXT_RATE = 0.3  # of the others, relative to how often the best is wrong
WORSE = 0.98  # the value of the best tree, relative to no drafts, below which drafts rest
PAUSE, LONGEST_PAUSE = 32, 1024  # steps until the next trial
TRIAL = 2  # steps of a trial
AGED = 5.0  # drafts before a trial that count in it, of each depth and rank
WINDOW = 16  # tokens that a draft model reads at once when it has missed some


class Choosing(NamedTuple):
    """What the choice of a tree depends on, for each row."""

    number: Int[Array, " B"]  # of the tree of the next step, the same for all rows
    behind: Int[Array, " B"]  # tokens before the root that the draft model has not read
    forced: Int[Array, " B"]  # a number of a tree; -1: it is chosen
    pause: Int[Array, " B"]  # steps of the last pause
    rest: Int[Array, " B"]  # steps until the next trial
    trial: Int[Array, " B"]  # steps of the trial that are left
    tried: Float32[Array, "B D R"]  # drafts of a depth and rank below an accepted node, decaying
    accepted: Float32[Array, "B D R"]
    counts: Int[Array, "B K"]  # steps with each tree


class AutoState(NamedTuple):
    """A drafter's state for the largest tree, and that of the choice."""

    drafter: Any
    choosing: Choosing


class AutoDrafter(Drafter):
    """A drafter with a tree for each step, see this module.

    Args:
        drafter: the drafter.
        choices: the trees, the first without drafts, the last as large in all as any.
        costs: times of a step with each tree; only their ratios matter. None: a guess.
    """

    def __init__(
        self,
        drafter: Drafter,
        choices: tuple[TreeTopology, ...] = TREES,
        costs: Float[Array, " K"] | Any = None,
    ):
        if costs is None:  # where nothing was measured
            costs = [1 + 0.06 * (tree.num_nodes - 1) + 0.15 * tree.depth for tree in choices]
        self.drafter = drafter
        self.inner_layers = drafter.inner_layers
        self.choices = choices
        self.costs: Any = np.asarray(costs, np.float32)

    @property
    def catches_up(self) -> bool:
        """True if it may read later, since it reads tokens alone."""
        return self.drafter.inner_layers is None

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> Drawn | Any:
        return self.drafter.child_sampling(topology, temperature_is_zero=temperature_is_zero)

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        if self.drafter.chooses_shape:
            raise ValueError(
                f'topology = "auto": {type(self.drafter).__name__} chooses the shape of its trees'
                " itself; give it a TreeTopology.budget, or leave topology out"
            )
        for tree in self.choices[1:]:
            self.drafter.check(target, tree, temperature_is_zero=temperature_is_zero)

    def default_topology(self) -> TreeTopology:
        return self.choices[-1]

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> AutoState:
        zeros = jnp.zeros(batch, jnp.int32)
        widest = max(len(children) for tree in self.choices for children in tree.children)
        rates = jnp.zeros((batch, topology.depth, widest), jnp.float32)
        choosing = Choosing(
            *(zeros, zeros + 0, zeros - 1, zeros + 0, zeros + 0, zeros + 0, rates, rates + 0),
            counts=jnp.zeros((batch, len(self.choices)), jnp.int32),
        )
        return AutoState(self.drafter.init(batch, topology, max_length), choosing)

    def read(self, state: AutoState, tokens: Array, hidden: Any, lengths: Array) -> AutoState:
        """See `Drafter`. A row that is behind reads these tokens too when it catches up."""
        behind = state.choosing.behind
        now = jnp.where(behind > 0, 0, lengths)
        choosing = state.choosing._replace(behind=behind + (lengths - now).astype(jnp.int32))
        return AutoState(self.drafter.read(state.drafter, tokens, hidden, now), choosing)

    def propose(
        self, state: AutoState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, AutoState]:
        raise ValueError("an AutoDrafter drafts in `SpeculativeDecoder.run` and `step` alone")

    def commit(self, state: AutoState, *others: Any) -> AutoState:
        raise ValueError("an AutoDrafter drafts in `SpeculativeDecoder.run` and `step` alone")

    def expected(self, choosing: Choosing) -> Float32[Array, "B K"]:
        """Tokens that a step with each tree is expected to emit."""
        rates: list[Array] = []  # [B, R] of each depth
        best = jnp.full(len(choosing.number), FIRST_RATE)
        for depth in range(choosing.tried.shape[1]):
            tried, accepted = choosing.tried[:, depth], choosing.accepted[:, depth]
            best = (accepted[:, 0] + SURE * best) / (tried[:, 0] + SURE)
            others = SURE * NEXT_RATE * (1 - best)[:, None]
            rates.append(((accepted + others) / (tried + SURE)).at[:, 0].set(best))
        totals = []
        for tree in self.choices:
            reached = [jnp.ones_like(best)]
            for node in range(1, tree.num_nodes):
                parent = tree.parents[node]
                rank = tree.children[parent].index(node)
                reached.append(reached[parent] * rates[tree.depths[parent]][:, rank])
            totals.append(sum(reached))
        return jnp.stack(totals, axis=1)

    def chosen(self, state: DecodeState) -> DecodeState:
        """The state with the number of the next step's tree."""
        choosing, active = state.drafter.choosing, ~state.done | state.done.all()
        tokens = jnp.where(active[:, None], self.expected(choosing), 0).sum(axis=0)
        values = tokens / self.costs
        best = 1 + jnp.argmax(values[1:]).astype(jnp.int32)
        pays = values[best] >= WORSE * values[0]
        forced, pause, rest, trial = (
            part.max() for part in (choosing.forced, choosing.pause, choosing.rest, choosing.trial)
        )
        rests, tries = rest > 0, (rest == 0) & (trial > 0)
        ends = ~rests & ~tries & ~pays
        aged = jnp.where(rest == 1, jnp.minimum(1, AGED / jnp.maximum(choosing.tried, 1)), 1)
        pause = jnp.where(ends, jnp.clip(2 * pause, PAUSE, LONGEST_PAUSE), pause)
        pause = jnp.where(~rests & ~tries & pays, 0, pause)
        trial = jnp.where(ends, TRIAL, jnp.where(tries, trial - 1, trial))
        rest = jnp.where(ends, pause, jnp.maximum(rest - 1, 0))
        number = jnp.where(rests | ends, 0, best)
        number = jnp.where(forced >= 0, forced, number)
        of_all = {"number": number, "pause": pause, "rest": rest, "trial": trial}
        rows = {name: jnp.full_like(choosing.number, part) for name, part in of_all.items()}
        rows |= {"tried": aged * choosing.tried, "accepted": aged * choosing.accepted}
        return state._replace(drafter=state.drafter._replace(choosing=choosing._replace(**rows)))

    def caught_up(self, state: DecodeState) -> DecodeState:
        """The state in which the drafter has read all of a text, if the next step has drafts."""
        if not (self.catches_up and jax.tree.leaves(state.drafter.drafter)):
            return state
        tokens, length = state.context

        def wanted(own: AutoState) -> Array:
            return (own.choosing.number[0] > 0) & (own.choosing.behind > 0).any()

        def body(own: AutoState) -> AutoState:
            behind = own.choosing.behind
            first, lengths = length - 1 - behind, jnp.minimum(behind, WINDOW)
            places = first[:, None] + jnp.arange(WINDOW, dtype=jnp.int32)
            places = jnp.clip(places, 0, tokens.shape[1] - 1)
            missed = jnp.take_along_axis(tokens, places, axis=1)
            read = self.drafter.read(own.drafter, missed, None, lengths)
            return AutoState(read, own.choosing._replace(behind=behind - lengths))

        return state._replace(drafter=lax.while_loop(wanted, body, state.drafter))

    def step_with(
        self, number: int, verifier: Verifier, model: HybridLM, limits: Limits, sampling: Sampling
    ) -> Callable[[DecodeState], tuple[DecodeState, DraftTree, Verdict]]:
        """`decode_step` with one of the trees; the draft has room for the largest."""
        tree, largest = self.choices[number], self.choices[-1]
        one = _OneTree(self.drafter, tree)

        def step(state: DecodeState) -> tuple[DecodeState, DraftTree, Verdict]:
            own, choosing = state.drafter
            before = state._replace(drafter=own)
            new, draft, verdict = decode_step(tree, verifier, model, one, before, limits, sampling)
            seen = _seen(tree, draft, verdict, ~state.done, choosing.tried)
            tried, accepted = (
                jnp.where(seen[0] > 0, KEPT, 1.0) * part + added
                for part, added in zip((choosing.tried, choosing.accepted), seen, strict=True)
            )
            missed = new.emitted - state.emitted if self.catches_up and number == 0 else 0
            choosing = choosing._replace(
                behind=choosing.behind + missed,
                tried=tried,
                accepted=accepted,
                counts=choosing.counts.at[:, number].add((~state.done).astype(jnp.int32)),
            )
            new = with_room(new, before)._replace(drafter=AutoState(new.drafter, choosing))
            shape = len(state.done), largest.num_nodes
            room = jnp.zeros(shape, jnp.int32), largest.tree(jnp.zeros(shape, bool))
            tokens, nodes = with_room((draft.tokens, draft.tree), room)
            none = jnp.full(largest.num_nodes, -1, jnp.int32)
            return new, DraftTree(tokens, nodes, None, none, draft.finite), verdict

        return step

    def run(
        self, state: DecodeState, unfinished: Callable[[DecodeState], Array], *arguments: Any
    ) -> DecodeState:
        """Steps while they are `unfinished`; arguments are those of `step_with`."""

        def steps_with(number: int, state: DecodeState) -> DecodeState:
            step = self.step_with(number, *arguments)
            return lax.while_loop(
                lambda state: unfinished(state) & (state.drafter.choosing.number[0] == number),
                lambda state: self.chosen(step(state)[0]),
                state,
            )

        def body(state: DecodeState) -> DecodeState:
            state = self.caught_up(steps_with(0, state))
            for number in range(1, len(self.choices)):
                state = steps_with(number, state)
            return state

        return lax.while_loop(unfinished, body, self.chosen(state))

    def step(self, state: DecodeState, *arguments: Any) -> tuple[DecodeState, DraftTree, Verdict]:
        """One step, with the tree that is chosen; arguments are those of `step_with`."""
        state = self.caught_up(self.chosen(state))
        steps = [self.step_with(number, *arguments) for number in range(len(self.choices))]
        return lax.switch(state.drafter.choosing.number[0], steps, state)


class _OneTree(Drafter):
    """A drafter in a step with one of its trees; its state has room for the largest."""

    def __init__(self, drafter: Drafter, tree: TreeTopology):
        self.drafter, self.tree = drafter, tree
        self.inner_layers = drafter.inner_layers

    def default_topology(self) -> TreeTopology:
        return self.tree

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> Any: ...

    def read(self, state: Any, tokens: Array, hidden: Any, lengths: Array) -> Any: ...

    def propose(self, state: Any, step: Step, topology: TreeTopology) -> tuple[DraftTree, Any]:
        if topology.num_nodes == 1:
            return root_only(step.context), state
        draft, new = self.drafter.propose(state, step, topology)
        return draft, with_room(new, state)

    def commit(
        self, state: Any, draft: DraftTree, verdict: Verdict, hidden: Array, topology: TreeTopology
    ) -> Any:
        if topology.num_nodes == 1 and self.inner_layers is None:
            return state  # it reads the token when it is asked again
        return with_room(self.drafter.commit(state, draft, verdict, hidden, topology), state)


def with_room(value: Any, like: Any) -> Any:
    """Arrays padded with zeros to the shapes of others."""

    def padded(leaf: Array, want: Array) -> Array:
        if leaf.shape == want.shape:
            return leaf
        rest = zip(leaf.shape, want.shape, strict=True)
        return jnp.pad(leaf, [(0, more - size) for size, more in rest])

    return jax.tree.map(padded, value, like)


def _seen(
    tree: TreeTopology, draft: DraftTree, verdict: Verdict, active: Bool[Array, " B"], like: Array
) -> tuple[Array, Array]:
    """Drafts by depth and rank: those below an accepted node, and the accepted ones."""
    depth, ranks = like.shape[1:]
    parents = np.array(tree.parents[1:], np.int32)
    place = [
        tree.depths[parent] * ranks + tree.children[parent].index(node + 1)
        for node, parent in enumerate(parents.tolist())
    ]
    which = jnp.asarray(np.eye(depth * ranks, dtype=np.float32)[np.array(place, np.int32)])
    path = draft.tree.on_path(jnp.maximum(verdict.last, 0)) & active[:, None]
    counted = path[:, parents], path[:, 1:]
    tried, accepted = (
        (part.astype(jnp.float32) @ which.reshape(-1, depth * ranks)).reshape(like.shape)
        for part in counted
    )
    return tried, accepted
