"""Runs of a few steps, each with one tree: the ordinary loop, between choices on the host.

The state keeps the sizes of the largest tree; a run makes the record of its own tree, see
`SpeculativeDecoder.run`. A draft model that reads tokens alone does not run without drafts: what it
missed it reads, piece by piece, before it drafts again.

A program is compiled when it is first used. If that can wait, it is compiled beside, in a thread,
while those that are there run. On a mesh it waits for none: its processes must run alike.
"""

import atexit
import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding.drafters.base import Drafter, first_state
from stree_jax.decoding.loop import MAX_STEPS, SpeculativeDecoder, owned
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prefix.prefill import tokens_from
from stree_jax.decoding.tree_choice import TreeChoice
from stree_jax.decoding.types import Context, DecodeState, Limits, Sampling
from stree_jax.mesh.hosts import of_first, on_host
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.mesh.rows import placed_like
from stree_jax.models.identity import identity
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

PIECE = 64  # tokens that a draft model reads at once when it has missed some
BESIDE_AFTER = 0.5  # seconds of runs, from which on another program is worth compiling
_COMPILING = threading.Lock()  # one program at a time is compiled beside


class Quanta:
    """The runs of a batch, or of the rows of a pool: with one tree, or with one after the other.

    Attributes:
        by_tree: `[B, K, D + 1]`, calls of each row with each tree, by their accepted drafts; None
            where there is one tree.
    """

    def __init__(self, request: Plan, model: HybridLM, num_rows: int, *, ends: bool):
        """`ends`: the batch ends with its last row; else other texts take the places of some."""
        self._model, self._ends, self._decoder = model, ends, request.decoder
        self._drafter: Any = request.drafter
        self._choice: Any = None
        self.by_tree: Any = None
        if not request.trees:
            return
        pair = model, request.drafter
        self._pair = *map(identity, pair), *map(jax.tree.structure, pair), model.partition
        is_cold = request.sampling.temperature_is_zero
        remembered = _remembered(request.trees, num_rows, is_cold, self._pair)
        self._choice = request.choice or remembered
        self._choice.begin(num_rows)
        self._next = 0, 0  # the tree of the next run, and its steps
        self._ran: Any = None  # arguments of `TreeChoice.told`, of runs with this tree so far
        depth = self._sizes[0].depth
        self.by_tree = np.zeros((num_rows, len(request.trees), depth + 1), int)
        self._no_text = jax.eval_shape(lambda: self._drafter.init(num_rows, *self._sizes))
        self._may_rest = self._drafter.inner_layers is None  # it reads tokens alone
        self._may_miss = self._may_rest and bool(jax.tree.leaves(self._no_text))
        self._read = np.full(num_rows, -1)  # tokens that the drafter has read; -1: all but the last

    @property
    def _sizes(self) -> tuple[TreeTopology, int]:
        return self._decoder.topology, self._decoder.max_length

    def reader(self, lengths: Any) -> Drafter | None:
        """The drafter, if it should read the prompts now: not if texts begin without drafts."""
        if self._choice is None or not self._may_miss:
            return self._drafter
        return None if of_first([self._choice.rests], lengths)[0] else self._drafter

    def begin(self, row: int) -> None:
        """A text begins in a row of a pool, and the drafter has read it."""
        if self._choice is not None:
            self.by_tree[row], self._read[row] = 0, -1
            self._choice.begin(len(self._read), [row])

    def run(
        self,
        decoder: SpeculativeDecoder,
        state: DecodeState,
        limits: Limits,
        sampling: Sampling,
        max_steps: int | None = None,
        stop_after_ended: int | None = None,
    ) -> DecodeState:
        """As `SpeculativeDecoder.run`, which donates the state; `decoder` may record more."""
        if self._choice is None:
            settings = limits, sampling, max_steps, stop_after_ended
            return decoder.run(self._model, self._drafter, state, *settings)
        leaves, structure = jax.tree.flatten((state._replace(drafter=None), limits, sampling))
        shapes = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        programs = [
            _program(
                dataclasses.replace(decoder, topology=tree),
                *(stop_after_ended is None, shapes, self._pair),
            )
            for tree in self._choice.trees
        ]
        left, to_end = MAX_STEPS if max_steps is None else max_steps, stop_after_ended
        most, before = on_host(limits.max_new_tokens), _Seen.of(state)
        seen = before
        while left > 0 and not seen.done.all() and to_end != 0:
            settings = limits, sampling, to_end
            number, steps = self._chosen(programs, state, settings, seen, most)
            state, new = self._quantum(
                programs[number], number, state, settings, seen, min(steps, left)
            )
            taken = max(1, int((new.step - seen.step).max()))
            left, self._next, seen = left - taken, (number, steps - taken), new
            if stop_after_ended is not None:
                to_end = max(0, stop_after_ended - int((seen.done & ~before.done).sum()))
        if seen.done.all():
            self._next = 0, 0
            self._tell()
        return state

    def caught_up(self, state: DecodeState, rows: np.ndarray | None = None) -> DecodeState:
        """The state in which the drafter has read the texts of these rows, of all by default."""
        if self._choice is None or not self._may_miss:
            return state
        context, drafts = state.context, state.drafter
        if drafts is None:
            self._read[:] = 0
            drafts = first_state(self._drafter, context.length, *self._sizes)
        missed = self._missed(on_host(context.length))
        missed = missed if rows is None else np.where(rows, missed, 0)
        if state.drafter is not None and not missed.any():
            return state
        while missed.any():
            count, first = np.minimum(missed, PIECE), self._read
            drafts = _after_piece(self._drafter, drafts, context, first, count)
            self._read, missed = first + count, missed - count
        return owned(state._replace(drafter=drafts), (self._model, self._drafter))

    def _missed(self, length: np.ndarray) -> np.ndarray:
        self._read = np.where(self._read < 0, length - 1, self._read)
        return length - 1 - self._read

    def _part(self, number: int, state: DecodeState) -> tuple[Drafter | None, DecodeState]:
        """The drafter and the state of a tree's program."""
        if number or not self._may_rest:
            return self._drafter, state
        return None, state._replace(drafter=None) if self._may_miss else state

    def _chosen(
        self,
        programs: "Sequence[_Program]",
        state: DecodeState,
        settings: Any,
        seen: "_Seen",
        most: np.ndarray,
    ) -> tuple[int, ...]:
        """The tree of the next steps, the same in all processes; compiles another one beside."""
        if self._next[1] > 0:
            return self._next
        self._tell()
        active, unread = ~seen.done, 0
        left = np.broadcast_to(most, active.shape) - seen.emitted if self._ends else None
        if self._may_miss:
            missed = self._missed(seen.length) if state.drafter is not None else seen.length
            unread = -(-int(missed[active].max()) // PIECE)
        can_wait = self._model.partition == ONE_DEVICE
        ready = np.array([program.is_ready for program in programs])
        if self._choice.seconds >= BESIDE_AFTER:
            failed = np.array([program.has_failed for program in programs])
            wanted = self._choice.wanted(active, left, ready | failed)
            if wanted is not None and can_wait:
                programs[wanted].compile_beside(self._compiler(programs, wanted, state, settings))
            elif wanted is not None:
                ready[wanted] = True
        return of_first(self._choice.next(active, left, ready, unread), state.done)

    def _quantum(
        self,
        program: "_Program",
        number: int,
        state: DecodeState,
        settings: Any,
        seen: "_Seen",
        steps: int,
    ) -> tuple[DecodeState, "_Seen"]:
        """Some steps with a tree, and what is known after them."""
        limits, sampling, to_end = settings
        if number:
            state = self.caught_up(state, ~seen.done)
        self._missed(seen.length)
        drafts, (drafter, state) = state.drafter, self._part(number, state)
        began = time.perf_counter()
        state = program.decoder.run(self._model, drafter, state, limits, sampling, steps, to_end)
        new = _Seen.of(state)
        seconds = time.perf_counter() - began if program.is_ready else None
        program.is_ready = True
        if drafter is None:
            state = state._replace(drafter=drafts)
        else:
            self._read = np.where(seen.done, self._read, new.length - 1)
        calls, accepted, ends, taken = (
            getattr(new, name) - getattr(seen, name)
            for name in ("calls", "accepted", "path_ends", "step")
        )
        accepted = np.pad(accepted, ((0, 0), (0, 1)))
        self.by_tree[:, number] -= np.diff(accepted, axis=1, prepend=calls[:, None])
        ends = ends[:, : program.decoder.topology.num_nodes]
        if self._ran is not None:  # more steps of the same choice
            _, steps, before, before_ends = self._ran
            taken, ends = taken + steps, ends + before_ends
            seconds = None if seconds is None or before is None else seconds + before
        self._ran = number, int(taken.max()), seconds, ends
        return state, new

    def _tell(self) -> None:
        ran, self._ran = self._ran, None
        if ran is not None:
            self._choice.told(*ran)

    def _compiler(
        self, programs: "Sequence[_Program]", number: int, state: DecodeState, settings: Any
    ) -> Callable[[], Any]:
        """A function that compiles a program, and what a drafter needs to read what it missed."""
        limits, sampling, to_end = settings
        where = state.done.sharding if state.done.committed else None
        drafts = self._no_text if self._may_miss else state.drafter
        drafter, state = self._part(number, state._replace(drafter=drafts))
        # Shapes: the state's arrays are donated meanwhile.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), state
        )
        decoder, model = programs[number].decoder, self._model

        def compiled() -> Any:
            with dispatch.on(model):
                if self._may_miss:
                    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), drafts)
                    tokens, length = jax.tree.map(
                        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes.context
                    )
                    first_state(self._drafter, length, *self._sizes)
                    texts = jax.device_put((ones, Context(tokens, length)), where)
                    _after_piece(self._drafter, *texts, length, length)
                arguments = model, drafter, shapes, limits, sampling, 1, to_end
                return decoder.run.lower(decoder, *arguments).compile()

        return compiled


