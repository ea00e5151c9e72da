"""Tree attention: queries that see nothing, split caches, and layers in two calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels import KVCache, NodeKV, tree_attention, tree_attention_layer, write_kv
from pallas_kernels.tree_attention import config, pallas_triton
from tests.cases import tree_attention_layer as layers
from tests.cases.tree_attention import CASES, SMALL, inputs


def test_a_query_that_sees_nothing_gives_something_finite():
    """Zeros, from a kernel."""
    *rest, length, mask = inputs(CASES["several blocks"])
    nothing = *rest, jnp.zeros_like(length), jnp.zeros_like(mask)
    assert np.isfinite(tree_attention(*nothing, scale=1.0)).all()
    blocks = dataclasses.replace(SMALL, splits=2)
    kernel = pallas_triton.tree_attention(*nothing, scale=1.0, interpret=True, blocks=blocks)
    assert_array_equal(kernel, 0)


def test_a_ring_keeps_the_last_tokens():
    """Written in pieces of any size, a ring holds what a cache of all tokens ends with."""
    rng = np.random.default_rng(0)
    batch, places, total = 2, 5, 23
    new = rng.normal(size=(2, batch, total, 1, 3)).astype(np.float32)
    empty = jnp.zeros((batch, 1, places, 3))
    ring, at = KVCache(empty, empty, jnp.zeros(batch, jnp.int32)), np.zeros(batch, int)
    write = jax.jit(functools.partial(write_kv, ring=True))
    for size in (1, 7, 3, 5, 2, 5):
        counts = rng.integers(size // 2, size + 1, batch)
        piece = [np.stack([values[b, at[b] :][:size] for b in range(batch)]) for values in new]
        selected = jnp.asarray(np.arange(size) < counts[:, None])
        steps = jnp.broadcast_to(jnp.arange(size), selected.shape)
        ring = write(ring, NodeKV(*map(jnp.asarray, piece)), selected, steps)
        at += counts
    assert at.min() > places
    for b in range(batch):
        for position in range(at[b] - places, at[b]):
            assert_array_equal(ring.keys[b, 0, position % places], new[0, b, position, 0])
    assert_array_equal(ring.length, at)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_prefix_may_run_before_the_path_is_written(implementation):
    case = layers.CASES["tree, and a row with an empty path"].but(prefix=5)
    function = functools.partial(tree_attention_layer, implementation=implementation)
    want_y, want_nodes, want_cache = layers.run_with(case, function)
    projected, cache, depth, mask, previous = layers.on_device(case)
    prefix = jax.tree.map(lambda x: x[:, : case.prefix], want_nodes)
    run = jax.jit(functools.partial(function, layout=layers.PLAIN))
    newest = (projected[:, case.prefix :], cache, depth[:, case.prefix :], mask[:, case.prefix :])
    y, nodes, cache = run(*newest, prefix_pending=prefix, previous=previous)
    assert_allclose(y, want_y[:, case.prefix :], atol=2e-6)
    jax.tree.map(assert_array_equal, (nodes, cache), (want_nodes, want_cache))


@pytest.mark.thorough
def test_a_prompt_is_the_same_to_the_bit_in_a_batch():
    """Also if it is padded, and in a longer cache."""
    *arrays, length, mask = inputs(CASES["a piece of a prompt"])
    run = functools.partial(
        pallas_triton.tree_attention, scale=0.25, to_the_bit=True, interpret=True
    )
    cached = [jnp.pad(array[:1], ((0, 0), (0, 0), (0, 400), (0, 0))) for array in arrays[3:]]
    short = [array[:1, :20] for array in arrays[:3]]
    alone = run(*short, *cached, length[:1], mask[:1, :20, :20])
    assert_array_equal(run(*arrays, length, mask)[:1, :20], alone)


def test_the_cache_is_split_as_far_as_programs_are_few():
    def blocks(num_groups, capacity, num_rows=4, dtype="bfloat16", head_dim=128):
        sizes = dict(num_rows=num_rows, num_groups=num_groups, capacity=capacity)
        return config.block_sizes(dtype, **sizes, head_dim=head_dim)

    def splits(*arguments, **options):
        return blocks(*arguments, **options).splits

    assert splits(8, 4096) == 16
    assert splits(8, 256) == 4  # at least two blocks each
    assert splits(8, 0) == splits(8, 0, dtype="float32") == 1
    assert splits(8, 4096, num_rows=256) == 4  # blocks of rows are programs, too
    # One program would spill, however many there are.
    assert splits(8, 64) == splits(512, 4096) == splits(512, 4096, num_rows=256) == 2
    assert splits(512, 4096, dtype="float32") == splits(512, 4096, 4, "float32", 160) == 2
    # A piece of a prompt, and wide heads, would not.
    assert splits(512, 4096, num_rows=257) == splits(512, 4096, head_dim=160) == 1
    # Large batches of trees of 64 nodes have the blocks of small ones.
    for num_groups in (8, 64, 256):
        assert blocks(num_groups, 4096, num_rows=256).rows == 64
        assert blocks(num_groups, 4096, num_rows=256).splits == (4 if num_groups == 8 else 2)
