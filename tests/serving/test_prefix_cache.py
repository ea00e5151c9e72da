"""Which entry a text begins with, against a dictionary, and what goes when the budget is spent."""

import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as some

from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.types import Context
from stree_jax.serving.prefix_cache import PrefixCache, PrefixCacheStats

words = some.lists(some.integers(0, 2), max_size=7)


def prefix(*sizes):
    """A prefix whose arrays have so many bytes in all, but for the few of its context."""
    cache = tuple(jnp.zeros(size // 4) for size in sizes)
    return Prefix(Context(jnp.zeros((1, 0), jnp.int32), jnp.zeros(0, jnp.int32)), cache, None)


@settings(deadline=None)
@given(some.lists(some.tuples(some.booleans(), words), max_size=20), some.lists(words, max_size=4))
def test_entries_are_a_dictionary_of_beginnings(changes, questions):
    """One that is larger than the budget takes the place of an entry, and is none."""
    cache, want, good, large = PrefixCache(100), {}, prefix(4), prefix(104)
    for adds, word in changes:
        if adds:
            want[tuple(word)] = good._replace()
            cache.keep(word, want[tuple(word)])
        elif want.pop(tuple(word), None):
            cache.keep(word, large)
        for text in [word, *questions]:
            beginnings = [tuple(text[:n]) for n in range(len(text) + 1)]
            known = [(len(each), want[each]) for each in beginnings if each in want]
            assert cache.find(text, longer_than=-1) == (known[-1] if known else None)
            shared = [n for n, b in enumerate(beginnings) if any(w[:n] == b for w in want)]
            assert cache.shared(text) == max(shared, default=0)


def counts(cache):
    return PrefixCacheStats(**cache.counts)


def test_the_least_recently_used_go():
    cache = PrefixCache(1000)
    for text in ([1], [1, 2], [3]):
        cache.keep(text, prefix(300))
    assert cache.find([1, 2, 9])[0] == 2
    assert cache.find([1, 5])[0] == 1
    assert cache.find([1, 5], longer_than=1) is None
    assert cache.find([5]) is None
    cache.keep([4], prefix(400))  # [3] was used before the others
    assert not cache.has([3])
    assert (counts(cache).nbytes, counts(cache).num_entries) == (1000, 3)
    cache.keep([5], prefix(1004))  # larger than the budget
    assert not cache.has([5])
    cache.keep([1, 2], prefix(500))  # in the place of the old one
    assert (counts(cache).nbytes, counts(cache).evictions) == (900, 2)
    assert cache.find([1, 2])[1].cache[0].nbytes == 500
