"""Kernels that are one for several ops, or several for one: bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import pallas_kernels as pk
import stree_jax as st
from pallas_kernels import DeferredRMSNorm, GatedNorm, PartialSums, add_rms_norm, dispatch, triton
from pallas_kernels.matmul import QuantizedMatrix, normed_product, partial_sums
from pallas_kernels.numerics import totals
from stree_jax.models.cache import path_to
from stree_jax.testing import random_model
from tests.cases import ssd as ssd_cases

LIMITS = {"two kernels": 0, "one": 1 << 40}


def draw(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("rows", "inputs", "columns", "options"),
    [
        ((1,), 96, 70, dict(residual="float32")),
        ((1, 3), 256, 64, dict(parts=4)),  # a product in parts, too
        ((2, 2), 80, 128, dict(gate="silu", parts=2)),
        ((1,), 64, 48, dict(deferred=True, multiplier=0.7, residual="float32")),
        ((4,), 96, 40, dict(deferred=True, parts=8, axis=-1)),
        ((2,), 64, 33, dict(narrow="int8")),
        ((2,), 2560, 64, dict(parts=8, residual="float32", deferred=True)),
        ((3,), 1024, 64, dict(parts=2)),
    ],
)
def test_a_product_norms_its_rows(rows, inputs, columns, options, implementation, monkeypatch):
    monkeypatch.setattr(triton, "MOST_REPEATED_BYTES", LIMITS["one"])
    axis, parts = options.get("axis", -2), options.get("parts", 1)
    matrix = draw(*((inputs, columns) if axis == -2 else (columns, inputs)), seed=1)
    if narrow := options.get("narrow"):
        matrix = jax.tree.map(jnp.asarray, QuantizedMatrix.of(np.asarray(matrix), axis, narrow))
    residual = draw(*rows, inputs, dtype=options.get("residual", "bfloat16"))
    output = draw(*rows, inputs, seed=2)
    if parts > 1:
        output = PartialSums(draw(parts, *rows, inputs, dtype="float32"), output.dtype)
    if "deferred" in options:
        output = DeferredRMSNorm(output, jnp.square(draw(*rows, 5, dtype="float32")), 1e-3)
    weight = draw(inputs, seed=3)
    norm = dict(epsilon=1e-5, multiplier=options.get("multiplier", 1.0))
    product = dict(axis=axis, gate=options.get("gate"), implementation=implementation)

    @jax.jit
    def one(*arrays):
        return normed_product(*arrays, matrix, **norm, **product)

    @jax.jit
    def two(*arrays):
        added, normed = add_rms_norm(*arrays, **norm, implementation=implementation)
        rows = normed.astype(jnp.bfloat16)
        return added, normed, partial_sums(rows, matrix, dtype=rows.dtype, **product)

    arrays = residual, output, weight
    jax.tree.map(assert_array_equal, totals(one(*arrays)), totals(two(*arrays)))
    monkeypatch.setattr(triton, "MOST_REPEATED_BYTES", LIMITS["two kernels"])
    assert normed_product(*arrays, matrix, **norm, **product) is None


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("rows", "inputs", "columns", "options"),
    [
        ((1,), 64, 70, dict(norm="norm_then_gate", num_groups=4, gate_start=5)),
        ((1, 3), 1024, 64, dict(num_groups=8, parts=4)),  # the product is in 4 parts, too
        ((2, 2), 512, 40, dict(norm="none", activation="sigmoid", axis=-1)),
        ((4,), 256, 33, dict(num_groups=2, narrow="int8", is_shared=False)),
    ],
)
def test_a_product_gates_its_rows(rows, inputs, columns, options, implementation, monkeypatch):
    options = dict(options)
    axis, parts, narrow = (options.pop(name, 0) for name in ("axis", "parts", "narrow"))
    axis = axis or -2
    matrix = draw(*((inputs, columns) if axis == -2 else (columns, inputs)), seed=1)
    if narrow:
        matrix = jax.tree.map(jnp.asarray, QuantizedMatrix.of(np.asarray(matrix), axis, narrow))
    gate, weight = draw(*rows, inputs + 9, seed=2), None
    if parts:
        gate = PartialSums(draw(parts, *gate.shape, dtype="float32"), gate.dtype)
    if options.get("norm") != "none":
        is_shared = options.pop("is_shared", True)
        weight = draw(inputs // options["num_groups"] if is_shared else inputs, seed=3)
    value = GatedNorm(draw(*rows, inputs), gate, weight, implementation=implementation, **options)

    def product(limit):
        monkeypatch.setattr(triton, "MOST_REPEATED_BYTES", limit)

        @jax.jit
        def run(value):
            kind = dict(axis=axis, dtype=value.dtype, implementation=implementation)
            return partial_sums(value, matrix, **kind)

        with dispatch.recorded() as ran:
            return totals(run(value)), ran

    one, ran = product(LIMITS["one"])
    two, ran_apart = product(LIMITS["two kernels"])
    assert_array_equal(one, two)
    assert ran.keys() == {"matmul"}
    assert ran_apart.keys() == {"matmul", "gated_rms_norm"}


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("norms", [False, True])
def test_attention_adds_up_the_parts_of_a_projection(norms, implementation):
    layout = pk.AttentionLayout(4, 2, 16, 0.25, frequencies=(1.0, 0.1), first_column=64)
    parts = PartialSums(draw(4, 2, 3, layout.num_columns + 64, dtype="float32"), jnp.bfloat16)
    cache = pk.KVCache(*draw(2, 2, 2, 40, 16, seed=1), jnp.array([30, 2], jnp.int32))
    depth = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1))
    of_heads = pk.HeadNorms(*draw(2, 16, seed=2), epsilon=1e-5) if norms else None

    @jax.jit
    def run(projected):
        return pk.tree_attention_layer(
            *(projected, cache, depth, jnp.tile(jnp.tri(3, dtype=bool), (2, 1, 1))),
            layout=layout,
            norms=of_heads,
            implementation=implementation,
        )

    jax.tree.map(assert_array_equal, run(parts), run(parts.total()))


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_puts_attention_together(gated, implementation, monkeypatch):
    """In 2 parts of 2 heads; of two rows, the second of which has an overfull cache."""
    layout = pk.AttentionLayout(4, 2, 128, 0.1, frequencies=(1.0, 0.1))
    cache = pk.KVCache(*draw(2, 2, 2, 40, 128, seed=1), jnp.array([39, 41], jnp.int32))
    projected, matrix = draw(2, 2, layout.num_columns), draw(512, 48, seed=2)
    gate = draw(2, 2, 512, seed=3) if gated else None

    def product(limit):
        monkeypatch.setattr(triton, "MOST_REPEATED_BYTES", limit)

        @jax.jit
        def run(projected):
            depth = jnp.tile(jnp.arange(2, dtype=jnp.int32), (2, 1))
            mask = jnp.tile(jnp.tri(2, dtype=bool), (2, 1, 1))
            kernel = dict(implementation=implementation)
            options = dict(layout=layout, in_parts=True, **kernel)
            y, *_ = pk.tree_attention_layer(projected, cache, depth, mask, **options)
            value = GatedNorm(y, gate, None, norm="none", activation="sigmoid", **kernel)
            return partial_sums(value, matrix, dtype=value.dtype, **kernel)

        return run(projected), str(jax.make_jaxpr(run)(projected))

    one, program = product(LIMITS["one"])
    two, program_of_two = product(LIMITS["two kernels"])
    one, two = (np.asarray(totals(y), np.float32) for y in (one, two))
    assert_array_equal(one, two)
    assert np.isnan(one[1]).all()
    assert ["tree_attention_combine" in text for text in (program, program_of_two)] == [False, True]


# Of sizes that kernels take.
MAMBA2 = st.Mamba2Config(num_heads=4, head_dim=16, state_size=16, num_groups=2)
LAYERS = {
    "tree_scan_layer": (MAMBA2, st.MlpConfig(32), st.AttentionConfig(2, 1, 16), MAMBA2),
    "tree_delta_layer": (
        st.GatedDeltaConfig(4, 16, 2, 16),
        st.MlpConfig(32),
        st.ShortConvConfig(32),
        st.AttentionConfig(2, 1, 16, output_gate=True, qk_norm_eps=1e-6),
    ),
}


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("pallas_interpret", marks=pytest.mark.thorough),
        pytest.param("pallas", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_steps_of_few_nodes(layer, implementation, monkeypatch):
    """The last node of a chain, and then one that replays it, some of it or nothing."""
    config = st.ModelConfig(37, 32, LAYERS[layer], tie_embeddings=False)
    model = random_model(config, dtype="bfloat16", implementation=implementation)
    exists = jnp.ones((3, 5), bool).at[1, 4].set(False)
    chain, root, before = (
        st.TreeTopology.chain(depth).tree(exists[:, : depth + 1]) for depth in (4, 0, 3)
    )
    nodes = jnp.arange(15).reshape(3, 5)

    def steps(limit):
        monkeypatch.setattr(triton, "MOST_REPEATED_BYTES", limit)
        cache = model.init_cache(3, 8)
        _, prefix, _ = model.tree(nodes[:, :4], before, cache)
        with dispatch.recorded() as ran:
            level = model.tree(nodes[:, 4:], chain, cache, prefix_pending=prefix)
            path = path_to(chain, jnp.array([4, -1, 2]))
            after = model.tree(nodes[:, :1], root, cache, replay=(level[1], path))
        return (level, after), ran

    one, ran = steps(LIMITS["one"])
    two, ran_apart = steps(LIMITS["two kernels"])
    jax.tree.map(assert_array_equal, one, two)
    assert {ran["normed_product"], ran[layer]} == {implementation}
    assert not {"normed_product", layer} & ran_apart.keys()


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)
def test_segments_of_a_sequence_know_nothing_of_its_padding(implementation):
    """A sequence of one segment and a rest, in buffers of two segments and of three."""
    *inputs, state = ssd_cases.on_device(ssd_cases.CASES["three segments"])
    results = []
    for length in (190, 256, 290):
        x, dt, A, B, C, D = inputs
        dt = dt.at[:, 190:].set(0)
        x, dt, B, C = (array[:, :length] for array in (x, dt, B, C))
        y, after = pk.ssd(x, dt, A, B, C, D, state, implementation=implementation)
        results.append((y[:, :190], after))
    jax.tree.map(assert_array_equal, *results[:2])
    jax.tree.map(assert_array_equal, *results[1:])
