"""Prompts on their way into rows: chunk by chunk, from where the prefix cache knows them."""

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import dispatch
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.prompts import buffer_size, in_buffers
from stree_jax.decoding.text.prefill import PREFILL_CHUNK
from stree_jax.decoding.text.prefix import Prefix, stacked
from stree_jax.decoding.types import Context
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.rows import row_of
from stree_jax.models.lm import HybridLM
from stree_jax.serving.prefix_cache import PrefixCache, PrefixCacheStats, num_shared

_TOGETHER = 4  # texts that one call reads; others are read alone, so that few programs are compiled
_SMALLEST = 64  # tokens of a buffer, see `buffer_size`
_WORTH = 16  # shared tokens from which on a prefix is kept, and a text waits for another


@dataclasses.dataclass(eq=False)
class Reading:
    """A text that is being read; `length` and `prefix` change in one statement."""

    tokens: list[int]
    prefix: Prefix | None = None  # the state after its first `length` tokens; None at first
    length: int = 0
    keep_at: set[int] = dataclasses.field(default_factory=set)  # lengths
    # Those that began before, and how many first tokens each shares.
    others: list[tuple["Reading", int]] = dataclasses.field(default_factory=list)
    is_hit: bool = False  # the cache had an entry

    @property
    def is_done(self) -> bool:
        """True if all of it is read."""
        return self.length == len(self.tokens)

    @property
    def waits(self) -> bool:
        """True while another request prefills the common prefix."""
        return any(other.length < shared > self.length + _WORTH for other, shared in self.others)

    def end(self, most: int) -> int:
        """Returns the end of the next chunk, of at most `most` tokens."""
        stops = [length for length in self.keep_at if length > self.length]
        return min(*stops, self.length + most, len(self.tokens))


class PromptReader:
    """Reads texts for the rows of a pool, and keeps their prefixes."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        model: HybridLM,
        drafter: Drafter | None,
        *,
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
        return PrefixCacheStats(**self._counts, **entries)

    def begin(
        self, tokens: list[int], after: Prefix | None, before: Sequence[Reading] = ()
    ) -> Reading:
        """Returns a text to read after a prefix, as others before it."""
        reading = Reading(tokens)
        if after is not None:
            self._set(reading, int(on_host(after.context.length)[0]), after)
        if self._cache is None:
            return reading
        self._counts["lookups"] += 1
        self._look_up(reading)
        if every := self._keep_every:
            reading.keep_at |= {*range(every, len(tokens), every)}
        for other in before:
            shared = num_shared(tokens, other.tokens)
            if max(other.length, reading.length + _WORTH) < shared:
                other.keep_at.add(shared)
                reading.others.append((other, shared))
        shared = self._cache.shared(tokens)
        if reading.length + _WORTH < shared:
            reading.keep_at.add(shared)
        reading.keep_at.add(len(tokens))
        return reading

    def forget(self) -> None:
        """Drops all that is kept."""
        if self._cache is not None:
            self._cache.clear()

    def advance(self, readings: Sequence[Reading], budget: int | None) -> None:
        """Reads at most `budget` tokens of texts, or all, in their order.

        None waits for a text that is not among them: it was read to its end, or cancelled.
        """
        for reading in readings:
            reading.others = [pair for pair in reading.others if pair[0] in readings]
        left = budget
        while left is None or left >= (1 if left == budget else _SMALLEST):
            waiting = [reading for reading in readings if not (reading.is_done or reading.waits)]
            if not waiting:
                return
            reads = self._read(waiting, left)
            left = None if left is None else left - reads

    def prefix(self, reading: Reading) -> Prefix:
        """The prefix of a text that is done, for the pool."""
        assert reading.prefix is not None
        context = self._context([reading.tokens], self._decoder.capacity)
        return reading.prefix._replace(context=context)

    def keep(self, tokens: Sequence[int], prefix: Prefix) -> None:
        """Keeps the prefix of a text, for texts that begin with it."""
        if self._cache is not None and not self._cache.has(tokens):
            small = dataclasses.replace(self._decoder, max_length=buffer_size(len(tokens)))
            self._cache.keep(tokens, self._copied(small, tokens, prefix))

    def _look_up(self, reading: Reading) -> None:
        """Continues from a longer entry, if there is one."""
        assert self._cache is not None
        found = self._cache.find(reading.tokens, longer_than=reading.length)
        if found is not None:
            length, entry = found
            self._counts["tokens_reused"] += length - reading.length
            self._counts["hits"] += not reading.is_hit
            reading.is_hit = True
            self._set(reading, length, entry)

    def _set(self, reading: Reading, length: int, prefix: Prefix) -> None:
        """Continues from a prefix, copied into buffers of the pool's size."""
        copied = self._copied(self._decoder, reading.tokens[:length], prefix)
        reading.length, reading.prefix = length, copied

    def _copied(self, decoder: SpeculativeDecoder, tokens: Sequence[int], prefix: Prefix) -> Prefix:
        """The prefix of these tokens, in buffers of the decoder's size."""
        context = self._context([tokens])
        own = prefix._replace(context=context, origin=None)
        with dispatch.on(self._model):
            return decoder.read(self._model, self._drafter, context, own)

    def _read(self, waiting: Sequence[Reading], left: int | None) -> int:
        """Reads a chunk of texts; returns the number of tokens."""
        first = waiting[0]
        alike = [each for each in waiting if (each.prefix is None) == (first.prefix is None)]
        share = PREFILL_CHUNK if left is None else min(left // self._together, PREFILL_CHUNK)
        if len(alike) >= self._together and share >= _SMALLEST:
            group, most = alike[: self._together], share
        else:
            group, most = [first], len(first.tokens) if left is None else _whole_buffer(left)
        ends = [each.end(most) for each in group]
        before = [each.length for each in group]
        texts = [each.tokens[:end] for each, end in zip(group, ends, strict=True)]
        context = self._context(texts)
        with dispatch.on(self._model):
            if first.prefix is None:
                rows = self._decoder.read(self._model, self._drafter, context)
            else:
                parts = [each.prefix and (each.prefix.cache, each.prefix.drafter) for each in group]
                cache, drafts = stacked(parts)
                read = self._model.partition.put_rows(jnp.asarray(before, jnp.int32))
                old = context._replace(length=read)
                beginnings = Prefix(old, cache, drafts)
                rows = self._decoder.read(self._model, self._drafter, context, beginnings)
            num_read = sum(ends) - sum(before)
            self._counts["tokens_prefilled"] += num_read
            for i, each in enumerate(group):
                prefix = rows if len(group) == 1 else row_of(rows, i)
                each.length, each.prefix = ends[i], prefix
        for each in group:
            if each.length in each.keep_at:
                assert each.prefix is not None
                self.keep(each.tokens[: each.length], each.prefix)
        if self._cache is not None:
            for each in waiting:
                self._look_up(each)
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
