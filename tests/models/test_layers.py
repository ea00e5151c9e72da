"""Projections of few rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stree_jax.models.layers import linear

SHAPES = [(1,), (2,), (1, 2), (2, 1), (3,), (17,)]


def projection(dtype=jnp.float32, bias=True, in_size=2):
    """Of an input as wide as the rows that are special."""
    made = linear(in_size, 5, bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
    if bias:
        made.bias.set_value(jnp.arange(5, dtype=dtype))
    return made


def products(layer, rows, platform):
    """How many matrix products the layer lowers to."""
    inputs = jax.ShapeDtypeStruct((*rows, layer.in_features), jnp.float32)
    lowered = jax.jit(lambda inputs: layer(inputs)).trace(inputs)
    return lowered.lower(lowering_platforms=(platform,)).as_text().count("dot_general")


@pytest.mark.parametrize("rows", SHAPES)
def test_a_projection_is_the_product(rows):
    bias = rows[0] != 1
    layer = projection(bias=bias, in_size=2 if len(rows) > 1 else 7)
    inputs = np.random.default_rng(0).normal(size=(*rows, layer.in_features))
    want = inputs @ np.float64(layer.kernel[...]) + (np.arange(5.0) if bias else 0)
    have = layer(jnp.float32(inputs))
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)


def test_gradients_of_two_rows_are_those_of_the_product():
    layer = projection(in_size=7)
    inputs = jax.random.normal(jax.random.key(0), (2, 1, 7))

    def loss(layer, inputs):
        return jnp.sum(jnp.sin(layer(inputs)))

    by_layer, by_inputs = nnx.grad(loss, argnums=(0, 1))(layer, inputs)
    x, kernel = np.float64(inputs[:, 0]), np.float64(layer.kernel[...])
    by_output = np.cos(x @ kernel + np.arange(5.0))
    np.testing.assert_allclose(by_inputs[:, 0], by_output @ kernel.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_layer.kernel[...], x.T @ by_output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_layer.bias[...], by_output.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", SHAPES)
def test_only_a_cpu_multiplies_two_rows_one_by_one(rows):
    layer = projection()
    assert products(layer, rows, "cpu") == (2 if np.prod(rows) == 2 else 1)
    assert products(layer, rows, "cuda") == 1


def test_two_rows_of_bfloat16_are_one_product():
    layer = projection(jnp.bfloat16)
    assert layer(jnp.ones((2, 2))).dtype == jnp.bfloat16
    assert products(layer, (2,), "cpu") == 1
