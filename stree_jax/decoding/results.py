"""The results of rows, on the host: tokens, counts, log-probabilities, and pieces of streams."""

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.step import DRAFT_FAILED, NO_ROOM, RULED_OUT, TARGET_FAILED
from stree_jax.decoding.stops import STOPPED, Stopping
from stree_jax.decoding.text_stream import TextStream
from stree_jax.decoding.types import Context, DecodeState, Limits, Statistics, TokenLogProbs
from stree_jax.mesh.hosts import on_host
from stree_jax.models.cache import Cache
from stree_jax.tree import TreeTopology

PAD = -1  # fills `Generation.tokens` after a row's end


@dataclasses.dataclass(frozen=True)
class DecodeStatistics:
    """Target calls and accepted drafts of a generation. Counts are sums over the batch.

    Attributes:
        tau: acceptance length, tokens emitted per target call; 1 for autoregressive decoding.
        num_target_calls: forward passes of the target, counted once per unfinished row.
        num_tokens: tokens emitted.
        num_drafted: tokens proposed.
        num_accepted: drafts that were emitted.
        accepted_per_depth: `[D]`, steps in which at least 1, 2, ... D drafts were accepted.
        tau_per_row, target_calls_per_row: `[B]`, the same per row.
        calls_by_tree: with `topology="auto"`, calls with each tree, the first without drafts.
        reached_per_depth: `[D]`, steps in which a draft of depth 1, 2, ... D could be accepted: the
            tree was as deep, and the drafts above were accepted.
    """

    tau: float
    num_target_calls: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    accepted_per_depth: np.ndarray
    tau_per_row: np.ndarray
    target_calls_per_row: np.ndarray
    calls_by_tree: dict[TreeTopology, int] | None = None
    reached_per_depth: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        tokens: `[B, max_new_tokens]` int32, the new tokens, end of sequence included, those from a
            stop on left out, then `PAD`.
        lengths: `[B]` int32, new tokens of each row.
        stats: calls, drafts and acceptance, stops included.
        cache: the target's cache of all tokens of a row but the last, stops included; None without
            `return_cache`.
            For a model on a mesh it stays there, including the rows that pad the batch.
        lossless: False if a lossy verifier chose the tokens: they are not the target's.
        finish_reasons: why each row ended: "end_token"; "stop"; "length", at `max_new_tokens`;
            "failed", its logits were not finite, or processors or filters left no token.
        log_probs: `[B, max_new_tokens]` float32, of each new token, then NaN; see
            `Options.log_probs`. None unless asked for, like the next two.
        top_log_probs: `[B, max_new_tokens, best]` float32, of the best tokens at each place, in
            descending order, then NaN; see `Options.top_log_probs`.
        top_tokens: `[B, max_new_tokens, best]` int32, these tokens, then `PAD`.
        prefix: all rows' texts and caches, to continue with `generate(after=prefix)`, if
            `return_prefix` asked for it. It has read the stop that ended a row.
        kept: by position, the prefixes of so many first tokens of the prompts, if `keep` asked for
            them; `Prefix.nbytes` says what each takes.
        calls: `[B, max_new_tokens]` int32, with `record_calls` the call of the target, from 1, that
            emitted each token, then 0.
        drafted: `[B, max_new_tokens]` bool, whether it was an accepted draft; else it is the
            target's own. Of rows without stops `stats.num_accepted` of them are.
        pieces: the text of each token, with `record_calls` and a tokenizer.
        texts: what the tokenizer makes of each row's tokens, if one was given. Text before a stop
            that begins inside a token is there, and that token is not in `tokens`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stats: DecodeStatistics
    cache: Cache | None = None
    lossless: bool = True
    finish_reasons: list[str] = dataclasses.field(default_factory=list)
    log_probs: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    texts: list[str] | None = None
    prefix: Prefix | None = None
    calls: np.ndarray | None = None
    drafted: np.ndarray | None = None
    pieces: list[list[str]] | None = None
    kept: dict[int, Prefix] | None = None

    def __repr__(self) -> str:  # a notebook shows a cell's last value
        size, tau = f"tokens {self.tokens.shape}", f"tau {self.stats.tau:.2f}"
        return f"<Generation: {size}, lengths {self.lengths.tolist()}, {tau}>"

    def show(self, console: Any = None) -> None:
        """Prints the new tokens, call by call: accepted drafts are green.

        In brackets where there are no colours.

        Args:
            console: of rich; None: the standard output.

        Raises:
            ValueError: it was made without `record_calls`.
        """
        from rich.console import Console  # `generate` does not need it
        from rich.text import Text

        if self.calls is None or self.drafted is None:
            raise ValueError("calls were not recorded: generate(..., record_calls=True)")
        console = console or Console()
        for row, size in enumerate(self.lengths):
            pieces = [f" {token}" for token in self.tokens[row, :size]]  # without a tokenizer
            pieces = pieces if self.pieces is None else self.pieces[row]
            parts = zip(self.calls[row], self.drafted[row], pieces, strict=False)
            text = Text()
            for (_, is_draft), group in itertools.groupby(parts, lambda part: part[:2]):
                piece = "".join(piece for *_, piece in group)
                bracketed = is_draft and not console.color_system
                text.append(f"[{piece}]" if bracketed else piece, "green" if is_draft else "bold")
            console.print(text, soft_wrap=True)
            count = (
                f"{size} tokens from {self.stats.target_calls_per_row[row]} calls of the target,"
                f" {self.drafted[row].sum()} of them accepted drafts"
            )
            console.print(count, style="dim", highlight=False, soft_wrap=True)
        if calls := self.stats.calls_by_tree:
            names = ", ".join(f"{tree.name} {count}" for tree, count in calls.items())
            console.print(f"Calls with {names}", style="dim", highlight=False, soft_wrap=True)


