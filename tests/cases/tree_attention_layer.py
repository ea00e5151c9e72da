"""The whole of an attention layer between its projections."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionLayout, HeadNorms, KVCache, NodeKV, tree_attention_layer
from pallas_kernels.tree_attention import pallas_triton_layer
from pallas_kernels.tree_attention.reference import tree_attention_layer as reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error
from tests.cases.tree_attention import SMALL, unseen_behind


def turning(pairs):
    """Frequencies of rotated pairs."""
    return tuple(float(f) for f in np.float32(100.0 ** -(np.arange(pairs) / max(pairs, 1))))


PLAIN = AttentionLayout(4, 2, 16, scale=0.25, frequencies=turning(8))
PARTLY = AttentionLayout(3, 1, 32, scale=0.2, frequencies=turning(4), key_multiplier=0.7)
FIXED = AttentionLayout(8, 2, 16, scale=0.25, key_multiplier=1.3)
ODD = AttentionLayout(4, 2, 48, scale=0.2, frequencies=turning(12), key_multiplier=0.7)
WIDE = AttentionLayout(2, 2, 224, scale=0.07, frequencies=turning(112))
CASES = base.table(
    {
        "root only": dict(nodes=1, replayed=1),
        "tree, and a row with an empty path": {},
        "prefix, blocks of nodes": dict(nodes=40, replayed=38, prefix=21, capacity=90),
        "shared among programs": dict(splits=3),
        "shared, more nodes than a block": dict(
            layout=FIXED, nodes=20, replayed=20, splits=2, capacity=64
        ),
        "rotated in part, columns behind": dict(layout=PARTLY, splits=2, extra_columns=32),
        "heads and pairs of several parts": dict(layout=ODD, nodes=20, prefix=3),
        "wide heads": dict(layout=WIDE, nodes=3, bf16=True),
        "one rotated pair": dict(
            layout=dataclasses.replace(PLAIN, frequencies=turning(1)), nodes=2
        ),
        "a long way": dict(nodes=3, capacity=4010, lengths=(3990,)),
        "columns behind that are no heads": dict(layout=PARTLY, nodes=3, extra_columns=7),
        "full to the last place, and over": dict(capacity=24, lengths=(21, 3, 23, 30)),
        "normed, a gate before": dict(
            layout=dataclasses.replace(ODD, first_column=192), nodes=5, norms=True, splits=2
        ),
        "normed, not rotated, columns around": dict(
            layout=dataclasses.replace(FIXED, first_column=5), extra_columns=3, norms=True
        ),
        "bf16, normed": dict(nodes=3, bf16=True, norms=True),
        "bf16": dict(nodes=20, splits=2, bf16=True),
        "prefix before the path is written": dict(prefix=5, late=True),
    },
    layout=PLAIN,
    nodes=13,
    replayed=6,
    prefix=0,  # nodes that a first call runs, before a second call runs the others
    late=False,  # that one writes the path, too: what the first call wrote is dropped
    capacity=40,
    lengths=(23, 0, 34),
    extra_columns=0,
    norms=False,
    splits=1,
)


@functools.cache
def problem(case):
    """Float64 arrays that are exact in the case's type; the path of the second row is empty."""
    rng, draw = base.drawn(case)
    layout, batch = case.layout, len(case.lengths)
    draw = functools.partial(draw, batch)
    heads = (layout.num_groups, layout.head_dim)
    cached = (layout.num_groups, case.capacity, layout.head_dim)
    mask = base.ancestor_mask(base.random_parents(rng, batch, case.nodes))
    path = base.ancestor_mask(base.random_parents(rng, batch, case.replayed))[:, -1].copy()
    path[1:2] = False
    projected = draw(case.nodes, layout.first_column + layout.num_columns + case.extra_columns)
    keys, values = (unseen_behind(case.lengths, draw(*cached)) for _ in range(2))
    cache = KVCache(keys, values, np.array(case.lengths, np.int32))
    depth = (mask.sum(axis=2) - 1).astype(np.int32)
    old = NodeKV(draw(case.replayed, *heads), draw(case.replayed, *heads))
    norms = None
    if case.norms:
        weights = draw(2, layout.head_dim)[0]
        norms = (*weights, 1e-3)
    return projected, cache, depth, mask, (old, path), norms


def on_device(case):
    return jax.tree.map(
        lambda x: (
            x
            if isinstance(x, float)
            else base.on_device(x, case.kind if x.dtype == np.float64 else None)
        ),
        problem(case),
    )


def run_with(case, function):
    """Runs the whole tree, or its first nodes and then the others."""
    projected, cache, depth, mask, previous, norms = on_device(case)
    norms = norms and HeadNorms(*norms)
    first, options = case.prefix or case.nodes, dict(layout=case.layout, norms=norms)
    early = mask[:, :first, :first]
    y, nodes, after = jax.jit(functools.partial(function, prefix_pending=None, **options))(
        projected[:, :first], cache, depth[:, :first], early, previous=previous
    )
    if case.prefix:
        cache, previous = (cache, previous) if case.late else (after, None)
        newest = projected[:, first:], cache, depth[:, first:], mask[:, first:]
        more, nodes, after = jax.jit(functools.partial(function, **options))(
            *newest, prefix_pending=nodes, previous=previous
        )
        y = jnp.concatenate([y, more], axis=1)
    return y, nodes, after


@functools.cache
def errors(case, implementation):
    """Of the outputs and the keys; values and the cache are exact, rows of a full cache NaN."""
    function = functools.partial(tree_attention_layer, implementation=implementation)
    if "pallas" in implementation:
        function = functools.partial(
            pallas_triton_layer.tree_attention_layer,
            interpret=implementation == "pallas_interpret",
            blocks=dataclasses.replace(SMALL, splits=case.splits),
        )
    y, nodes, cache = run_with(case, function)
    projected, before, depth, mask, (old, path), norms = problem(case)
    want_y, want_nodes, want_cache = reference(
        *(projected, before, depth, mask),
        layout=case.layout,
        norms=norms,
        previous=(*old, path),
    )
    assert y.dtype == nodes.keys.dtype == cache.keys.dtype == case.kind
    full = want_cache[2] > case.capacity
    assert np.isnan(np.asarray(y, np.float32)[full]).all()
    np.testing.assert_array_equal(np.asarray(nodes.values, np.float64), want_nodes[1])
    for value, wanted in zip(cache, want_cache, strict=True):
        np.testing.assert_array_equal(np.asarray(value, np.float64), wanted)
    return {
        "y": relative_error(y[~full], want_y[~full]),
        "keys": relative_error(nodes.keys, want_nodes[0]),
    }


def budgets(case):
    return dict.fromkeys(("y", "keys"), Budget(base.OUTPUT[case.bf16]))


TREE_ATTENTION_LAYER = Op(
    *(CASES, errors, budgets, base.WITH_NATIVE),
    lacks=base.native_lacks_bf16,
)
