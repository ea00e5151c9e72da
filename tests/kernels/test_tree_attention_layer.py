"""The whole of an attention layer between its projections, against its float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionLayout, KVCache, NodeKV, tree_attention_layer
from pallas_kernels.tree_attention import pallas_triton_layer
from pallas_kernels.tree_attention.config import BlockSizes
from pallas_kernels.tree_attention.reference import tree_attention_layer as reference
from tests.kernels.cases import ancestor_mask, random_parents, relative_error
from tests.kernels.test_tree_ops import BUDGET, IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of trees and caches, and the layout."""

    name: str
    layout: AttentionLayout
    nodes: int = 13
    replayed: int = 6
    prefix: int = 0  # nodes that a first call runs, before a second call runs the others
    capacity: int = 40
    lengths: tuple[int, ...] = (23, 0, 34)
    extra_columns: int = 0
    splits: int = 1
    bf16: bool = False

    def __str__(self):
        return self.name


def turning(pairs):
    return tuple(float(f) for f in np.float32(100.0 ** -(np.arange(pairs) / max(pairs, 1))))


PLAIN = AttentionLayout(4, 2, 16, scale=0.25, frequencies=turning(8))
PARTLY = AttentionLayout(3, 1, 32, scale=0.2, frequencies=turning(4), key_multiplier=0.7)
FIXED = AttentionLayout(8, 2, 16, scale=0.25, key_multiplier=1.3)
ODD = AttentionLayout(4, 2, 48, scale=0.2, frequencies=turning(12), key_multiplier=0.7)
WIDE = AttentionLayout(2, 2, 224, scale=0.07, frequencies=turning(112))
CASES = (
    Case("root only", PLAIN, nodes=1, replayed=1),
    Case("tree, and a row with an empty path", PLAIN),
    Case("prefix of the root", PLAIN, nodes=5, prefix=1),
    Case("prefix, blocks of nodes", PLAIN, nodes=40, replayed=38, prefix=21, capacity=90),
    Case("shared among programs", PLAIN, splits=3),
    Case("shared, more nodes than a block", FIXED, nodes=20, replayed=20, splits=2, capacity=64),
    Case("rotated in part, columns behind", PARTLY, splits=2, extra_columns=32),
    Case("heads and pairs of several parts", ODD, nodes=20, prefix=3),
    Case("heads of several parts, shared", dataclasses.replace(ODD, frequencies=()), splits=2),
    Case("wide heads", WIDE, nodes=3, bf16=True),
    Case("one rotated pair", dataclasses.replace(PLAIN, frequencies=turning(1)), nodes=2),
    Case("a long way", PLAIN, nodes=3, capacity=4010, lengths=(3990,)),
    Case("columns behind that are no heads", PARTLY, nodes=3, extra_columns=7),
    Case("full to the last place, and over", PLAIN, capacity=24, lengths=(21, 3, 23, 30)),
    Case("bf16", PLAIN, nodes=20, splits=2, bf16=True),
    Case("bf16, not rotated", FIXED, prefix=4, bf16=True),
)


@functools.cache
def problem(case):
    """Float64 arrays that are exact in the case's type; the path of the second row is empty."""
    rng, layout, batch = np.random.default_rng(0), case.layout, len(case.lengths)
    dtype = jnp.bfloat16 if case.bf16 else jnp.float32

    def draw(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=(batch, *shape)), dtype), np.float64)

    heads = (layout.num_groups, layout.head_dim)
    places = (layout.num_groups, case.capacity, layout.head_dim)
    mask = ancestor_mask(random_parents(rng, batch, case.nodes))
    path = ancestor_mask(random_parents(rng, batch, case.replayed))[:, -1].copy()
    path[1:2] = False
    projected = draw(case.nodes, layout.num_columns + case.extra_columns)
    cache = KVCache(draw(*places), draw(*places), np.array(case.lengths, np.int32))
    depth = (mask.sum(axis=2) - 1).astype(np.int32)
    old = NodeKV(draw(case.replayed, *heads), draw(case.replayed, *heads))
    return projected, cache, depth, mask, (old, path)


def on_device(case):
    dtype = jnp.bfloat16 if case.bf16 else jnp.float32
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype if x.dtype == np.float64 else None), problem(case)
    )


