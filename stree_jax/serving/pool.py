"""The rows of a scheduler on the device: texts enter and leave them between runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding import slots
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import Plan, Row, limits_of, placed_sampling, sampling_of
from stree_jax.decoding.results import Ended
from stree_jax.decoding.text.prefix import (
    Prefix,
    cache_shapes,
    check_origin,
    fits,
    origin_of,
)
from stree_jax.decoding.tree_times import DraftHistory
from stree_jax.decoding.types import DecodeState, Limits
from stree_jax.mesh.hosts import on_host
from stree_jax.models.lm import HybridLM


class Pool:
    """The rows of one decode loop, with the settings of their texts."""

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
        (self._size,) = {found.decoder.max_length for found in plans.values() if found}
        self._rows: list[Row | None] = [None] * rows  # None: the row is free
        self._num_best: int | None = None  # what the rows record, see `SpeculativeDecoder`
        self._stop_sizes: tuple[int, int] | None = None  # of their automata; None: no row has stops
        self._state: Any = None
        self._started: set[int] = set()  # rows that have started since the last run
        self._tables: dict[int, Any] = {}  # of processors, on the mesh
        self._origin = origin_of(model, drafter)
        self._trees: DraftHistory | None = None  # of the last run, with a choice of trees

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' caches and pending records; 0 at first."""
        state = self._state
        if state is None:
            return 0
        held = state.cache, state.pending, state.drafter
        return sum(leaf.nbytes for leaf in jax.tree.leaves(held))

    def program(self, greedy: bool) -> tuple[SpeculativeDecoder, Drafter | None]:
        """The decoder, with the records of the rows, and the drafter."""
        found = self._plans[greedy]
        assert found is not None  # the scheduler refuses such requests
        return dataclasses.replace(found.decoder, num_best=self._num_best), found.drafter

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
        """True if model or drafter got other weights since the rows began, or `renew`."""
        return self._origin != origin_of(self._model, self._drafter)

    def renew(self) -> None:
        """Takes the weights that model and drafter have now; no row has a text.

        What texts before taught about drafts, which free rows keep too, was of the old weights.
        """
        self._state = self._trees = None
        self._origin = origin_of(self._model, self._drafter)

    def signed(self, prefix: Prefix) -> Prefix:
        """The prefix with the names of model and drafter, see `check`."""
        return prefix._replace(origin=self._origin)

    def start(self, row: int, plan: Plan, prefix: Prefix) -> None:
        """Starts a free row with a plan's settings and its text's prefix."""
        self._extend(plan)
        settings = plan.rows[0]
        decoder, drafter = self.program(settings.is_greedy)
        if self._trees is not None:
            prefix = prefix._replace(drafter=self._trees.begun(prefix.drafter, alone=False))
        with dispatch.on(self._model):
            self._fit(decoder, drafter)
            self._state = slots.insert(decoder, self._model, self._state, [row], prefix, plan.keys)
        self._started.add(row)
        self._rows[row] = settings

    def run(self, max_steps: int, stop_after_ended: int) -> list[int]:
        """Runs some steps; returns rows that ended and are not free."""
        greedy = all(row.is_greedy for row in self._settings())
        decoder, drafter = self.program(greedy)
        sampling = sampling_of(self._settings(), may_differ=True)
        partition = self._model.partition
        sampling = placed_sampling(sampling, partition, self._tables)
        if partition.rows > 1:  # a shard that stopped would wait for the others
            stop_after_ended = len(self._rows)
        self._state = slots.with_processors(self._model, self._state, sampling, self._started)
        self._started.clear()

        def run(state: DecodeState, limits: Limits, steps: int) -> DecodeState:
            settings = self._model, drafter, state, limits, sampling
            return decoder.run(*settings, steps, stop_after_ended)

        limits = self._limits()
        with dispatch.on(self._model):
            self._fit(decoder, drafter)
            if drafter is not None and drafter.choices:
                self._trees = DraftHistory(self._model, drafter, len(self._rows), sampling)
                self._trees.set_times(self._state, limits, run)
            self._state = run(self._state, limits, max_steps)
        done = on_host(self._state.done)
        running = [row for row, text in enumerate(self._rows) if text is not None]
        if self._trees is not None:
            choosing = on_host(self._state.drafter.choosing)
            self._trees.teach(jax.tree.map(lambda part: part[running], choosing))
        return [row for row in running if done[row]]

    def ended(self) -> Ended:
        """The results of all rows so far."""
        return Ended.of(self._state, self._limits())

    def take(self, row: int) -> Prefix:
        """The prefix of the text in a row, which did not fail."""
        with dispatch.on(self._model):
            return self.signed(slots.take(self._state, row))

    def release(self, row: int, *, has_ended: bool) -> None:
        """Frees a row."""
        self._rows[row] = None
        if not has_ended:
            self._state = slots.end(self._state, [row])

    def new_tokens(self) -> list[np.ndarray]:
        """The new tokens so far of each row."""
        (tokens, ends), emitted = on_host((self._state.context, self._state.emitted))
        parts = zip(tokens, ends, emitted, strict=True)
        return [text[end - count : end] for text, end, count in parts]

    def _settings(self) -> list[Row]:
        return [row or Row() for row in self._rows]

    def _limits(self) -> Limits:
        vocab_size = self._model.config.vocab_size
        limits = limits_of(self._settings(), vocab_size, self._stop_sizes)
        return self._model.partition.put_rows(limits)

    def _fit(self, decoder: SpeculativeDecoder, drafter: Drafter | None) -> None:
        """Gives the rows the records of a decoder."""
        if self._state is None:
            self._state = slots.empty(decoder, self._model, drafter, len(self._rows))
        self._state = slots.with_records(decoder, self._state)

    def _extend(self, plan: Plan) -> None:
        """Gives all rows what a text needs, in few sizes."""
        vocab_size, stopping = self._model.config.vocab_size, plan.rows[0].stopping
        num_best = plan.decoder.num_best
        if num_best is not None and num_best > (-1 if self._num_best is None else self._num_best):
            self._num_best = num_best
        if stopping:
            before = self._stop_sizes or (1, 1)
            states, classes = map(max, before, stopping.machine(vocab_size).sizes)
            self._stop_sizes = states, classes
