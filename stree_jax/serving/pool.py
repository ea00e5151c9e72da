"""The rows of a scheduler on the device: texts enter and leave them between runs."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding import slots
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import Plan, Row, limits_of, placed_sampling, sampling_of
from stree_jax.decoding.prefix.prefix import (
    Prefix,
    cache_shapes,
    check_origin,
    fits,
    origin_of,
)
from stree_jax.decoding.quanta import Quanta
from stree_jax.decoding.results import Ended
from stree_jax.decoding.types import Limits
from stree_jax.mesh.hosts import on_host
from stree_jax.models.lm import HybridLM


class Pool:
    """The rows of one decode loop.

    Attributes:
        state: the loop's state, which calls donate; None at first.
        num_best: what the rows record, see `SpeculativeDecoder`.
        stop_sizes: of the automata of stops; None: no row has had stops.
    """

    def __init__(
        self,
        model: HybridLM,
        drafter: Drafter | None,
        plans: Mapping[bool, Plan | None],
        *,
        max_length: int,
        rows: int,
    ):
        self._model, self._drafter, self._plans = model, drafter, plans
        self._max_length = max_length
        (self._size,) = {plan.decoder.max_length for plan in plans.values() if plan}
        self._num_rows = rows
        self.num_best: int | None = None
        self.stop_sizes: tuple[int, int] | None = None
        self.state: Any = None
        self._started: set[int] = set()  # rows that have started since the last run
        self._tables: dict[int, Any] = {}  # of processors, on the mesh
        self._origin = origin_of(model, drafter)
        plan = plans[True] or plans[False]
        assert plan is not None
        self._quanta = Quanta(plan, model, rows, ends=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' caches and pending records; 0 at first."""
        state = self.state
        if state is None:
            return 0
        held = state.cache, state.pending, state.drafter
        return sum(leaf.nbytes for leaf in jax.tree.leaves(held))

    def program(self, greedy: bool) -> tuple[SpeculativeDecoder, Drafter | None]:
        """The decoder, with the records of the rows, and the drafter."""
        plan = self._plans[greedy]
        assert plan is not None  # the scheduler refuses such requests
        return dataclasses.replace(plan.decoder, num_best=self.num_best), plan.drafter

    def check(self, after: Prefix) -> None:
        """Refuses a prefix of another model, drafter or pool."""
        check_origin(after, self._model, self._drafter)
        if not fits(after.cache, cache_shapes(self._model, 1, self._size)):
            raise ValueError(
                "after has larger buffers than this pool, of max_length ="
                f" {self._max_length}, or several rows: it is of another Scheduler or of"
                " `generate`; read its text with this one"
            )

    @property
    def has_new_weights(self) -> bool:
        """True if weights of model or drafter were changed in place."""
        return self._origin != origin_of(self._model, self._drafter)

    def signed(self, prefix: Prefix) -> Prefix:
        """The prefix with the names of model and drafter, see `check`."""
        return prefix._replace(origin=self._origin)

    def start(self, row: int, plan: Plan, prefix: Prefix) -> None:
        """Starts a free row with a plan's settings and its text's prefix; again, if interrupted."""
        self._extend(plan)
        decoder, drafter = self.program(plan.rows[0].is_greedy)
        with dispatch.on(self._model):
            self._fit(decoder, drafter)
            new = [row], prefix, plan.keys
            with _uninterrupted():
                self.state = slots.insert(decoder, self._model, self.state, *new)
                self._quanta.begin(row)
        self._started.add(row)

    def run(self, rows: Mapping[int, Row], max_steps: int, stop_after_ended: int) -> list[int]:
        """Runs some steps of these rows, which have texts; returns those that have ended."""
        settings = self._settings(rows)
        decoder, drafter = self.program(all(row.is_greedy for row in settings))
        sampling = sampling_of(settings, may_differ=True)
        partition = self._model.partition
        sampling = placed_sampling(sampling, partition, self._tables)
        if partition.rows > 1:  # a shard that stopped would wait for the others
            stop_after_ended = self._num_rows
        self.state = slots.with_processors(self._model, self.state, sampling, self._started)
        self._started.clear()
        with dispatch.on(self._model):
            self._fit(decoder, drafter)
            with _uninterrupted():
                arguments = self._limits(rows), sampling, max_steps, stop_after_ended
                self.state = self._quanta.run(decoder, self.state, *arguments)
        done = on_host(self.state.done)
        return [row for row in sorted(rows) if done[row]]

    def ended(self, rows: Mapping[int, Row]) -> Ended:
        """The results of these rows so far."""
        return Ended.of(self.state, self._limits(rows), self._quanta.by_tree)

    def take(self, row: int) -> Prefix:
        """The prefix of the text in a row, which did not fail."""
        with dispatch.on(self._model):
            taken = np.arange(self._num_rows) == row
            self.state = self._quanta.caught_up(self.state, taken)
            return self.signed(slots.take(self.state, row))

    def new_tokens(self) -> list[np.ndarray]:
        """The new tokens so far of each row."""
        (tokens, ends), emitted = on_host((self.state.context, self.state.emitted))
        parts = zip(tokens, ends, emitted, strict=True)
        return [text[end - count : end] for text, end, count in parts]

    def _settings(self, rows: Mapping[int, Row]) -> list[Row]:
        return [rows.get(row, Row()) for row in range(self._num_rows)]

    def _limits(self, rows: Mapping[int, Row]) -> Limits:
        vocab_size = self._model.config.vocab_size
        limits = limits_of(self._settings(rows), vocab_size, self.stop_sizes)
        return self._model.partition.put_rows(limits)

    def _fit(self, decoder: SpeculativeDecoder, drafter: Drafter | None) -> None:
        """Gives the rows the records of a decoder."""
        if self.state is None:
            self.state = slots.empty(decoder, self._model, drafter, self._num_rows)
        self.state = slots.with_records(decoder, self.state)

    def _extend(self, plan: Plan) -> None:
        """Gives all rows what a text needs, in few sizes."""
        vocab_size, stopping = self._model.config.vocab_size, plan.rows[0].stopping
        num_best = plan.decoder.num_best
        if num_best is not None and num_best > (-1 if self.num_best is None else self.num_best):
            self.num_best = num_best
        if stopping:
            before = self.stop_sizes or (1, 1)
            states, classes = map(max, before, stopping.machine(vocab_size).sizes)
            self.stop_sizes = states, classes


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keeps Ctrl-C until the block has ended: a call that donates a state must store its result."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # no handler of Python runs here
        return
    came: list[Any] = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
