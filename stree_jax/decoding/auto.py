"""`topology="auto"`: in each step of the loop a choice between no drafts and a few trees.

A text does not depend on the tree, so the tree may change at every step. A step takes the tree with
the most expected tokens for its time: expected by how often drafts of each depth and rank were
accepted, a moving average for each row; times are measured once for a pair, a machine and a number
of rows, with one of them running and with all. Where another text takes the place of one that ends
the sum of the rows decides; a batch ends with its last row, so there the row that would need the
most steps does.

Each tree has its own loop, which ends when another tree is chosen: branches inside of one loop
copied all caches in each step. Its pending record has the tree's size, and is replayed when it
ends; the drafter's state has the size of the largest tree. Without drafts a draft model does not
run; before its next drafts it reads what it missed. While no tree pays, drafting pauses: the loop
without drafts runs. Then one tree is tried. Pauses double, and are long if a trial costs much.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.decoding.drafters.base import Drafter, root_only
from stree_jax.decoding.step import decode_step, settled
from stree_jax.decoding.types import DecodeState, DraftTree, Drawn, Limits, Sampling, Step, Verdict
from stree_jax.decoding.verifiers import Verifier
from stree_jax.messages import shown
from stree_jax.models.cache import empty_path
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

# A program has a loop for each, and one without drafts.
TREES = TreeTopology.chain(2), TreeTopology.default(), TreeTopology.chain(4)
KEPT = 0.98  # of an average, when a draft was accepted or not
SURE = 4.0  # drafts that count as much as what is expected before any
FIRST_RATE = 0.6  # expected of the best draft for the next token; deeper ones are like those above
NEXT_RATE = 0.3  # of the others, relative to how often the best is wrong
BETTER = 1.05  # the value of the best tree, relative to no drafts, below which drafting pauses
SHARE = 0.02  # of the time until a trial is what the first may cost
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps until the next trial
TRIAL = 2  # drafted texts that make a trial: steps of one row, one step of more
AGED = 5.0  # drafts before a trial that count in it, of each depth and rank
WINDOW = 64  # tokens that a draft model reads at once when it has missed some
READING = 3.0  # steps without drafts in the time of such a window: 1 for a row, 3 for 8 on a CPU
NO_TOPOLOGY = (
    'topology must be a TreeTopology, a list of them, "auto" or words such as "chain:4", got '
)


def trees_of(
    topology: str | Sequence[Any],
    drafter: Drafter,
    target: HybridLM,
    *,
    temperature_is_zero: bool,
) -> Sequence[TreeTopology]:
    """The trees of a topology that is several: a list of them, or "auto"; refuses others.

    "auto" has those of `TREES` that the drafter does not refuse, or else the drafter's own.
    """
    if topology != "auto":
        if not all(isinstance(tree, TreeTopology) for tree in topology):
            raise ValueError(NO_TOPOLOGY + shown(topology))
        return [*topology]
    fitting = []
    for tree in TREES:
        with contextlib.suppress(ValueError):
            drafter.check(target, tree, temperature_is_zero=temperature_is_zero)
            fitting.append(tree)
    return fitting or [drafter.default_topology()]


class Choosing(NamedTuple):
    """What the choice of a tree depends on, for each row."""

    number: Int[Array, " B"]  # of the tree of the next step, the same for all rows
    behind: Int[Array, " B"]  # tokens before the root that the draft model has not read
    forced: Int[Array, " B"]  # a number of a tree; -1: it is chosen
    pause: Int[Array, " B"]  # steps of the last pause
    pause_left: Int[Array, " B"]  # its steps that are left until the next trial
    trial: Int[Array, " B"]  # steps of the trial that are left
    tried: Float32[Array, "B D R"]  # drafts of a depth and rank below an accepted node, decaying
    accepted: Float32[Array, "B D R"]
    counts: Int[Array, "B K accepted"]  # steps with each tree, by their accepted drafts, 0 to D

    def of_all(self, **parts: Array | int) -> "Choosing":
        """With these integers in all rows."""
        return self._replace(**{name: jnp.full_like(self.number, parts[name]) for name in parts})


class AutoState(NamedTuple):
    """A drafter's state for the largest tree, and that of the choice."""

    drafter: Any
    choosing: Choosing


