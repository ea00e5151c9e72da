"""The results of a scheduler's requests: completions, and events until they end."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stree_jax.decoding.results import Ended, NewTokens, Pieces, failure, statistics_of
from stree_jax.decoding.stops import Stopping
from stree_jax.decoding.text.prefix import Prefix
from stree_jax.decoding.types import Statistics, TokenLogProbs
from stree_jax.serving.types import Completion, Event, Job

CANCELLED = "cancelled"


class Outcomes:
    """The completions and events that a scheduler has not given yet."""

    def __init__(self) -> None:
        self._completions: dict[int, Completion] = {}  # in the order in which they ended
        self._events: collections.deque[Event] | None = None  # None: nobody has asked for them
        self._pieces: dict[int, Pieces] = {}  # of requests that run and have events

    def follow(self) -> None:
        """Keeps events from now on."""
        if self._events is None:
            self._events = collections.deque(map(_last_event, self._completions.values()))

    def grown(self, job: Job, tokens: np.ndarray) -> None:
        """Takes the tokens so far of a request that runs."""
        if self._events is None:
            return
        pieces = self._pieces.setdefault(job.request_id, Pieces(job.plan.rows[0].stopping))
        piece = pieces.take(tokens[pieces.num_tokens :].tolist())
        if piece:
            self._events.append(Event(job.request_id, piece, None))

    def ended(self, job: Job, completion: Completion) -> None:
        """Takes the completion of a request."""
        self._completions[job.request_id] = completion
        if self._events is not None:
            pieces = self._pieces.pop(job.request_id, Pieces(job.plan.rows[0].stopping))
            self._events.append(_last_event(completion, pieces))

    def pop(self, request_id: int) -> Completion | None:
        """Returns a completion, which is not given again, or None."""
        return self._completions.pop(request_id, None)

    def completions(self) -> Iterator[Completion]:
        """Yields completions, in the order in which they ended."""
        while self._completions:
            yield self._completions.pop(next(iter(self._completions)))

    def events(self) -> Iterator[Event]:
        """Yields events: new tokens of requests, and their ends."""
        while self._events:
            yield self._events.popleft()


def _last_event(completion: Completion, pieces: Pieces | None = None) -> Event:
    last = (pieces or Pieces(Stopping())).last(completion.tokens, completion.text)
    return Event(completion.request_id, last, completion.finish_reason)


def of_row(
    job: Job, ended: Ended, row: int, prefix: Prefix | None, now: float, *, cancelled: bool
) -> Completion:
    """The completion of a request that had a row."""
    new = ended.new(row, job.plan.rows[0].stopping)
    if cancelled:
        new = new._replace(finish_reason=CANCELLED)
    error = failure(ended.failed, ended.emitted, row) if ended.failed[row] else None
    # Copies: what `ended` shows is the memory of the state, which the next run reuses.
    own = ended.statistics, ended.by_tree
    counts, by_tree = jax.tree.map(lambda count: count[row : row + 1].copy(), own)
    return _completion(job, new, counts, now, error, prefix, by_tree)


def of_waiting(job: Job, now: float) -> Completion:
    """The completion of a request that was cancelled before it decoded."""
    job.began = job.began or now
    zero: Any = np.zeros(1, np.int32)
    nothing: Any = np.zeros((0, 0), np.int32)
    by_depth: Any = np.zeros((1, job.plan.decoder.topology.depth), np.int32)
    text = None if job.plan.rows[0].stopping.tokenizer is None else ""
    new = NewTokens(nothing, CANCELLED, TokenLogProbs(nothing, nothing, nothing), text)
    return _completion(job, new, Statistics(zero, zero, zero, zero, by_depth), now)


def _completion(
    job: Job,
    new: NewTokens,
    counts: Statistics,
    now: float,
    error: str | None = None,
    prefix: Prefix | None = None,
    by_tree: np.ndarray | None = None,
) -> Completion:
    best = best_tokens = chosen = None
    if job.request.num_best is not None and new.log_probs is not None:
        chosen = new.log_probs.chosen.tolist()
        if most := job.request.top_log_probs:
            best = new.log_probs.best[:, :most].tolist()
            best_tokens = new.log_probs.best_tokens[:, :most].tolist()
    return Completion(
        job.request_id,
        new.tokens.tolist(),
        statistics_of(counts, job.plan, by_tree),
        seconds_queued=job.began - job.submitted,
        seconds_decoded=now - job.began,
        error=error,
        prefix=prefix,
        finish_reason=new.finish_reason,
        log_probs=chosen,
        top_log_probs=best,
        top_tokens=best_tokens,
        text=new.text,
    )