def run_with(case, function):
    """Runs the whole tree, or its first nodes and then the others."""
    projected, cache, depth, mask, previous = on_device(case)
    first, options = case.prefix or case.nodes, dict(layout=case.layout)
    early = mask[:, :first, :first]
    y, nodes, cache = jax.jit(functools.partial(function, prefix_pending=None, **options))(
        projected[:, :first], cache, depth[:, :first], early, previous=previous
    )
    if case.prefix:
        more, nodes, cache = jax.jit(functools.partial(function, previous=None, **options))(
            projected[:, first:], cache, depth[:, first:], mask[:, first:], prefix_pending=nodes
        )
        y = jnp.concatenate([y, more], axis=1)
    return y, nodes, cache


def check(case, got):
    y, nodes, cache = got
    projected, before, depth, mask, (old, path) = problem(case)
    want_y, want_nodes, want_cache = reference(
        projected, before, depth, mask, layout=case.layout, previous=(*old, path)
    )
    assert y.dtype == nodes.keys.dtype == cache.keys.dtype == on_device(case)[0].dtype
    full = want_cache[2] > case.capacity
    assert np.isnan(np.asarray(y, np.float32)[full]).all()
    assert relative_error(y[~full], want_y[~full]) < BUDGET[case.bf16]
    assert relative_error(nodes.keys, want_nodes[0]) < BUDGET[case.bf16]
    np.testing.assert_array_equal(np.asarray(nodes.values, np.float64), want_nodes[1])
    for value, wanted in zip(cache, want_cache, strict=True):
        np.testing.assert_array_equal(np.asarray(value, np.float64), wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_attention_layer(case, implementation):
    if implementation == "xla":
        function = functools.partial(tree_attention_layer, implementation="xla")
    else:
        function = functools.partial(
            pallas_triton_layer.tree_attention_layer,
            interpret=implementation == "pallas_interpret",
            blocks=BlockSizes(rows=16, keys=16, splits=case.splits, num_warps=4, num_stages=1),
        )
    check(case, run_with(case, function))


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_prefix_may_run_before_the_path_is_written(implementation):
    case = Case("prefix", PLAIN, prefix=5)
    function = functools.partial(tree_attention_layer, implementation=implementation)
    want_y, want_nodes, want_cache = run_with(case, function)
    projected, cache, depth, mask, previous = on_device(case)
    prefix = jax.tree.map(lambda x: x[:, : case.prefix], want_nodes)
    run = jax.jit(functools.partial(function, layout=PLAIN))
    newest = (projected[:, case.prefix :], cache, depth[:, case.prefix :], mask[:, case.prefix :])
    y, nodes, cache = run(*newest, prefix_pending=prefix, previous=previous)
    np.testing.assert_allclose(y, want_y[:, case.prefix :], atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, (nodes, cache), (want_nodes, want_cache))


def test_the_prefix_must_have_all_nodes_before_the_queries():
    projected, cache, depth, mask, _ = on_device(Case("tree", PLAIN))
    with pytest.raises(ValueError, match="0 prefix and 4 query nodes are not the 13 nodes"):
        tree_attention_layer(projected[:, 9:], cache, depth[:, 9:], mask[:, 9:], layout=PLAIN)


def test_what_is_behind_the_length_does_not_matter():
    """While one program writes the path there, others may read it."""
    case = Case("tree", PLAIN, splits=2)
    projected, cache, *rest, previous = on_device(case)
    behind = jnp.arange(case.capacity)[:, None] >= cache.length[:, None, None, None]
    other = cache._replace(
        keys=jnp.where(behind, 1e4, cache.keys), values=jnp.where(behind, 1e4, cache.values)
    )
    blocks = BlockSizes(rows=16, keys=16, splits=2, num_warps=4, num_stages=1)
    options = dict(layout=PLAIN, prefix_pending=None, interpret=True, blocks=blocks)
    run = jax.jit(functools.partial(pallas_triton_layer.tree_attention_layer, **options))
    y, *_ = run(projected, cache, *rest, previous=previous)
    np.testing.assert_array_equal(run(projected, other, *rest, previous=previous)[0], y)


def test_which_layers_the_kernel_refuses():
    assert pallas_triton_layer.unsupported(PLAIN, 1) is None
    assert pallas_triton_layer.unsupported(ODD, 1) is None
    assert "capacity 0" in pallas_triton_layer.unsupported(PLAIN, 0)
    wide = dataclasses.replace(PLAIN, head_dim=272)
    assert "head_dim = 272 is more than 256" in pallas_triton_layer.unsupported(wide, 1)