class NonFiniteLogitsError(FloatingPointError):
    """Logits of some rows were not finite, or processors or filters left no token.

    The other rows were decoded to their end.

    Attributes:
        rows: indices of the rows that failed.
        generation: the output of all rows; a failed row ends where it failed.
    """

    def __init__(self, message: str, rows: list[int], generation: Generation):
        super().__init__(message)
        self.rows = rows
        self.generation = generation


class Ended(NamedTuple):
    """The results of rows of a decode loop, copied to the host; fields as in `DecodeState`."""

    context: Context
    emitted: np.ndarray
    failed: np.ndarray
    statistics: Statistics
    stop: np.ndarray
    log_probs: TokenLogProbs | None
    calls: np.ndarray | None
    eos_tokens: np.ndarray
    by_tree: np.ndarray | None  # `Quanta.by_tree`

    @classmethod
    def of(
        cls,
        state: DecodeState,
        limits: Limits,
        by_tree: np.ndarray | None,
        num_rows: int | None = None,
    ) -> "Ended":
        """Returns that of the first rows. All processes of a mesh call this."""
        taken = (getattr(state, name) for name in cls._fields[:-2])
        return cls(*on_host((*taken, limits.eos_tokens, by_tree), num_rows))

    def new(self, row: int, stopping: Stopping) -> "NewTokens":
        """The new tokens of a row, up to its stop."""
        end, count = int(self.context.length[row]), int(self.emitted[row])
        start, tokens = end - count, np.asarray(self.context.tokens[row])
        text: str | None = None
        if self.failed[row]:
            reason = "failed"
        elif self.stop[row] == STOPPED:
            reason = "stop"
            count, text = stopping.cut(tokens[start:end].tolist())
        elif count and tokens[end - 1] in self.eos_tokens[row]:
            reason = "end_token"
        else:
            reason = "length"
        places = slice(start, start + count)
        if text is None and stopping.tokenizer is not None:
            text = stopping.tokenizer.decode(tokens[places].tolist())
        records = jax.tree.map(lambda values: values[row, places], self.log_probs)
        calls = None if self.calls is None else self.calls[row, places]
        return NewTokens(tokens[places], reason, records, text, calls)


class NewTokens(NamedTuple):
    """The new tokens of a row, with its finish reason, its text, and what was recorded of each."""

    tokens: np.ndarray  # [T]
    finish_reason: str
    log_probs: TokenLogProbs | None
    text: str | None
    calls: np.ndarray | None = None


