"""Runs of a few steps, each with one tree: the ordinary loop, between choices on the host.

The state keeps the sizes of the largest tree; a run makes the record of its own tree, see
`SpeculativeDecoder.run`. A draft model that reads tokens alone does not run without drafts: what it
missed it reads, piece by piece, before it drafts again.

A program is compiled when it is first used. If that can wait, it is compiled beside, in a thread,
while those that are there run. On a mesh it waits for none: its processes must run alike.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding.drafters.base import Drafter, first_state, inner_layers
from stree_jax.decoding.loop import MAX_STEPS, SpeculativeDecoder, owned
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prefix.prefill import tokens_from
from stree_jax.decoding.programs import keep_room
from stree_jax.decoding.tree_choice import TreeChoice
from stree_jax.decoding.types import Context, DecodeState, Limits, Sampling, Statistics
from stree_jax.mesh.hosts import of_first, on_host
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.mesh.rows import placed_like
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

PIECE = 64  # tokens that a draft model reads at once when it has missed some
LEAST_RUNNING = 0.5  # seconds of runs, before which no other program is worth compiling
EMPTY_RUNS = 3  # of each program, without steps: what a run takes beside them
BESIDE = ThreadPoolExecutor(1)  # one program at a time is compiled; Python's exit waits for it


class Quanta:
    """The runs of a batch, or of the rows of a pool: with one tree, or with one after the other.

    Attributes:
        by_tree: `[B, K, D + 1]`, calls of each row with each tree, by their accepted drafts; None
            where there is one tree.
    """

    def __init__(self, request: Plan, model: HybridLM, num_rows: int, *, ends: bool):
        """`ends`: the batch ends with its last row; else other texts take the places of some."""
        keep_room()
        self._model, self._ends = model, ends
        self._drafter: Any = request.drafter
        self._sizes = request.decoder.topology, request.decoder.max_length
        self._choice: Any = None
        self.by_tree: Any = None
        if not request.trees:
            return
        kind = request.trees, num_rows, request.sampling.temperature_is_zero
        # A later pair whose arrays have these ids begins with another's choice, and may wait for
        # its programs. Flattening a model takes as long as some steps of a small one.
        weights = model.final_norm_scale[...], *jax.tree.leaves(request.drafter)
        known = _known(*kind, id(model), *map(id, weights))
        if known.pair is None:
            leaves, structure = jax.tree.flatten((model, request.drafter))
            where = model.partition, dispatch.device_of(leaves)
            known.pair = _pair(*kind, *where, structure, *map(jax.typeof, leaves))
        self._pair, self._choice = known.pair, request.choice or known.choice
        self._pair.texts += 1
        self._choice.begin(num_rows)
        self._next: tuple[int, ...] = 0, 0  # the tree of the next run, and its steps
        self._beside = 0.0  # seconds of these runs beside their steps
        self._ran: Any = None  # what `TreeChoice.told` is told of the runs that it stands for
        self.by_tree = np.zeros((num_rows, len(request.trees), self._sizes[0].depth + 1), int)
        self._may_rest = inner_layers(request.drafter) is None  # it reads tokens alone
        if self._pair.has_drafts is None:
            drafts = jax.eval_shape(lambda: self._drafter.init(num_rows, *self._sizes))
            self._pair.has_drafts = bool(jax.tree.leaves(drafts))
        self._may_miss = self._may_rest and self._pair.has_drafts
        self._read = np.full(num_rows, -1)  # tokens that the drafter has read; -1: all but the last

    def reader(self, lengths: Any) -> Drafter | None:
        """The drafter, if it should read the prompts now: not if texts begin without drafts."""
        rests = self._choice is not None and self._may_miss and self._choice.rests
        return None if of_first([rests], lengths)[0] else self._drafter

    def begin(self, row: int) -> None:
        """A text begins in a row of a pool, and the drafter has read it."""
        keep_room()
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
        settings: Any = limits, sampling, max_steps, stop_after_ended
        if self._choice is None:
            return decoder.run(self._model, self._drafter, state, *settings)
        left, to_end = MAX_STEPS if max_steps is None else max_steps, stop_after_ended
        leaves, structure = jax.tree.flatten((state._replace(drafter=None), limits, sampling))
        shapes = structure, *((leaf.shape, leaf.dtype) for leaf in leaves), to_end is None
        programs = self._pair.programs_of(decoder, self._choice.trees, shapes)
        most, seen = on_host(limits.max_new_tokens), _Seen.of(state)  # waits for the device
        counted = time.perf_counter()
        while left > 0 and not seen.done.all() and to_end != 0:
            settings = limits, sampling, to_end
            if self._next[1] <= 0:
                self._next = self._chosen(programs, state, settings, seen, most)
            number, steps = self._next
            # A program that is compiled, now or beside, takes the time of all.
            is_timed = number in programs.compiled and not self._pair.is_compiling
            programs.compiled.setdefault(number, True)
            began = time.perf_counter()
            drafter, state, drafts = self._parts(number, state, ~seen.done)
            parts = programs.decoders[number], drafter, limits, sampling, to_end
            # Runs that are timed alone: processes of a mesh might not agree on them.
            if is_timed and number not in programs.empty and state.done.is_fully_addressable:
                times = []
                for _ in range(EMPTY_RUNS):
                    state, _, seconds = self._timed(*parts, state, 0)
                    times.append(seconds)
                programs.empty[number] = min(times)
            counted += time.perf_counter() - began  # what a draft model missed has a price itself
            state, new, seconds = self._timed(*parts, state, min(steps, left))
            self._pair.count(seconds, is_timed)
            of_steps = None
            if is_timed:
                of_steps = max(seconds - programs.empty.get(number, 0.0), 0.25 * seconds)
            if drafter is None and self._may_miss:
                state = state._replace(drafter=drafts)
            else:
                self._read = np.where(seen.done, self._read, new.length - 1)
            before, counted = counted, time.perf_counter()
            taken = self._count(number, seen, new, of_steps, counted - before)
            left, self._next = left - taken, (number, steps - taken)
            if to_end is not None:
                to_end = max(0, to_end - int((new.done & ~seen.done).sum()))
            seen = new
        if seen.done.all():
            self._next = 0, 0
        return state

    def _timed(
        self,
        decoder: SpeculativeDecoder,
        drafter: Any,
        limits: Limits,
        sampling: Sampling,
        to_end: int | None,
        state: DecodeState,
        steps: int,
    ) -> tuple[DecodeState, "_Seen", float]:
        """A run of some steps, and its seconds."""
        began = time.perf_counter()
        state = decoder.run(self._model, drafter, state, limits, sampling, steps, to_end)
        return state, _Seen.of(state), time.perf_counter() - began

    def caught_up(self, state: DecodeState, rows: np.ndarray | None = None) -> DecodeState:
        """The state in which the drafter has read the texts of these rows, of all by default."""
        if self._choice is None or not self._may_miss:
            return state
        context, drafts = state.context, state.drafter
        if drafts is None:
            self._read[:] = 0
            drafts = first_state(self._drafter, context.length, *self._sizes)
        missed = self._missed(on_host(context.length)) * (True if rows is None else rows)
        if state.drafter is not None and not missed.any():
            return state
        began, pieces = time.perf_counter(), -(-int(missed.max()) // PIECE)
        for _ in range(pieces):
            count, first = np.minimum(missed, PIECE), self._read
            drafts = _after_piece(self._drafter, drafts, context, first, count)
            self._read, missed = first + count, missed - count
        jax.block_until_ready(drafts)
        if pieces:
            seconds = (time.perf_counter() - began) / pieces
            self._choice.reading = self._pair.reading = min(seconds, self._pair.reading)
        return owned(state._replace(drafter=drafts), (self._model, self._drafter))

    def _missed(self, length: np.ndarray) -> np.ndarray:
        self._read = np.where(self._read < 0, length - 1, self._read)
        return length - 1 - self._read

    def _parts(self, number: int, state: DecodeState, rows: Any) -> tuple[Any, DecodeState, Any]:
        """The drafter and the state for a run with a tree, and the drafter's state of before."""
        if number:
            state = self.caught_up(state, rows)
        drafts = state.drafter
        if number or not self._may_rest:
            return self._drafter, state, drafts
        return None, state._replace(drafter=None) if self._may_miss else state, drafts

    def _count(
        self, number: int, seen: "_Seen", new: "_Seen", seconds: float | None, in_all: float
    ) -> int:
        """Counts the calls of a run and its seconds, those of its steps and all; its steps."""
        counts = jax.tree.map(np.subtract, new.statistics, seen.statistics)
        accepted = np.pad(counts.accepted_per_depth, ((0, 0), (0, 1)))
        calls = counts.target_calls[:, None]
        self.by_tree[:, number] -= np.diff(accepted, axis=1, prepend=calls)
        ends = counts.path_ends[:, : self._choice.trees[number].num_nodes]
        taken = max(1, int((new.step - seen.step).max()))
        if self._ran is None:
            self._ran, self._beside = (number, 0, 0.0, 0), 0.0
        _, steps, before, ends_before = self._ran
        if seconds is not None:
            self._beside += in_all - seconds
        seconds = None if None in (seconds, before) else before + seconds
        self._ran = number, steps + taken, seconds, ends_before + ends
        if new.done.all() or self._next[1] <= taken:
            self._choice.beside = self._beside
            self._choice.told(*self._ran)
            self._ran = None
        return taken

    def _chosen(
        self, programs: "_Programs", state: DecodeState, settings: Any, seen: "_Seen", most: Any
    ) -> tuple[int, ...]:
        """The tree of the next steps, the same in all processes; compiles another one beside."""
        active, unread = ~seen.done, 0
        left = np.broadcast_to(most, active.shape) - seen.emitted if self._ends else None
        if self._may_miss:
            missed = seen.length if state.drafter is None else self._missed(seen.length)
            unread = -(-int(missed[active].max()) // PIECE)
        known = [programs.compiled.get(number) for number in range(len(self._choice.trees))]
        ready = np.array([is_known is True for is_known in known])
        may_compile = self._pair.pays_to_compile and not self._pair.is_compiling
        if not ready.all() and may_compile:
            tried = np.array([is_known is not None for is_known in known])
            wanted = self._choice.wanted(active, left, ready, tried)
            if wanted is not None and self._model.partition == ONE_DEVICE:
                compiler = self._compiler(wanted, programs.decoders[wanted], state, settings)
                self._pair.beside = compile_beside(programs.compiled, wanted, compiler)
            elif wanted is not None:
                ready[wanted] = True
        return of_first(self._choice.next(active, left, ready, unread), state.done)

    def _compiler(
        self, number: int, decoder: SpeculativeDecoder, state: DecodeState, settings: Any
    ) -> Callable[[], Any]:
        """A function that compiles a program, and what a drafter needs to read what it missed."""
        limits, sampling, to_end = settings
        where = state.done.sharding if state.done.committed else None
        # Shapes: the state's arrays are donated meanwhile.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), state
        )
        model, drafter = self._model, self._drafter

        def compiled() -> Any:
            part = shapes
            with dispatch.on(model):
                if self._may_miss:
                    texts = _ones(shapes.context, where)
                    drafts = first_state(drafter, texts.length, *self._sizes)
                    drafts = _ones(drafts, where)
                    _after_piece(drafter, drafts, texts, *[texts.length] * 2)
                    part = shapes._replace(drafter=drafts if number else None)
                drafts = drafter if number or not self._may_rest else None
                arguments = model, drafts, part, limits, sampling, 1, to_end
                return decoder.run.lower(decoder, *arguments).compile()

        return compiled


