"""The results of a scheduler's requests: completions, and events until they end."""

import collections
import copy
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.results import Ended, NewTokens, Pieces, failure, statistics_of
from stree_jax.decoding.stops import Stopping
from stree_jax.decoding.types import Statistics, TokenLogProbs
from stree_jax.serving.types import Completion, Event, Job

CANCELLED = "cancelled"


class Outcomes(NamedTuple):
    """What a scheduler has not given yet.

    Who gives takes out. All other changes make a new one, so that an interrupt leaves the old one.
    """

    completions: dict[int, Completion]  # by request, in the order in which they ended
    events: collections.deque[Event] | None  # None: nobody has asked for them
    pieces: dict[int, Pieces]  # of requests that run and have events

    def followed(self) -> "Outcomes":
        """Those that keep events from now on."""
        if self.events is not None:
            return self
        return self._replace(events=collections.deque(map(_last_event, self.completions.values())))

    def grown(self, job: Job, tokens: np.ndarray) -> "Outcomes":
        """Those after the tokens so far of a request that runs."""
        if self.events is None:
            return self
        pieces = copy.copy(self.pieces.get(job.request_id) or Pieces(job.plan.rows[0].stopping))
        piece = pieces.take(tokens[pieces.num_tokens :].tolist())
        new = [Event(job.request_id, piece, None)] if piece else []
        return self._replace(
            events=self.events + collections.deque(new),
            pieces=self.pieces | {job.request_id: pieces},
        )

    def ended(self, job: Job, completion: Completion) -> "Outcomes":
        """Those after the end of a request."""
        request_id, pieces, events = job.request_id, self.pieces.copy(), self.events
        last = pieces.pop(request_id, None) or Pieces(job.plan.rows[0].stopping)
        if events is not None:
            events = events + collections.deque([_last_event(completion, last)])
        return Outcomes(self.completions | {request_id: completion}, events, pieces)


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
    of_rows = ended.statistics, ended.by_tree
    counts, by_tree = jax.tree.map(lambda count: count[row : row + 1].copy(), of_rows)
    return _completion(job, new, counts, now, error, prefix, by_tree)


def of_waiting(job: Job, now: float) -> Completion:
    """The completion of a request that was cancelled before it decoded."""
    job.began = job.began or now
    zero: Any = np.zeros(1, np.int32)
    nothing: Any = np.zeros((0, 0), np.int32)
    topology = job.plan.decoder.topology
    sizes = topology.depth, topology.num_nodes
    tables: Any = [np.zeros((1, size), np.int32) for size in sizes]
    text = None if job.plan.rows[0].stopping.tokenizer is None else ""
    new = NewTokens(nothing, CANCELLED, TokenLogProbs(nothing, nothing, nothing), text)
    return _completion(job, new, Statistics(zero, zero, zero, zero, *tables), now)


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