class _Seen(NamedTuple):
    """What a choice depends on, as numbers on the host; fields as in `DecodeState`."""

    done: Any
    emitted: Any
    length: Any
    step: Any
    calls: Any
    accepted: Any
    path_ends: Any

    @classmethod
    def of(cls, state: DecodeState) -> "_Seen":
        counts = state.statistics
        arrays = state.done, state.emitted, state.context.length, state.step
        counted = counts.target_calls, counts.accepted_per_depth, counts.path_ends
        # Copies: the next run reuses the memory.
        return cls(*(np.array(part) for part in on_host((*arrays, *counted))))


class _Program:
    """Whether a program is compiled."""

    def __init__(self, decoder: SpeculativeDecoder | Any):
        self.decoder = decoder
        self.is_ready = self.has_failed = False
        self._compiled: Any = None  # jax holds it weakly

    def compile_beside(self, compiled: Callable[[], Any]) -> None:
        """Begins to compile it in a thread, unless another one is; Python's exit waits for it."""
        if not _COMPILING.acquire(blocking=False):
            return

        def work() -> None:
            try:
                self._compiled, self.is_ready = compiled(), True
            except Exception as error:
                self.has_failed = True
                warnings.warn(f"a tree is left out: its program failed: {error}", stacklevel=1)
            finally:
                _COMPILING.release()
                atexit.unregister(thread.join)

        thread = threading.Thread(target=work, daemon=True)
        atexit.register(thread.join)
        thread.start()


def _after_piece(drafter: Any, drafts: Any, context: Context, first: Any, count: Any) -> Any:
    """A drafter's state after it has read as many tokens of each row from `first` on."""
    places = jnp.asarray(first, jnp.int32), jnp.asarray(count, jnp.int32)
    first, count = placed_like(context.length, places)
    tokens = placed_like(context.length, tokens_from(context.tokens, first, PIECE))
    return drafter.read(drafts, tokens, None, count)


@functools.lru_cache(maxsize=64)
def _remembered(trees: tuple[TreeTopology, ...], *pair: Any) -> TreeChoice:
    """What earlier texts of a pair taught."""
    return TreeChoice(trees[1:])


@functools.lru_cache(maxsize=512)
def _program(decoder: SpeculativeDecoder, *arguments: Any) -> _Program:
    return _Program(decoder)
