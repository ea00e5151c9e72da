"""Kernels that begin with the op before them, which saves its launch: the bits are those of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels import DeferredRMSNorm, PartialSums, add_rms_norm, triton
from pallas_kernels.matmul import QuantizedMatrix, normed_product, partial_sums
from pallas_kernels.numerics import totals

LIMITS = {"two kernels": 0, "one": 1 << 40}


def draw(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("rows", "inputs", "columns", "options"),
    [
        ((1,), 96, 70, dict(residual="float32")),
        ((1, 3), 256, 64, dict(parts=4)),  # a product in parts, too
        ((2, 2), 80, 128, dict(gate="silu", parts=2)),
        ((1,), 64, 48, dict(deferred=True, multiplier=0.7, residual="float32")),
        ((4,), 96, 40, dict(deferred=True, parts=8, axis=-1)),
        ((2,), 64, 33, dict(narrow="int8")),
    ],
)
def test_a_product_norms_its_rows(rows, inputs, columns, options, monkeypatch):
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
    weight, implementation = draw(inputs, seed=3), "pallas_interpret"
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
