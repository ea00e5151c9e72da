"""Requests to a scheduler, and their completions."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from stree_jax.decoding.options import Options, explained
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.results import DecodeStatistics, Piece
from stree_jax.serving.prefill import Prefill


@explained
@dataclasses.dataclass(frozen=True)
class Request(Options):
    """A text to continue, and its own `Options`, which are keywords.

    Attributes:
        prompt: token ids; may be empty with `after`.
        after: the prefilled prefix before the prompt: from `Scheduler.read`, or from the
            completion of a request with `keep`.
        keep: whether the completion has a prefix of the whole text, to continue from. It holds a
            copy of the row's cache.

    Raises:
        ValueError: a bad option.
    """

    prompt: Sequence[int]
    _: dataclasses.KW_ONLY
    after: Prefix | None = dataclasses.field(default=None, repr=False)
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
        request_id: the id that `submit` returned.
        tokens: the new tokens, end of sequence included, those from a stop on left out.
        stats: calls, drafts and acceptance of this request, stops included.
        seconds_queued: time from `submit` until the request got a row.
        seconds_decoded: time from then to the end, prefill included.
        error: None, or why the row failed: logits were not finite.
        prefix: the prefix of the whole text, if the request had `keep` and did not fail. It has
            read a stop that ended the text.
        finish_reason: why it ended, see `Generation.finish_reasons`, or "cancelled".
        log_probs: of each new token, if the request asked for them.
        top_log_probs, top_tokens: the best tokens at each place, if it asked for them.
        text: what the request's tokenizer makes of its tokens, see `Generation.texts`.
    """

    request_id: int
    tokens: list[int]
    stats: DecodeStatistics
    seconds_queued: float
    seconds_decoded: float
    error: str | None = None
    prefix: Prefix | None = dataclasses.field(default=None, repr=False)
    finish_reason: str = ""
    log_probs: list[float] | None = None
    top_log_probs: list[list[float]] | None = None
    top_tokens: list[list[int]] | None = None
    text: str | None = None


class Event(NamedTuple):
    """New tokens of a request, or its end.

    Attributes:
        request_id: the id that `submit` returned.
        tokens: the tokens that follow those of the request's events before; its last event may have
            none.
        finish_reason: None, or in the last event why the request ended, as in its completion.
    """

    request_id: int
    tokens: Piece
    finish_reason: str | None

    @property
    def text(self) -> str | None:
        """The new text, if the request has a tokenizer.

        Together they are the text of its completion. It may come later than its tokens.
        """
        return self.tokens.text


@dataclasses.dataclass(eq=False)
class Job:
    """A submitted request."""

    request_id: int
    request: Request
    plan: Plan
    submitted: float
    began: float = 0.0
    prefill: Prefill | None = None  # of its text, from when it has a row until it decodes
