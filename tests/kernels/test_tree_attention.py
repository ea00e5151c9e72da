"""Tree attention against float64, over caches that are empty, short, full and split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tree_attention
from pallas_kernels.tree_attention import config, pallas_triton, xla
from pallas_kernels.tree_attention.reference import tree_attention as reference
from tests.kernels.cases import ancestor_mask, random_parents, relative_error

# float32: sums of some hundred terms. bf16: rounding the output.
BUDGET = {False: 1e-6, True: 3e-3}
SMALL = config.BlockSizes(rows=16, keys=16, splits=1, num_warps=4, num_stages=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    nodes: int = 5
    queries: int | None = None
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    capacity: int = 40
    lengths: tuple[int, ...] = (23, 40)
    splits: int = 1
    scale: float = 0.25
    bf16: bool = False
    causal: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("several blocks"),
    Case("splits", splits=2),
    Case("more splits than blocks", lengths=(3, 0, 33), splits=3),
    Case("no cache", capacity=0, lengths=(0, 0)),
    Case("a head a group", heads=2, nodes=1),
    Case("blocks of rows and of nodes", heads=8, groups=1, nodes=21, lengths=(17,), splits=2),
    Case("newest level", nodes=20, queries=3, splits=2),
    Case("a piece of a prompt", nodes=37, lengths=(40, 0), causal=True),
    Case("the end of a chain", nodes=38, queries=37, causal=True),
    Case("heads of several parts", head_dim=48, splits=2),
    Case("heads of several parts, not split", head_dim=48, nodes=21, queries=4),
    Case("heads of two equal parts", head_dim=256, nodes=2, scale=1 / 16),
    Case("wide heads in bf16", head_dim=160, heads=2, splits=2, scale=0.08, bf16=True),
    Case("sharp", scale=20.0, splits=2),
    Case("bf16", bf16=True, splits=2),
)


@functools.cache
def inputs(case):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if case.bf16 else jnp.float32
    batch, queries, head_dim = len(case.lengths), case.queries or case.nodes, case.head_dim

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    if case.causal:
        parents = np.tile(np.arange(-1, case.nodes - 1), (batch, 1))
    else:
        parents = random_parents(rng, batch, case.nodes)
    mask = ancestor_mask(parents)[:, case.nodes - queries :]
    return (
        draw(batch, queries, case.heads, head_dim),
        draw(batch, case.nodes, case.groups, head_dim),
        draw(batch, case.nodes, case.groups, head_dim),
        draw(batch, case.groups, case.capacity, head_dim),
        draw(batch, case.groups, case.capacity, head_dim),
        jnp.asarray(case.lengths, jnp.int32),
        jnp.asarray(mask),
    )


@pytest.mark.parametrize(
    "interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpret", "gpu"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_attention(case, interpret):
    arguments = inputs(case)
    got = jax.jit(
        functools.partial(
            pallas_triton.tree_attention,
            scale=case.scale,
            interpret=interpret,
            blocks=dataclasses.replace(SMALL, splits=case.splits),
        )
    )(*arguments)
    check(case, got)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla(case, monkeypatch):
    """The whole cache at once, and block by block with a last block that is not whole."""
    for block in (512, 7):
        monkeypatch.setattr(xla, "_BLOCK", block)
        run = jax.jit(lambda *arguments: xla.tree_attention(*arguments, scale=case.scale))
        check(case, run(*inputs(case)))


def check(case, got):
    *exact, length, mask = arguments = inputs(case)
    exact = [np.asarray(value, np.float64) for value in exact]
    truth = reference(*exact, np.asarray(length), np.asarray(mask), scale=case.scale)
    assert got.dtype == arguments[0].dtype
    assert np.isfinite(np.asarray(got, np.float32)).all()
    # Scores of size s have float32 spacing 1e-7 s, and a weight is off by that factor.
    assert relative_error(got, truth) < BUDGET[case.bf16] * max(1.0, case.scale)


def test_a_query_that_sees_nothing_gives_something_finite():
    *rest, length, mask = inputs(Case("several blocks"))
    nothing = tree_attention(*rest, jnp.zeros_like(length), jnp.zeros_like(mask), scale=1.0)
    assert np.isfinite(nothing).all()


def test_what_is_not_seen_does_not_matter():
    """What is behind the length; and a query that sees nothing gets zeros."""
    query, node_keys, node_values, keys, values, length, mask = inputs(Case("splits", splits=2))
    blocks = dataclasses.replace(SMALL, splits=2)
    run = jax.jit(
        functools.partial(pallas_triton.tree_attention, scale=0.25, interpret=True, blocks=blocks)
    )
    behind = jnp.arange(keys.shape[2])[None, None, :, None] >= length[:, None, None, None]
    nodes, cache = (query, node_keys, node_values), (keys, values)
    want = run(*nodes, *cache, length, mask)
    got = run(*nodes, *(jnp.where(behind, 1e4, value) for value in cache), length, mask)
    np.testing.assert_array_equal(got, want)
    nothing = run(*nodes, *cache, jnp.zeros_like(length), jnp.zeros_like(mask))
    np.testing.assert_array_equal(nothing, 0)


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


def test_the_kernel_has_the_gradients_of_xla():
    *arrays, length, mask = inputs(Case("several blocks"))

    def gradients(implementation):
        def total(arrays):
            options = dict(scale=0.25, implementation=implementation)
            return (tree_attention(*arrays, length, mask, **options) ** 2).sum()

        return jax.jit(jax.grad(total))(arrays)

    both = gradients("xla"), gradients("pallas_interpret")
    for wanted, got in zip(*both, strict=True):
        assert relative_error(got, np.asarray(wanted, np.float64)) < 1e-5


def test_which_heads_the_kernel_refuses():
    for size in (16, 128, 160, 224, 256):
        assert pallas_triton.unsupported(size) is None
    assert "not a multiple of 16" in pallas_triton.unsupported(72)
    assert "more than 256" in pallas_triton.unsupported(272)