class AutoDrafter(Drafter):
    """A drafter with one of `trees`, or none, for each step, see this module.

    `costs` are times of a step with each tree, with one row and with all of them, of which only the
        ratios matter. While drafting `is_paused`, a draft model need not read a text.
    """

    def __init__(
        self,
        drafter: Drafter,
        trees: Sequence[TreeTopology] = TREES,
        costs: Float[Array, "2 K"] | Any = None,
    ):
        distinct = dict.fromkeys([TreeTopology.chain(0), *(tree.level_order() for tree in trees)])
        self.choices = choices = tuple(distinct)
        if costs is None:  # where nothing was measured
            costs = [[1 + 0.06 * (tree.num_nodes - 1) + 0.15 * tree.depth for tree in choices]] * 2
        self.drafter, self.inner_layers = drafter, drafter.inner_layers
        self.costs: Any = np.asarray(costs, np.float32)
        self.is_paused: Any = np.array(False)  # an array: one program for both

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
        """Returns one with as many nodes, levels and inner nodes as any of the trees."""
        return TreeTopology.chain(max(tree.num_nodes for tree in self.choices) - 1)

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> AutoState:
        widest = max(len(children) for tree in self.choices for children in tree.children)
        choosing = _untaught(batch, topology.depth, widest, len(self.choices))
        return AutoState(self.drafter.init(batch, topology, max_length), choosing)

    def read(self, state: AutoState, tokens: Array, hidden: Any, lengths: Array) -> AutoState:
        """See `Drafter`. A row that is behind reads these tokens too when it catches up."""
        behind = state.choosing.behind
        if not self.catches_up:
            return state._replace(drafter=self.drafter.read(state.drafter, tokens, hidden, lengths))
        if not isinstance(self.is_paused, jax.core.Tracer) and self.is_paused:
            behind = behind + jnp.asarray(lengths, jnp.int32)
            return state._replace(choosing=state.choosing._replace(behind=behind))
        now = jnp.where((behind > 0) | self.is_paused, 0, lengths)
        choosing = state.choosing._replace(behind=behind + (lengths - now).astype(jnp.int32))
        return AutoState(self.drafter.read(state.drafter, tokens, hidden, now), choosing)

    def propose(
        self, state: AutoState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, AutoState]:
        """See `Drafter`; `topology` is one of the trees."""
        if topology.num_nodes == 1:
            return root_only(step.context), state
        draft, new = self.drafter.propose(state.drafter, step, topology)
        return draft, state._replace(drafter=_into(state.drafter, new))

    def commit(
        self,
        state: AutoState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Array,
        topology: TreeTopology,
    ) -> AutoState:
        """See `Drafter`; counts what was accepted."""
        drafter_state = state.drafter
        choosing = _counted(state.choosing, topology, draft, verdict.last)
        if topology.num_nodes == 1 and self.catches_up:  # it reads the token before it drafts
            choosing = choosing._replace(behind=choosing.behind + (verdict.last >= 0))
        else:
            new = self.drafter.commit(drafter_state, draft, verdict, hidden, topology)
            drafter_state = _into(drafter_state, new)
        pause_left = jnp.maximum(choosing.pause_left - 1, 0)
        return AutoState(drafter_state, choosing._replace(pause_left=pause_left))

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
            for parent, depth, rank in _drafts(tree):
                reached.append(reached[parent] * rates[depth][:, rank])
            totals.append(sum(reached))
        return jnp.stack(totals, axis=1)

    def chosen(self, state: DecodeState, limits: Limits | None) -> DecodeState:
        """The state with the number of the next step's tree; `limits`: of a batch that ends."""
        choosing = state.drafter.choosing
        active = (~state.done | state.done.all())[:, None]
        tokens = self.expected(choosing)
        if limits is None:
            speed = jnp.where(active, tokens, 0).sum(axis=0)
        else:
            left = jnp.maximum(limits.max_new_tokens - state.emitted, 1)[:, None]
            speed = jnp.where(active, tokens / left, jnp.inf).min(axis=0)
        share = (active.sum() - 1) / max(len(active) - 1, 1)
        costs = (1 - share) * self.costs[0] + share * self.costs[1]
        values = speed / costs
        best = 1 + jnp.argmax(values[1:]).astype(jnp.int32)
        pays = values[best] >= BETTER * values[0]
        forced, pause = choosing.forced.max(), choosing.pause.max()
        pause_left, trial = choosing.pause_left.max(), choosing.trial.max()
        is_paused = pause_left > 0
        is_trial = ~is_paused & (trial > 0)
        is_regular = ~is_paused & ~is_trial
        begins_pause = is_regular & ~pays
        aged = jnp.where(begins_pause, jnp.minimum(1, AGED / jnp.maximum(choosing.tried, 1)), 1)
        steps = -(-TRIAL // jnp.minimum(active.sum(), TRIAL))
        missed = -(-state.context.length.max() // WINDOW) if self._may_miss(state) else 0
        excess = (steps * (costs[best] / costs[0] - 1) + READING * missed) / SHARE
        longer = jnp.maximum(2 * pause, excess.astype(jnp.int32))
        pause = jnp.where(begins_pause, jnp.clip(longer, SHORTEST_PAUSE, LONGEST_PAUSE), pause)
        pause = jnp.where(is_regular & pays, 0, pause)
        trial = jnp.where(begins_pause, steps, jnp.where(is_trial, trial - 1, trial))
        pause_left = jnp.where(begins_pause, pause, pause_left)
        number = jnp.where(is_paused | begins_pause, 0, best)
        number = jnp.where(forced >= 0, forced, number)
        choosing = choosing._replace(tried=aged * choosing.tried, accepted=aged * choosing.accepted)
        choosing = choosing.of_all(number=number, pause=pause, pause_left=pause_left, trial=trial)
        return state._replace(drafter=state.drafter._replace(choosing=choosing))

    def _may_miss(self, state: DecodeState) -> bool:
        return self.catches_up and bool(jax.tree.leaves(state.drafter.drafter))

    def caught_up(self, state: DecodeState) -> DecodeState:
        """The state in which the drafter has read all of a text, if the next step has drafts."""
        if not self._may_miss(state):
            return state
        tokens, length = state.context

        def is_behind(auto: AutoState) -> Array:
            return (auto.choosing.number[0] > 0) & (auto.choosing.behind > 0).any()

        def read_window(auto: AutoState) -> AutoState:
            behind = auto.choosing.behind
            first, lengths = length - 1 - behind, jnp.minimum(behind, WINDOW)
            places = first[:, None] + jnp.arange(WINDOW, dtype=jnp.int32)
            places = jnp.clip(places, 0, tokens.shape[1] - 1)
            missed = jnp.take_along_axis(tokens, places, axis=1)
            read = self.drafter.read(auto.drafter, missed, None, lengths)
            return AutoState(read, auto.choosing._replace(behind=behind - lengths))

        with jax.named_scope("draft"):
            return state._replace(drafter=lax.while_loop(is_behind, read_window, state.drafter))

    def run(
        self,
        state: DecodeState,
        unfinished: Callable[[DecodeState], Array],
        ends: Limits | None,
        verifier: Verifier,
        model: HybridLM,
        limits: Limits,
        sampling: Sampling,
    ) -> DecodeState:
        """Steps while they are `unfinished`; replays the last path.

        `ends` are limits of a batch that ends with its last row.
        """

        def steps_with(number: int, before: DecodeState) -> DecodeState:
            """In the loop a pending record has the tree's size, and is replayed at its end."""
            tree = self.choices[number]
            batch = len(before.done)

            def step(state: DecodeState) -> DecodeState:
                new = decode_step(tree, verifier, model, self, state, limits, sampling)[0]
                taken = jax.tree.map(jnp.subtract, new.statistics, state.statistics)
                choosing = new.drafter.choosing
                at = jnp.arange(batch), number, taken.accepted
                choosing = choosing._replace(counts=choosing.counts.at[at].add(taken.target_calls))
                return new._replace(drafter=new.drafter._replace(choosing=choosing))

            def paused(state: DecodeState) -> DecodeState:
                """Steps without drafts until the next trial; one at least."""
                return lax.while_loop(
                    lambda carry: carry[1] & unfinished(carry[0]),
                    lambda carry: ((new := step(carry[0])), new.drafter.choosing.pause_left[0] > 0),
                    (state, jnp.bool_(True)),
                )[0]

            state = lax.while_loop(
                lambda state: unfinished(state) & (state.drafter.choosing.number[0] == number),
                lambda state: self.chosen((step if number else paused)(state), ends),
                before._replace(
                    pending=model.init_pending(batch, tree.num_nodes),
                    path=empty_path(batch, tree.num_nodes),
                ),
            )
            # A loop of one turn or none: a branch would copy the caches.
            state = lax.while_loop(
                lambda state: (state.path.last >= 0).any(),
                lambda state: settled(model, state),
                state,
            )
            return state._replace(pending=before.pending, path=before.path)

        def body(state: DecodeState) -> DecodeState:
            state = self.caught_up(steps_with(0, state))
            for number in range(1, len(self.choices)):
                state = steps_with(number, state)
            return state

        return lax.while_loop(unfinished, body, self.chosen(state, ends))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # one by one they take as long as a step
def _untaught(batch: int, depth: int, widest: int, num_trees: int) -> Choosing:
    zeros = jnp.zeros(batch, jnp.int32)
    rates = jnp.zeros((batch, depth, widest), jnp.float32)
    counts = jnp.zeros((batch, num_trees, depth + 1), jnp.int32)
    return Choosing(zeros, zeros, zeros - 1, zeros, zeros, zeros, rates, rates, counts)


def _drafts(tree: TreeTopology) -> list[tuple[int, int, int]]:
    """The parent of each node but the root, its depth, and the node's rank among its children."""
    return [
        (parent, tree.depths[parent], tree.children[parent].index(node))
        for node, parent in enumerate(tree.parents[1:], 1)
    ]


def _counted(
    choosing: Choosing, tree: TreeTopology, draft: DraftTree, last: Int[Array, " B"]
) -> Choosing:
    """With the drafts below an accepted node, and the accepted ones, of rows that took part."""
    shape = choosing.tried.shape
    drafts = np.array(_drafts(tree), np.int32).reshape(-1, 3)
    places = np.eye(shape[1] * shape[2], dtype=np.float32)[drafts[:, 1] * shape[2] + drafts[:, 2]]
    path = draft.tree.on_path(jnp.maximum(last, 0)) & (last >= 0)[:, None]
    tried, accepted = (
        (part.astype(jnp.float32) @ places).reshape(shape)
        for part in (path[:, drafts[:, 0]], path[:, 1:])
    )
    kept = jnp.where(tried > 0, KEPT, 1.0)
    return choosing._replace(
        tried=kept * choosing.tried + tried, accepted=kept * choosing.accepted + accepted
    )


def _into(arrays: Any, new: Any) -> Any:
    """Arrays with the beginnings of all axes replaced, in place where nothing else reads them."""

    def one(old: Array, new: Array) -> Array:
        if new.shape == old.shape:
            return new
        if old.dtype == bool:  # a mask: what a smaller tree lacks is on no path
            old = jnp.zeros_like(old)
        return lax.dynamic_update_slice(old, new, (0,) * old.ndim)

    return jax.tree.map(one, arrays, new)
