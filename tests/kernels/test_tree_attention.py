"""Tree attention: queries that see nothing, split caches, and prompts in a batch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels import tree_attention
from pallas_kernels.tree_attention import config, pallas_triton
from tests.cases.tree_attention import CASES, SMALL, inputs


def test_a_query_that_sees_nothing_gives_something_finite():
    """Zeros, from a kernel."""
    *rest, length, mask = inputs(CASES["several blocks"])
    nothing = *rest, jnp.zeros_like(length), jnp.zeros_like(mask)
    assert np.isfinite(tree_attention(*nothing, scale=1.0)).all()
    blocks = dataclasses.replace(SMALL, splits=2)
    kernel = pallas_triton.tree_attention(*nothing, scale=1.0, interpret=True, blocks=blocks)
    assert_array_equal(kernel, 0)


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
    def blocks(num_groups, capacity, num_rows=4, head_dim=128):
        sizes = dict(num_rows=num_rows, num_groups=num_groups, capacity=capacity)
        return config.block_sizes("bfloat16", **sizes, head_dim=head_dim)

    assert blocks(8, 4096).splits == 16
    assert blocks(8, 256).splits == 4  # at least two blocks each
    # One program would spill, however many there are; not with wide heads.
    assert blocks(512, 4096).splits == 2
    assert blocks(512, 4096, head_dim=160).splits == 1
    # Large batches of trees of 64 nodes have the blocks of small ones.
    for num_groups in (8, 64, 256):
        assert blocks(num_groups, 4096, num_rows=256).rows == 64
        assert blocks(num_groups, 4096, num_rows=256).splits == (4 if num_groups == 8 else 2)
