"""`Scheduler`: requests of any lengths share the rows of one decode loop."""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import dispatch
from stree_jax.checks import check_int
from stree_jax.decoding import slots
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.keys import typed_key
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import Plan, is_lossless, plan
from stree_jax.decoding.origins import check_origin, origin_of
from stree_jax.decoding.prefixes import cache_shapes, same_rows
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size, checked_prompts
from stree_jax.decoding.results import Ended
from stree_jax.decoding.rows import Row, check_together, limits_of, sampling_of
from stree_jax.decoding.types import Limits, Prefix
from stree_jax.decoding.verifiers import Verifier
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.serving import outcomes
from stree_jax.serving.types import Completion, Event, Job, Request
from stree_jax.tree import TreeTopology

_FEWEST_BEST = 4  # tokens that rows record, if any


class Scheduler:
    """Continuous batching: when a row ends, the next request takes its slot.

    Requests are served first come, first served. A request's tokens are those that `generate` gives
    for its prompt alone with `key=[key]` (as an array), whatever else is running, in any row and at
    any time: in float32, near ties excepted.

        scheduler = Scheduler(model, rows=8, max_length=1024)
        ids = [scheduler.submit(Request(prompt, max_new_tokens=100)) for prompt in prompts]
        for completion in scheduler.completions():
            print(completion.request_id, completion.tokens)

    Prefill happens when a row is free, between decode steps. Requests at temperature 0 and above it
    share the rows if the verifier follows the target, as it does by default.

    Args:
        model: the target.
        rows: number of requests that decode at the same time.
        max_length: most tokens of a request, prompt and output. Attention caches have room for it
            in every row.
        drafter, topology, verifier: see `generate`; the same for all requests.
        quantum: decode steps per scheduling interval.

    Raises:
        ValueError: a bad argument, a drafter and a verifier that are not exact together, a lossy
            verifier, or a model on a mesh.
    """

    def __init__(
        self,
        model: HybridLM,
        *,
        rows: int,
        max_length: int,
        drafter: Drafter | None = None,
        topology: TreeTopology | None = None,
        verifier: str | Verifier | None = None,
        quantum: int = 32,
    ):
        check_on_one_device(model, "Scheduler")
        check_int("rows", rows, 1)
        check_int("max_length", max_length, 2, MAX_TOKENS)
        check_int("quantum", quantum, 1)
        if not is_lossless(verifier):
            raise ValueError(
                f"verifier {shown(verifier)} is lossy, and a Scheduler gives the target's own"
                " texts; leave verifier out, or use generate(..., lossy=True)"
            )
        self._model, self._drafter, self._verifier = model, drafter, verifier
        self._max_length, self._quantum = max_length, quantum
        self._topology = topology
        # At temperature 0 and above it; None where the verifier refuses.
        self._plans = {greedy: self._planned(greedy) for greedy in (True, False)}
        if not any(self._plans.values()):
            self._plan_of([0], Request([0], max_new_tokens=1))  # raises
        self._queue: collections.deque[Job] = collections.deque()
        self._tenants: list[Job | None] = [None] * rows
        self._outcomes = outcomes.Outcomes()
        self._num_submitted = 0
        # What the rows record, and whether they have stops, see `SpeculativeDecoder`.
        self._num_best: int | None = None
        self._has_stops, self._stop_sizes = False, (1, 1)
        self._state: Any = None
        self._cache: Any = None  # shapes of a row's
        self._filled: set[int] = set()  # rows that have started since the last run

    @property
    def model(self) -> HybridLM:
        """The target."""
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes of the caches and pending records of all rows, with the drafter's; 0 at first."""
        state = self._state
        if state is None:
            return 0
        return sum(
            leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.pending, state.drafter))
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return sum(job is not None for job in self._tenants)

    def submit(self, request: Request) -> int:
        """Queues a request.

        Returns:
            The request's id, counted from 0.

        Raises:
            ValueError: a bad value, a prefix of another model, drafter or pool, a request that is
                longer than `max_length`, or one at temperature 0 among sampled ones (or the other
                way round) with a verifier that tests drafts.
        """
        text = request.prompt
        if request.after is not None:
            self._check_after(request.after)
            tokens, length = request.after.context
            text = [*np.asarray(tokens)[0, : int(length[0])].tolist(), *request.prompt]
        checked = self._plan_of(text, request)
        job = Job(self._num_submitted, request, checked, time.perf_counter())
        self._check_can_share_batch(job, checked.decoder.verifier)
        self._queue.append(job)
        self._num_submitted += 1
        return job.request_id

    def completions(self) -> Iterator[Completion]:
        """Decodes, and yields requests as they end, until none is left.

        Requests may be submitted and cancelled meanwhile. You may stop iterating: the next call
        resumes, and so does `events`.
        """
        while True:
            yield from self._outcomes.completions()
            if not self._advance():
                return

    def events(self) -> Iterator[Event]:
        """Decodes, and yields new tokens of each request after every quantum, until none is left.

        A request's tokens in their order are those of its completion. Tokens that a stop may still
        cut are held back. Its last event, and no other, has a `finish_reason`.

        Events are kept from the first call on. Its completion, which `completions` or `pop` gives,
        is kept too. Both iterators may be stopped, resumed and used in turns: each event and each
        completion is given once.
        """
        self._outcomes.follow()
        return self._events()

    def _events(self) -> Iterator[Event]:
        while True:
            yield from self._outcomes.events()
            if not self._advance():
                return
            self._report()

    def pop(self, request_id: int) -> Completion:
        """The completion of a request that has ended; `completions` does not give it then.

        Raises:
            ValueError: the request has not ended, or its completion was given before.
        """
        completion = self._outcomes.pop(self._checked_id(request_id))
        if completion is None:
            raise ValueError(
                f"request {request_id} has not ended, or its completion was given before; events()"
                " says when it ends"
            )
        return completion

    def cancel(self, request_id: int) -> None:
        """Ends a request that waits or runs, with the tokens so far and the reason "cancelled".

        Its row is free in the next interval. With `keep` its text can go on, if it had a row.

        Raises:
            ValueError: no such request, or one that has ended, also if that was not given yet.
        """
        request_id = self._checked_id(request_id)
        for place, job in enumerate(self._queue):
            if job.request_id == request_id:
                del self._queue[place]
                self._outcomes.ended(job, outcomes.of_waiting(job, time.perf_counter()))
                return
        for row, tenant in enumerate(self._tenants):
            if tenant is not None and tenant.request_id == request_id:
                self._empty([row], cancelled=True)
                self._state = slots.end(self._state, [row])
                return
        raise ValueError(f"request {request_id} has ended, and cannot be cancelled")

    def _checked_id(self, request_id: int) -> int:
        request_id = check_int("request_id", request_id, 0)
        if request_id >= self._num_submitted:
            raise ValueError(
                f"request_id = {request_id}: {self._num_submitted} requests were submitted, and"
                " submit returns their ids, from 0"
            )
        return request_id

    def read(self, prompt: Sequence[int], after: Prefix | None = None) -> Prefix:
        """Prefills a prompt once, to be shared by any number of requests.

        Args:
            prompt: token ids.
            after: the prefix before the prompt, from `read` or from a completion.

        Raises:
            ValueError: not token ids, more than `max_length` of them, or a prefix of another model,
                drafter or pool.
        """
        if after is not None:
            self._check_after(after)
        context = checked_prompts([prompt], self._model.config.vocab_size)
        total = len(prompt) + (0 if after is None else int(after.context.length[0]))
        if total > self._max_length:
            raise ValueError(f"the text has {total} tokens, and max_length is {self._max_length}")
        decoder, drafter = self._program(greedy=bool(self._plans[True]))
        with dispatch.on(self._model):
            prefix = slots.read(decoder, self._model, drafter, context, after)
        return self._signed(prefix)

    def _signed(self, prefix: Prefix) -> Prefix:
        return prefix._replace(origin=origin_of(self._model, self._drafter))

    def _check_after(self, after: Prefix) -> None:
        """Refuses a prefix of another model, drafter or pool, which would end all requests."""
        check_origin(after, self._model, self._drafter)
        decoder, _ = self._program(greedy=bool(self._plans[True]))
        if self._cache is None:
            self._cache = cache_shapes(self._model, 1, decoder.max_length)
        is_row = after.context.tokens.shape == (1, decoder.num_places)
        if not (is_row and same_rows(self._cache, after.cache)):
            raise ValueError(
                f"after has other buffers than this pool, of max_length = {self._max_length}: it is"
                " of another Scheduler or of `generate`; read its text with this one"
            )

    def _plan_of(self, text: Sequence[int], request: Request) -> Plan:
        longest = request.max_length
        own = dataclasses.replace(
            request,
            max_length=self._max_length if longest is None else min(longest, self._max_length),
            key=_no_key() if request.temperature == 0 else _as_row(request.key),
        )
        return plan(
            self._model,
            [text],
            own,
            drafter=self._drafter,
            topology=self._topology,
            verifier=self._verifier,
        )

    def _planned(self, greedy: bool) -> Plan | None:
        """The program for requests of the scheduler's length."""
        request = Request(
            [0],
            max_new_tokens=self._max_length - 1,
            temperature=0.0 if greedy else 1.0,
            key=jax.random.key(0),
        )
        try:
            return self._plan_of([0], request)
        except ValueError:
            return None

    def _program(self, greedy: bool) -> tuple[SpeculativeDecoder, Drafter | None]:
        found = self._plans[greedy]
        assert found is not None  # submit refuses such requests
        decoder = dataclasses.replace(
            found.decoder, num_best=self._num_best, has_stops=self._has_stops
        )
        return decoder, found.drafter

    def _check_can_share_batch(self, job: Job, verifier: Verifier) -> None:
        """Refuses to mix filters of other kinds, and temperature 0 and others where it cannot."""
        others = [*self._queue, *(tenant for tenant in self._tenants if tenant)]
        sampled = self._plans[False]
        rule = sampled.decoder.verifier if sampled else verifier
        apart = "use another scheduler for these requests"
        rows = [other.row for other in others]
        check_together(job.row, rows, rule, "requests that wait or run", apart)

    def _fill(self) -> None:
        """Gives free rows to the requests that have waited longest."""
        for row, tenant in enumerate(self._tenants):
            if tenant is not None or not self._queue:
                continue
            job = self._queue.popleft()
            job.began = time.perf_counter()
            self._extend(job)
            decoder, drafter = self._program(job.row.is_greedy)
            with dispatch.on(self._model):
                if self._state is None:
                    self._state = slots.empty(decoder, self._model, drafter, len(self._tenants))
                self._state = slots.extended(decoder, self._state)
                self._filled.add(row)
                prefix = job.request.after
                if prefix is None:
                    prefix = slots.read(decoder, self._model, drafter, job.plan.context)
                elif len(job.request.prompt):
                    more = checked_prompts([job.request.prompt], self._model.config.vocab_size)
                    prefix = slots.read(decoder, self._model, drafter, more, prefix)
                else:
                    prefix = slots.prepared(decoder, drafter, self._state, prefix)
                self._state = slots.insert(
                    decoder, self._model, self._state, [row], prefix, job.plan.keys
                )
            self._tenants[row] = job

    def _extend(self, job: Job) -> None:
        """Gives all rows what this request needs; few sizes, so that requests share programs."""
        num_best = job.request.num_best
        if num_best is not None and num_best > (-1 if self._num_best is None else self._num_best):
            size = buffer_size(num_best, _FEWEST_BEST) if num_best else 0
            self._num_best = min(size, self._model.config.vocab_size)
        if stopping := job.row.stopping:
            self._has_stops = True
            sizes = stopping.machine(self._model.config.vocab_size).sizes
            self._stop_sizes = (
                max(self._stop_sizes[0], sizes[0]),
                max(self._stop_sizes[1], sizes[1]),
            )

    def _advance(self) -> bool:
        """Fills free rows and runs; False if there was nothing to run."""
        self._fill()
        if not self.num_running:
            return False
        self._run()
        self._collect()
        return True

    def _run(self) -> None:
        """Runs until a row has ended that a waiting request can take, or for one quantum."""
        jobs = [job for job in self._tenants if job is not None]
        greedy = all(job.row.is_greedy for job in jobs)
        decoder, drafter = self._program(greedy)
        limits = self._limits()
        sampling = sampling_of(self._rows(), greedy=greedy, may_differ=True)
        self._state = slots.with_processors(self._model, self._state, sampling, self._filled)
        self._filled.clear()
        ended = 1 if self._queue else len(jobs)
        with dispatch.on(self._model):
            self._state = decoder.run(
                *(self._model, drafter, self._state, limits, sampling), self._quantum, ended
            )

    def _limits(self) -> Limits:
        sizes = self._stop_sizes if self._has_stops else None
        return limits_of(self._rows(), self._model.config.vocab_size, sizes)

    def _rows(self) -> list[Row]:
        return [job.row if job else Row() for job in self._tenants]

    def _collect(self) -> None:
        """Empties the rows that have ended."""
        done = np.array(self._state.done)
        rows = [row for row, job in enumerate(self._tenants) if job is not None and done[row]]
        if rows:
            self._empty(rows)

    def _empty(self, rows: Sequence[int], *, cancelled: bool = False) -> None:
        """Takes the requests of these rows out."""
        ended = Ended.of(self._state, self._limits())
        now = time.perf_counter()
        for row in rows:
            job = self._tenants[row]
            assert job is not None
            self._tenants[row] = None
            prefix = None
            if job.request.keep and not ended.failed[row]:
                decoder, drafter = self._program(job.row.is_greedy)
                with dispatch.on(self._model):
                    prefix = self._signed(slots.take(decoder, drafter, self._state, row))
            completion = outcomes.of_row(job, ended, row, prefix, now, cancelled=cancelled)
            self._outcomes.ended(job, completion)

    def _report(self) -> None:
        """Makes events of the new tokens in rows that go on."""
        context, emitted = self._state.context, np.asarray(self._state.emitted)
        tokens, ends = np.asarray(context.tokens), np.asarray(context.length)
        for row, job in enumerate(self._tenants):
            if job is not None:
                new = tokens[row, ends[row] - emitted[row] : ends[row]]
                self._outcomes.grown(job, new.tolist())


@functools.cache
def _no_key() -> jax.Array:
    """A key for requests at temperature 0, which draw no random numbers."""
    return jax.random.key(0)[None]


def _as_row(key: Any) -> Any:
    """A single key, the data of one or a seed, as the keys of a batch of one."""
    if key is None:
        return None
    key = typed_key(key)
    return key if key.ndim else key[None]
