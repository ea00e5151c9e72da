"""What goes into a scheduler, and what comes out."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from stree_jax.decoding.generate import DecodeStatistics
from stree_jax.decoding.options import Plan
from stree_jax.decoding.types import Prefix


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to continue. All but `prompt`, `after` and `keep` are as in `generate`.

    Attributes:
        prompt: token ids; may be empty with `after`.
        key: the row's own random key, required above temperature 0.
        after: what comes before the prompt and has been read: from `Scheduler.read`, or from the
            completion of a request with `keep`.
        keep: the completion has a prefix of the whole text, to go on from. It holds a copy of the
            row's cache.
    """

    prompt: Sequence[int]
    _: dataclasses.KW_ONLY
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    eos_token: int | Sequence[int] | None = None
    key: jax.Array | None = None
    after: Prefix | None = None
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
        request_id: what `submit` returned.
        tokens: the new tokens, end of sequence included.
        stats: calls, drafts and acceptance of this request.
        seconds_queued: from `submit` until a row was free and the prompt was to be read.
        seconds_decoded: from then to the end, reading included.
        error: None, or why the row ended before its end: logits were not finite.
        prefix: of the whole text, if the request wanted to keep it and did not fail.
    """

    request_id: int
    tokens: list[int]
    stats: DecodeStatistics
    seconds_queued: float
    seconds_decoded: float
    error: str | None = None
    prefix: Prefix | None = None


@dataclasses.dataclass
class Job:
    """A request on its way."""

    request_id: int
    request: Request
    plan: Plan
    eos_tokens: np.ndarray
    submitted: float
    began: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the best token."""
        return self.request.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether it samples from some tokens only."""
        return self.plan.sampling.use_top_k_or_top_p
