"""Prompts on their way into rows: chunk by chunk, from where the prefix cache knows them."""

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import dispatch
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.prefix.prefill import PREFILL_CHUNK
from stree_jax.decoding.prefix.prefix import Prefix, stacked
from stree_jax.decoding.prompts import buffer_size, in_buffers
from stree_jax.decoding.types import Context
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.rows import row_of
from stree_jax.models.lm import HybridLM
from stree_jax.serving.prefix_cache import PrefixCache, PrefixCacheStats, num_shared

_TOGETHER = 4  # texts that one call reads; others are read alone, so that few programs are compiled
_SMALLEST = 64  # tokens of a buffer, see `buffer_size`
_WORTH = 16  # shared tokens from which on a prefix is kept, and a text waits for another


@dataclasses.dataclass(eq=False)
class Prefill:
    """A text that is being read; `length` and `prefix` change in one statement."""

    tokens: list[int]
    prefix: Prefix | None = None  # the state after its first `length` tokens; None at first
    length: int = 0
    keep_at: set[int] = dataclasses.field(default_factory=set)  # lengths
    # Texts that began before, and how many first tokens they share with this one.
    earlier: list[tuple["Prefill", int]] = dataclasses.field(default_factory=list)
    is_hit: bool = False  # the cache had an entry

    @property
    def is_done(self) -> bool:
        """True if all of it is read."""
        return self.length == len(self.tokens)

    @property
    def waits(self) -> bool:
        """True while another request prefills the common prefix."""
        return any(text.length < shared > self.length + _WORTH for text, shared in self.earlier)

    def end(self, most: int) -> int:
        """Returns the end of the next chunk, of at most `most` tokens."""
        stops = [length for length in self.keep_at if length > self.length]
        return min(*stops, self.length + most, len(self.tokens))


