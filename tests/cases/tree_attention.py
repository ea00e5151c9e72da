"""`tree_attention`, over caches that are empty, short, full and split."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import config, native, pallas_triton, xla
from pallas_kernels.tree_attention.reference import tree_attention as reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

SMALL = config.BlockSizes(rows=16, keys=16, num_warps=4)
CASES = base.table(
    {
        "several blocks": {},
        "splits": dict(splits=2),
        "more splits than blocks": dict(lengths=(3, 0, 33), splits=3),
        "no cache": dict(capacity=0, lengths=(0, 0)),
        "a head a group": dict(heads=2, nodes=1),
        "blocks of rows and of nodes": dict(heads=8, groups=1, nodes=21, lengths=(17,), splits=2),
        "newest level": dict(nodes=20, queries=3, splits=2),
        "a piece of a prompt": dict(nodes=37, lengths=(40, 0), causal=True),
        "heads of several parts": dict(head_dim=48, splits=2),
        "heads of two equal parts": dict(head_dim=256, nodes=2, scale=1 / 16),
        "wide heads in bf16": dict(head_dim=160, heads=2, splits=2, scale=0.08, bf16=True),
        "sharp": dict(scale=20.0, splits=2),
        "bf16": dict(bf16=True, splits=2),
        "a window": dict(window=7),
        "a window of a ring": dict(lengths=(23, 57), window=30),
        "a window of blocks": dict(
            nodes=37, causal=True, capacity=100, lengths=(140, 90), window=80
        ),
        "a window in the tree": dict(nodes=37, causal=True, lengths=(3, 40), window=11),
        "a window, newest level": dict(nodes=20, queries=3, window=9),
        "a window, a head a group": dict(heads=2, nodes=1, window=5),
        "a window, bf16": dict(bf16=True, window=7),
        "a block in a window": dict(nodes=10, queries=5, window=7, is_block=True),
    },
    nodes=5,
    queries=None,
    heads=4,
    groups=2,
    head_dim=16,
    capacity=40,
    lengths=(23, 40),
    splits=1,
    scale=0.25,
    causal=False,
    window=None,
    is_block=False,
)


def unseen_behind(lengths, cached):
    """A cache `[B, G, places, D]` with large numbers behind its lengths, which nobody reads."""
    behind = np.arange(cached.shape[2]) >= np.array(lengths)[:, None]
    return np.where(behind[:, None, :, None], 8192.0, cached)


@functools.cache
def inputs(case):
    """On the device: queries, keys and values of the nodes and of the cache, lengths, mask."""
    rng, draw = base.drawn(case)
    batch, queries, head_dim = len(case.lengths), case.queries or case.nodes, case.head_dim
    if case.causal:
        parents = np.tile(np.arange(-1, case.nodes - 1), (batch, 1))
    else:
        parents = base.random_parents(rng, batch, case.nodes)
    mask = base.ancestor_mask(parents)[:, case.nodes - queries :]
    if case.is_block:  # the first nodes are those of the other places
        others = ~np.eye(queries, dtype=bool)
        mask = np.broadcast_to(np.hstack([others, ~others]), mask.shape).copy()
    nodes = (batch, case.nodes, case.groups, head_dim)
    cache = (batch, case.groups, case.capacity, head_dim)
    shapes = ((batch, queries, case.heads, head_dim), nodes, nodes, cache, cache)
    arrays = [draw(*shape) for shape in shapes]
    arrays[3:] = [unseen_behind(case.lengths, x) for x in arrays[3:]]
    arrays = (base.on_device(x, case.kind) for x in arrays)
    return (*arrays, base.on_device(case.lengths, jnp.int32), base.on_device(mask))


@functools.cache
def errors(case, implementation):
    """XLA reads the whole cache at once, or in blocks, of which the last one is not whole."""
    version = native if implementation == "native" else xla
    settings = dict(scale=case.scale)
    if case.window is not None:
        settings["window"] = case.window
    if case.is_block:
        settings["is_block"] = True
    run = functools.partial(version.tree_attention, **settings)
    if "pallas" in implementation:
        run = functools.partial(
            pallas_triton.tree_attention,
            scale=case.scale,
            interpret=implementation == "pallas_interpret",
            blocks=dataclasses.replace(SMALL, splits=case.splits),
        )
    block = 7 if implementation == "xla in blocks of 7" else xla.BLOCK
    *exact, length, mask = arguments = inputs(case)
    with mock.patch.object(xla, "BLOCK", block):
        got = jax.jit(run)(*arguments)
    exact = [np.asarray(value, np.float64) for value in exact]
    trees = np.asarray(length), np.asarray(mask)
    truth = reference(*exact, *trees, **settings)
    if case.window is not None:  # it matters
        wider = reference(*exact, *trees, **settings | {"window": case.window + 1})
        assert relative_error(got, wider) > 1e-2
    assert got.dtype == arguments[0].dtype
    base.assert_finite(got)
    return {"output": relative_error(got, truth)}


def budgets(case):
    # Scores of size s have float32 spacing 1e-7 s, and a weight is off by that factor.
    return {"output": Budget(base.OUTPUT[case.bf16] * max(1.0, case.scale))}


def lacks(case, implementation):
    """Kernels have no windows."""
    return (
        base.native_lacks_bf16(case, implementation)
        or (case.window is not None and "pallas" in implementation)
        or (case.is_block and implementation == "native")
    )


TREE_ATTENTION = Op(
    *(CASES, errors, budgets, (*base.WITH_NATIVE, "xla in blocks of 7")),
    lacks=lacks,
    slow=("more splits than blocks",),
)