def generation_of(
    ended: Ended,
    request: Plan,
    cache: Cache | None = None,
    prefix: Prefix | None = None,
    kept: dict[int, Prefix] | None = None,
) -> Generation:
    """The result of a request's rows, padded to the largest `max_new_tokens` of all rows."""
    rows = [ended.new(i, row.stopping) for i, row in enumerate(request.rows)]
    options = request.rows[0].options
    width = max(row.options.max_new_tokens for row in request.rows)

    def padded(buffer: Any, parts: list[Any], fill: Any) -> np.ndarray:
        """The rows' parts of a buffer, with its dtype."""
        size = len(parts), width, *buffer.shape[2:]
        whole = np.full(size, fill, buffer.dtype)
        for place, part in zip(whole, parts, strict=True):
            place[: len(part)] = part
        return whole

    chosen = best = best_tokens = None
    if ended.log_probs is not None:
        fills = (np.nan, np.nan, PAD)
        chosen, *of_best = (
            padded(buffer, [row.log_probs[i] for row in rows if row.log_probs], fills[i])
            for i, buffer in enumerate(ended.log_probs)
        )
        if most := options.top_log_probs:
            best, best_tokens = (values[..., :most] for values in of_best)
    calls = pieces = None
    if ended.calls is not None:
        calls = padded(ended.calls, [row.calls for row in rows], 0)
        if options.tokenizer is not None:
            pieces = [pieces_of(options.tokenizer, row.tokens.tolist()) for row in rows]
    generation = Generation(
        padded(ended.context.tokens, [row.tokens for row in rows], PAD),
        np.array([len(row.tokens) for row in rows], np.int32),
        statistics_of(ended.statistics, request, ended.by_tree),
        cache,
        request.decoder.verifier.lossless,
        [row.finish_reason for row in rows],
        chosen,
        best,
        best_tokens,
        None if options.tokenizer is None else [row.text or "" for row in rows],
        prefix,
        None if calls is None else abs(calls),
        None if calls is None else calls > 0,
        pieces,
        kept,
    )
    failed = np.flatnonzero(ended.failed).tolist()
    if not failed:
        return generation
    others = f"; rows {failed[1:]} failed too" if failed[1:] else ""
    raise NonFiniteLogitsError(
        f"{failure(ended.failed, ended.emitted, failed[0])}{others}."
        " The output of all rows is in the error's `generation`",
        failed,
        generation,
    )


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; of a character in several tokens, all of it at the last one."""
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokens]
    if pieces:
        pieces[-1] += stream.end()
    return pieces


def failure(failed: np.ndarray, emitted: np.ndarray, row: int) -> str:
    """Describes why a row failed; arrays as in `DecodeState`."""
    why = {
        TARGET_FAILED: "the target model's logits are not finite",
        DRAFT_FAILED: "the draft model's logits are not finite, or filters leave no token of it",
        RULED_OUT: "the logits processors, or filters, leave no token",
        NO_ROOM: "the buffer has no place for the next token",
    }[int(failed[row])]
    return f"{why} in row {row}, after {emitted[row]} new tokens; the row ended there"


def statistics_of(
    statistics: Statistics, request: Plan, by_tree: np.ndarray | None
) -> DecodeStatistics:
    """Sums over rows, and the ratios; with a choice of trees calls by tree."""
    counts = jax.tree.map(np.asarray, statistics)
    calls, tokens = int(counts.target_calls.sum()), int(counts.emitted.sum())
    topology = request.decoder.topology
    accepted = counts.accepted_per_depth.sum(axis=0)
    accepted = np.pad(accepted, (0, topology.depth - len(accepted)))
    trees = request.trees or (topology,)
    of_trees = -np.diff([[calls, *accepted, 0]])  # calls by accepted drafts
    if request.trees:
        none = np.zeros((len(trees), topology.depth + 1), int)
        of_trees = none if by_tree is None else by_tree.sum(axis=0)
    calls_by_tree = dict(zip(request.trees, of_trees.sum(axis=1).tolist(), strict=False))
    reached = [
        of_trees[[tree.depth > level for tree in trees], level:].sum()
        for level in range(topology.depth)
    ]
    # A row that failed in its first step has no calls.
    calls_per_row = np.maximum(counts.target_calls, 1)
    return DecodeStatistics(
        tau=tokens / max(calls, 1),
        num_target_calls=calls,
        num_tokens=tokens,
        num_drafted=int(counts.drafted.sum()),
        num_accepted=int(counts.accepted.sum()),
        accepted_per_depth=accepted,
        reached_per_depth=np.array(reached, int),
        tau_per_row=counts.emitted / calls_per_row,
        target_calls_per_row=counts.target_calls,
        calls_by_tree=calls_by_tree or None,
    )


class Piece(list[int]):
    """New tokens of a row, a list.

    Attributes:
        text: the text that follows that of the row's pieces before, if the row has a tokenizer.
            All of them together are the text that `generate` gives.
    """

    def __init__(self, tokens: Iterable[int] = (), text: str | None = None):
        super().__init__(tokens)
        self.text = text


class Pieces:
    """Cuts the tokens of a streamed row into pieces; those that a stop may cut are held back."""

    def __init__(self, stopping: Stopping):
        self._stopping = stopping
        # Tokens and bytes of the longest stop of each kind.
        self._most_tokens = max([1, *map(len, stopping.tokens)])
        self._most_bytes = max([1, *(len(stop.encode()) for stop in stopping.texts)])
        self._tokens: list[int] = []
        self._held_bytes = 0  # of the tokens that no piece has
        self._stream = None if stopping.tokenizer is None else TextStream(stopping.tokenizer)
        self._num_released = self._num_characters = 0

    def __copy__(self) -> "Pieces":
        pieces = object.__new__(Pieces)
        vars(pieces).update(vars(self))
        pieces._tokens, pieces._stream = [*self._tokens], copy.copy(self._stream)
        return pieces

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, with those that are held back."""
        return len(self._tokens)

    def take(self, new: Sequence[int]) -> Piece:
        """The piece that no later stop can cut, after these tokens of a row that continues."""
        size = self._stopping.size
        self._tokens += new
        self._held_bytes += sum(map(size, new))
        first, until = self._num_released, len(self._tokens) + 1 - self._most_tokens
        for token in self._tokens[first : max(first, until)]:
            if self._held_bytes - size(token) < self._most_bytes - 1:
                break
            self._held_bytes -= size(token)
            self._num_released += 1
        released = self._tokens[first : self._num_released]
        text = None if self._stream is None else self._stream.push(released)
        self._num_characters += len(text or "")
        return Piece(released, text)

    def last(self, tokens: Sequence[int], text: str | None) -> Piece:
        """The last piece, of all tokens of the row up to its stop, and their text."""
        text = text and text[self._num_characters :]
        return Piece(tokens[self._num_released :], text)
