"""`Scheduler`: requests of any lengths share the rows of one decode loop."""

import collections
import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checks import check_int
from stree_jax.decoding import slots
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import MAX_STEPS
from stree_jax.decoding.plan import Plan, Row, check_together, plan
from stree_jax.decoding.prefix.prefix import Prefix, continued_texts, same_rows
from stree_jax.decoding.prompts import MAX_TOKENS, checked_places, checked_prompts, typed_key
from stree_jax.decoding.verifiers import Verifier, verifier_of
from stree_jax.decoding.way import Topology, Way
from stree_jax.mesh.hosts import on_host
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.serving import outcomes
from stree_jax.serving.pool import Pool
from stree_jax.serving.prefill import Prefill, Prefiller
from stree_jax.serving.prefix_cache import PrefixCacheStats
from stree_jax.serving.types import Completion, Event, Job, Request

_STEPS_WHILE_READING = 8  # rows that wait for their prompts are idle


class Scheduler:
    """Continuous batching: when a row ends, the next request takes its slot.

    Requests are served first come, first served. A request's tokens are those that `generate` gives
    for its prompt alone with `key=[key]` (as an array), whatever else is running, in any row and at
    any time.

        scheduler = Scheduler(model, rows=8, max_length=1024)
        ids = [scheduler.submit(Request(prompt, max_new_tokens=100)) for prompt in prompts]
        for completion in scheduler.completions():
            print(completion.request_id, completion.tokens)

    Prompts of requests that have a row are read in chunks, between runs of decode steps. Requests
    at temperature 0 and above it share the rows if the verifier follows the target, as it does by
    default.

    Ctrl-C loses nothing but what is being handed over: the next call goes on, with the same texts.

    On a mesh of several processes all of them call the same methods with the same contents, which
    is not checked, and iterate in step; all get all completions and events.

    Args:
        model: the target.
        rows: number of requests that decode at the same time; on a mesh a multiple of the size of
            "data".
        max_length: most tokens of a request, prompt and output. Attention caches have room for it
            in every row.
        drafter, topology, verifier, to_the_bit: see `generate`; the same for all requests.
        quantum: decode steps per scheduling interval; at most 8 while prompts are read.
        prefill_tokens: tokens of prompts that are read between two runs of decode steps, while rows
            decode; None: whole prompts.
        prefix_cache_bytes: bytes of prefixes of texts that are kept for requests that begin with
            them; 0: none. They are kept at ends of prompts, every `prefix_every` tokens of prompts,
            where prompts part, and at ends of completions with `keep`. The least recently used go.
        prefix_every: tokens; None: never inside prompts but where they part.

    Raises:
        ValueError: a bad argument, a drafter and a verifier that are not exact together, a lossy
            verifier, texts that are not equal to the bit and should be, or a number of rows that
            the shards of a mesh cannot share equally.
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        model: HybridLM,
        *,
        rows: int,
        max_length: int,
        drafter: Drafter | None = None,
        topology: Topology | None = None,
        verifier: str | Verifier | None = None,
        to_the_bit: bool = False,
        quantum: int = 32,
        prefill_tokens: int | None = 512,
        prefix_cache_bytes: int = 0,
        prefix_every: int | None = 512,
    ):
        check_model(model)
        slots.check_rows(model, rows)
        check_int("max_length", max_length, 2, MAX_TOKENS)
        check_int("quantum", quantum, 1, MAX_STEPS)
        check_int("prefix_cache_bytes", prefix_cache_bytes, 0)
        optional = dict(prefill_tokens=prefill_tokens, prefix_every=prefix_every)
        for name, value in optional.items():
            if value is not None:
                check_int(name, value, 1)
        if verifier is not None and not verifier_of(verifier).lossless:
            raise ValueError(
                f"verifier {shown(verifier)} is lossy, and a Scheduler gives the target's own"
                " texts; leave verifier out, or use generate(..., lossy=True)"
            )
        self._num_rows, self._max_length, self._quantum = rows, max_length, quantum
        self._no_key = typed_key([0])  # at temperature 0 nothing is drawn
        self._keeping = prefix_cache_bytes, prefix_every
        self._take(model, Way(drafter, topology, verifier, to_the_bit=to_the_bit))
        self._prefill_tokens = prefill_tokens
        # What changes together is replaced by one statement, after all calls that make it: Python
        # handles signals at calls and jumps, so that an interrupt comes before or after it.
        self._queue: tuple[Job, ...] = ()
        self._tenants: Mapping[int, Job] = {}  # by row, in the order in which they began
        self._outcomes = outcomes.Outcomes({}, None, {})
        self._num_submitted = 0

    @property
    def model(self) -> HybridLM:
        """The target."""
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' caches and pending records; 0 at first."""
        return self._pool.nbytes

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts and sizes of the prefix cache."""
        return self._prefiller.stats

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._tenants)

    @jax.transfer_guard("allow")
    def submit(self, request: Request | Any) -> int:
        """Queues a request.

        Returns:
            The request's id, counted from 0.

        Raises:
            ValueError: a bad value, a prefix of another model, drafter or pool, a request that is
                longer than `max_length`, or one at temperature 0 among sampled ones (or the other
                way round) with a verifier that tests drafts.
        """
        if not isinstance(request, Request):
            raise ValueError(
                f"request must be a Request, got {shown(request)}; submit(st.Request([1, 2, 3]))"
            )
        self._check_weights()
        checked = self._plan_of(request)
        job = Job(self._num_submitted, request, checked, time.perf_counter())
        jobs = (job, *self._queue, *self._tenants.values())
        rows = [one.plan.rows[0] for one in jobs]
        rule = (self._sampled or checked).decoder.verifier
        where, apart = "requests that wait or run", "use another scheduler for these requests"
        check_together(rows, rule, where, apart)
        self._queue, self._num_submitted = (*self._queue, job), job.request_id + 1
        return job.request_id

    def completions(self) -> Iterator[Completion]:
        """Decodes, and yields requests as they end, until none is left.

        Requests may be submitted and cancelled meanwhile. You may stop iterating: the next call
        resumes, and so does `events`.
        """
        while True:
            while waiting := self._outcomes.completions:
                # `map` takes and gives at once; between `pop` and `yield` an interrupt may come.
                yield from map(waiting.pop, [next(iter(waiting))])
            if not self._advance():
                return

    def events(self) -> Iterator[Event]:
        """Decodes, and yields each request's new tokens after every quantum.

        A request's tokens in their order are those of its completion. Tokens that a stop may still
        cut are held back. Its last event, and no other, has a `finish_reason`.

        Events are kept from the first call on. Its completion, which `completions` or `pop` gives,
        is kept too. Both iterators may be stopped, resumed and used in turns: each event and each
        completion is given once.
        """
        self._outcomes = self._outcomes.followed()
        return self._events()

    def _events(self) -> Iterator[Event]:
        while True:
            while waiting := self._outcomes.events:
                yield from map(collections.deque.popleft, [waiting])
            if not self._advance():
                return
            decoding = sorted(self._decoding())
            tokens = self._pool.new_tokens() if decoding else []
            for row in decoding:
                self._outcomes = self._outcomes.grown(self._tenants[row], tokens[row])

    @jax.transfer_guard("allow")
    def pop(self, request_id: int) -> Completion:
        """Returns the completion of a request, which is not given again.

        Raises:
            ValueError: the request has not ended, or its completion was given before.
        """
        if self._checked_id(request_id) not in self._outcomes.completions:
            raise ValueError(
                f"request {request_id} has not ended, or its completion was given before; events()"
                " says when it ends"
            )
        return self._outcomes.completions.pop(request_id)

    @jax.transfer_guard("allow")
    def cancel(self, request_id: int) -> None:
        """Ends a request with the tokens so far and the reason "cancelled".

        Its row is free in the next interval. With `keep` its text can be continued if it had a row.

        Raises:
            ValueError: no such request, or one that has ended, also if that was not given yet.
        """
        request_id = self._checked_id(request_id)
        now = time.perf_counter()
        for job in self._queue:
            if job.request_id == request_id:
                ended = self._outcomes.ended(job, outcomes.of_waiting(job, now))
                queue = tuple(one for one in self._queue if one is not job)
                self._queue, self._outcomes = queue, ended
                return
        for row, tenant in self._tenants.items():
            if tenant.request_id == request_id:
                if tenant.prefill is not None:
                    self._end(row, outcomes.of_waiting(tenant, now), self._pool.state)
                else:
                    self._empty([row], cancelled=True)
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

    @jax.transfer_guard("allow")
    def read(
        self, prompt: Sequence[int], after: Prefix | None = None, *, keep: Sequence[int] | Any = ()
    ) -> Prefix:
        """Prefills a prompt once, to be shared by any number of requests.

        Args:
            prompt: token ids.
            after: the prefix before the prompt, from `read` or from a completion.
            keep: positions in the whole text, such as the ends of a chat's turns: the prefix cache
                keeps the state after so many tokens, for texts that begin with them.

        Raises:
            ValueError: not token ids, more than `max_length` of them, a prefix of another model,
                drafter or pool, positions outside of the text or before the end of `after`, or no
                prefix cache for them.
        """
        texts = checked_prompts([prompt], self._model.config.vocab_size)
        self._check_weights()
        if after is not None:
            self._pool.check(after)
            texts = continued_texts(after, texts)
        text = texts[0].tolist()
        if len(text) > self._max_length:
            raise ValueError(
                f"the text has {len(text)} tokens, and max_length is {self._max_length}"
            )
        have = 1 if after is None else int(on_host(after.context.length)[0])
        places = checked_places(keep, have, len(text))
        if places and not self._keeping[0]:
            raise ValueError(f"keep = {places} needs a prefix cache: prefix_cache_bytes=2**28")
        for place in (*places, len(text)):  # the cache keeps what is read to its end
            prefill = self._prefiller.begin(text[:place], after)
            self._prefiller.advance([prefill], None)
            after = prefix = self._pool.signed(self._prefiller.prefix(prefill))
        return prefix

    @jax.transfer_guard("allow")
    def update(self, model: HybridLM, drafter: Drafter | None = None) -> None:
        """Takes other weights of the same shapes, for which nothing is compiled.

        Requests that have a row end first, with the old weights; `completions` and `events` give
        what they have not given yet. Requests that wait keep their places, and are of the new
        weights alone: one with `after` reads its whole text. What the prefix cache keeps goes, and
        prefixes of the old weights are refused.

        Args:
            model: the target.
            drafter: None: the one before, of whose drafts fewer may be accepted.

        Raises:
            ValueError: another config, mesh or storage of weights than before, other settings of
                the drafter, or old weights that were changed in place while requests have rows.
        """
        drafter = self._way.drafter if drafter is None else drafter
        if not same_rows((model, drafter), (self._model, self._way.drafter)):
            raise ValueError(
                "the new model or drafter has other settings or arrays than the one before: give"
                " one of the same config, dtypes, storage of weights and mesh, or make another"
                " Scheduler"
            )
        self._check_weights()
        while self._tenants:
            self._run()
        self._renew(model, drafter)

    def _check_weights(self) -> None:
        """Forgets what weights have read that were changed in place since."""
        if not self._pool.has_new_weights:
            return
        if running := sorted(job.request_id for job in self._tenants.values()):
            raise ValueError(
                "the weights of the model or of the drafter have changed, and requests"
                f" {shown(running)} have texts that the old ones read: cancel them, or put the old"
                " weights back until they have ended; update(model) ends them first"
            )
        self._renew(self._model, self._way.drafter)

    def _renew(self, model: HybridLM, drafter: Drafter | None) -> None:
        """Decodes with these weights from now on; no request has a row."""
        new, old = copy.copy(self), self._pool
        new._take(model, dataclasses.replace(self._way, drafter=drafter))
        new._pool.num_best, new._pool.stop_sizes = old.num_best, old.stop_sizes  # for programs
        for job in self._queue:  # prefixes are of the old weights, and plans have the whole texts
            job.request = dataclasses.replace(job.request, after=None)
        vars(self).update(vars(new))

    def _take(self, model: HybridLM, way: Way) -> None:
        """Makes what depends on weights."""
        self._model, self._way = model, way
        # At temperature 0 and above it; None where the verifier refuses.
        plans = {greedy: self._planned(greedy) for greedy in (True, False)}
        if not any(plans.values()):
            self._plan_of(Request([0], max_new_tokens=1))  # raises
        self._sampled = plans[False]
        rows = self._num_rows
        self._pool = Pool(model, way.drafter, plans, max_length=self._max_length, rows=rows)
        decoder, drafts = self._pool.program(bool(plans[True]))
        self._prefiller = Prefiller(decoder, model, drafts, *self._keeping)

    def _plan_of(self, request: Request) -> Plan:
        if request.after is not None:
            self._pool.check(request.after)
        longest = request.max_length
        key = self._no_key if request.temperature == 0 else request.key
        options = dataclasses.replace(
            request,
            max_length=self._max_length if longest is None else min(longest, self._max_length),
            key=None if key is None else jnp.atleast_1d(typed_key(key)),
        )
        return plan(
            self._model,
            [request.prompt],
            options,
            after=request.after,
            **self._way,
        )

    def _planned(self, greedy: bool) -> Plan | None:
        """The program for requests of the scheduler's length."""
        request = Request(
            [0], max_new_tokens=self._max_length - 1, temperature=0.0 if greedy else 1.0, key=0
        )
        try:
            return self._plan_of(request)
        except ValueError:
            return None

    def _fill(self) -> None:
        """Gives free rows to the requests that have waited longest."""
        free = [row for row in range(self._num_rows) if row not in self._tenants]
        for row in free[: len(self._queue)]:
            job = self._queue[0]
            job.began = time.perf_counter()
            tokens, length = (np.asarray(part)[0] for part in job.plan.context)
            job.prefill = self._prefiller.begin(
                tokens[:length].tolist(), job.request.after, self._prefills()
            )
            self._tenants, self._queue = {**self._tenants, row: job}, self._queue[1:]

    def _prefills(self) -> list[Prefill]:
        return [job.prefill for job in self._tenants.values() if job.prefill is not None]

    def _decoding(self) -> dict[int, Row]:
        """The settings of rows whose prompts are read."""
        jobs = self._tenants.items()
        return {row: job.plan.rows[0] for row, job in jobs if job.prefill is None}

    def _read(self) -> None:
        """Reads chunks of prompts, and starts the rows whose prompts are done."""
        self._prefiller.advance(self._prefills(), self._prefill_tokens)
        for row, job in self._tenants.items():
            if job.prefill is not None and job.prefill.is_done:
                self._pool.start(row, job.plan, self._prefiller.prefix(job.prefill))
                job.prefill = None

    @jax.transfer_guard("allow")
    def _advance(self) -> bool:
        """Fills free rows and runs; False if there was nothing to run."""
        self._check_weights()
        self._fill()
        if not self._tenants:
            return False
        self._run()
        return True

    def _run(self) -> None:
        """Reads and decodes for an interval."""
        self._read()
        if rows := self._decoding():
            # Until a row has ended that a waiting request can take, or for one quantum.
            ended = 1 if self._queue else len(rows)
            reads = len(rows) < len(self._tenants)
            steps = min(self._quantum, _STEPS_WHILE_READING) if reads else self._quantum
            if done := self._pool.run(rows, steps, ended):
                self._empty(done)

    def _empty(self, rows: Sequence[int], *, cancelled: bool = False) -> None:
        """Takes the requests of these rows out."""
        ended = self._pool.ended(self._decoding())
        now = time.perf_counter()
        for row in rows:
            job = self._tenants[row]
            keeps = job.request.keep and not ended.failed[row] and not self._pool.has_new_weights
            prefix = self._pool.take(row) if keeps else None
            if prefix is not None:
                tokens = ended.context.tokens[row][: int(ended.context.length[row])]
                self._prefiller.keep(tokens.tolist(), prefix)
            completion = outcomes.of_row(job, ended, row, prefix, now, cancelled=cancelled)
            state = self._pool.state
            self._end(row, completion, slots.end(state, [row]) if cancelled else state)

    def _end(self, row: int, completion: Completion, state: Any) -> None:
        """Frees a row, with the state of the loop after that."""
        tenants = {place: job for place, job in self._tenants.items() if place != row}
        ended = self._outcomes.ended(self._tenants[row], completion)
        self._tenants, self._outcomes, self._pool.state = tenants, ended, state