class Prefiller:
    """Reads texts for the rows of a pool, and keeps their prefixes."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        model: HybridLM,
        drafter: Drafter | None,
        cache_bytes: int,
        keep_every: int | None,
    ):
        self._decoder, self._model, self._drafter = decoder, model, drafter
        data = model.partition.rows
        self._together = -(-_TOGETHER // data) * data  # each shard of the batch reads as many
        self._cache = PrefixCache(cache_bytes) if cache_bytes else None
        self._keep_every = keep_every
        self._counts = collections.Counter[str]()

    @property
    def stats(self) -> PrefixCacheStats:
        """Counts so far."""
        entries = {} if self._cache is None else self._cache.counts
        return PrefixCacheStats(**{**self._counts, **entries})

    def begin(
        self, tokens: list[int], after: Prefix | None, earlier: Sequence[Prefill] = ()
    ) -> Prefill:
        """Returns a text to read after a prefix; it may wait for what `earlier` texts share."""
        prefill = Prefill(tokens)
        if after is not None:
            self._set(prefill, int(on_host(after.context.length)[0]), after)
        if self._cache is None:
            return prefill
        self._counts["lookups"] += 1
        self._look_up(prefill)
        if every := self._keep_every:
            prefill.keep_at |= {*range(every, len(tokens), every)}
        for text in earlier:
            shared = num_shared(tokens, text.tokens)
            if max(text.length, prefill.length + _WORTH) < shared:
                text.keep_at.add(shared)
                prefill.earlier.append((text, shared))
        shared = self._cache.shared(tokens)
        if prefill.length + _WORTH < shared:
            prefill.keep_at.add(shared)
        prefill.keep_at.add(len(tokens))
        return prefill

    def advance(self, prefills: Sequence[Prefill], budget: int | None) -> None:
        """Reads at most `budget` tokens of texts, or all, in their order.

        None waits for a text that is not among them: it was read to its end, or cancelled.
        """
        for prefill in prefills:
            prefill.earlier = [pair for pair in prefill.earlier if pair[0] in prefills]
        left = budget
        while left is None or left >= (1 if left == budget else _SMALLEST):
            waiting = [prefill for prefill in prefills if not (prefill.is_done or prefill.waits)]
            if not waiting:
                return
            reads = self._read(waiting, left)
            left = None if left is None else left - reads

    def prefix(self, prefill: Prefill) -> Prefix:
        """The prefix of a text that is done, for the pool."""
        assert prefill.prefix is not None
        context = self._context([prefill.tokens], self._decoder.capacity)
        return prefill.prefix._replace(context=context)

    def keep(self, tokens: Sequence[int], prefix: Prefix) -> None:
        """Keeps the prefix of a text, for texts that begin with it."""
        if self._cache is not None and not self._cache.has(tokens):
            small = dataclasses.replace(self._decoder, max_length=buffer_size(len(tokens)))
            self._cache.keep(tokens, self._copied(small, tokens, prefix))

    def _look_up(self, prefill: Prefill) -> None:
        """Continues from a longer entry, if there is one."""
        assert self._cache is not None
        match = self._cache.find(prefill.tokens, longer_than=prefill.length)
        if match is not None:
            length, entry = match
            self._counts["tokens_reused"] += length - prefill.length
            self._counts["hits"] += not prefill.is_hit
            prefill.is_hit = True
            self._set(prefill, length, entry)

    def _set(self, prefill: Prefill, length: int, prefix: Prefix) -> None:
        """Continues from a prefix, copied into buffers of the pool's size."""
        copied = self._copied(self._decoder, prefill.tokens[:length], prefix)
        prefill.length, prefill.prefix = length, copied

    def _copied(self, decoder: SpeculativeDecoder, tokens: Sequence[int], prefix: Prefix) -> Prefix:
        """The prefix of these tokens, in buffers of the decoder's size."""
        context = self._context([tokens])
        before = prefix._replace(context=context, origin=None)
        with dispatch.on(self._model):
            return decoder.read(self._model, self._drafter, context, before)

    def _read(self, waiting: Sequence[Prefill], left: int | None) -> int:
        """Reads a chunk of texts; returns the number of tokens."""
        first = waiting[0]
        alike = [text for text in waiting if (text.prefix is None) == (first.prefix is None)]
        share = PREFILL_CHUNK if left is None else min(left // self._together, PREFILL_CHUNK)
        if len(alike) >= self._together and share >= _SMALLEST:
            group, most = alike[: self._together], share
        else:
            group, most = [first], len(first.tokens) if left is None else _whole_buffer(left)
        ends = [text.end(most) for text in group]
        before = [text.length for text in group]
        chunks = [text.tokens[:end] for text, end in zip(group, ends, strict=True)]
        context = self._context(chunks)
        with dispatch.on(self._model):
            if first.prefix is None:
                rows = self._decoder.read(self._model, self._drafter, context)
            else:
                parts = [text.prefix and (text.prefix.cache, text.prefix.drafter) for text in group]
                cache, drafts = stacked(parts)
                lengths = self._model.partition.put_rows(jnp.asarray(before, jnp.int32))
                beginnings = Prefix(context._replace(length=lengths), cache, drafts)
                rows = self._decoder.read(self._model, self._drafter, context, beginnings)
            num_read = sum(ends) - sum(before)
            self._counts["tokens_prefilled"] += num_read
            for i, text in enumerate(group):
                prefix = rows if len(group) == 1 else row_of(rows, i)
                text.length, text.prefix = ends[i], prefix
        for text in group:
            if text.length in text.keep_at:
                assert text.prefix is not None
                self.keep(text.tokens[: text.length], text.prefix)
        if self._cache is not None:
            for text in waiting:
                self._look_up(text)
        return num_read

    def _context(self, texts: Sequence[Sequence[int]], width: int | None = None) -> Context:
        return self._model.partition.put_rows(in_buffers(texts, width))


def _whole_buffer(left: int) -> int:
    """Returns the largest buffer that `left` tokens fill, or `left`."""
    size = _SMALLEST
    if left < size:
        return left
    while (larger := buffer_size(size + 1)) <= left:
        size = larger
    return size