class _Seen(NamedTuple):
    """What a choice depends on, copied to the host, since the next run reuses the memory."""

    done: np.ndarray
    emitted: np.ndarray
    length: np.ndarray
    step: np.ndarray
    statistics: Statistics

    @classmethod
    def of(cls, state: DecodeState) -> "_Seen":
        arrays = state.done, state.emitted, state.context.length, state.step, state.statistics
        return cls(*jax.tree.map(np.array, on_host(arrays)))


def compile_beside(compiled: dict[Any, Any], name: Any, compiler: Callable[[], Any]) -> Future:
    """Compiles a program in a thread. `compiled[name]` is None meanwhile, False if it fails."""
    compiled[name] = None

    def work() -> None:
        try:
            with _short_waits():
                compiler()
            compiled[name] = True
        except Exception as error:
            compiled[name] = False
            warnings.warn(f"a tree is left out: its program failed: {error}", stacklevel=1)

    return BESIDE.submit(work)


@contextlib.contextmanager
def _short_waits() -> Iterator[None]:
    """Keeps threads that decode from waiting for one that traces, which is Python.

    They get the interpreter back sooner. What it collects meanwhile is new: a collection of all
    objects takes a tenth of a second and more.
    """
    interval, was_frozen = sys.getswitchinterval(), gc.get_freeze_count()
    sys.setswitchinterval(1e-4)
    gc.freeze()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if not was_frozen:
            gc.unfreeze()


def _after_piece(drafter: Any, drafts: Any, context: Context, first: Any, count: Any) -> Any:
    """A drafter's state after it has read as many tokens of each row from `first` on."""
    # Converted by NumPy: jax would compile a program for it, while a text waits.
    places = [jnp.asarray(np.asarray(place, np.int32)) for place in (first, count)]
    first, count = placed_like(context.length, places)
    tokens = placed_like(context.length, tokens_from(context.tokens, first, PIECE))
    return drafter.read(drafts, tokens, None, count)


def _ones(shapes: Any, where: Any) -> Any:
    """Arrays of these shapes, which no program makes."""
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    return jax.device_put(ones, where)


@dataclasses.dataclass
class _Programs:
    """Programs for a decoder and states of one shape: one for each tree, by its number.

    Attributes:
        decoders: the decoder with each tree.
        compiled: True: it is there; False: it has failed; None: a thread compiles it.
        empty: seconds of the fastest of some runs of no steps.
    """

    decoders: list[SpeculativeDecoder]
    compiled: dict[int, bool | None] = dataclasses.field(default_factory=dict)
    empty: dict[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Pair:
    """What texts of pairs of one shape compiled, and how long it took.

    Another program is worth compiling from the second text on, or in a text that takes as long as
    the first run, which compiled.
    """

    programs: dict[Any, _Programs] = dataclasses.field(default_factory=dict)
    beside: Future | None = None  # the last program that a thread compiles
    has_drafts: bool | None = None  # whether the drafter has a state
    reading: float = math.inf  # seconds in which the drafter reads a piece of a text
    texts: int = 0
    compiling: float = 0.0  # seconds of the first run
    running: float = 0.0  # of all others

    def programs_of(
        self, decoder: SpeculativeDecoder, trees: tuple[TreeTopology, ...], shapes: Any
    ) -> _Programs:
        """The programs for a decoder and states of these shapes."""
        if (decoder, shapes) not in self.programs:
            decoders = [dataclasses.replace(decoder, topology=tree) for tree in trees]
            self.programs[decoder, shapes] = _Programs(decoders)
        return self.programs[decoder, shapes]

    @property
    def is_compiling(self) -> bool:
        """True while a thread compiles."""
        return self.beside is not None and not self.beside.done()

    @property
    def pays_to_compile(self) -> bool:
        """True if another program is worth it."""
        return self.texts > 1 or self.running >= max(self.compiling, LEAST_RUNNING)

    def count(self, seconds: float, is_timed: bool) -> None:
        """Counts the time of a run."""
        if is_timed:
            self.running += seconds
        else:
            self.compiling = self.compiling or seconds


@functools.lru_cache(maxsize=64)
def _pair(*names: Any) -> _Pair:
    return _Pair()


@dataclasses.dataclass
class _Known:
    """Of texts of the same weights."""

    choice: TreeChoice  # what they taught
    pair: _Pair | None = None


@functools.lru_cache(maxsize=64)
def _known(trees: tuple[TreeTopology, ...], *names: Any) -> _Known:
    return _Known(TreeChoice(trees[1:]))
