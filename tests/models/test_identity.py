"""Which weights: prefixes of others are refused, and an array is read once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.models import identity as module
from stree_jax.models.identity import identity
from stree_jax.testing import tiny_model


def changed(change):
    def of(model):
        copy = nnx.clone(model)
        change(copy)
        return copy

    return of


@changed
def base(model):
    """Of two like layers; a norm has ones."""
    model.final_norm_scale[...] = jnp.where(jnp.arange(16) < 8, 1.0, 3.0)


@changed
def rows_exchanged(model):
    model.embedding[...] = model.embedding[jnp.array([1, 0, *range(2, 37)])]


@changed
def reversed_vector(model):
    model.final_norm_scale[...] = model.final_norm_scale[::-1]


@changed
def twos(model):
    model.final_norm_scale[...] = jnp.where(jnp.arange(16) < 8, 2.0, 3.0)


@changed
def transposed(model):
    kernel = model.blocks[0].mixer.out_proj.kernel
    kernel[...] = kernel[...].T


@changed
def layers_exchanged(model):
    first, second = model.blocks
    model.blocks = nnx.List([second, first])


@changed
def vectors_exchanged(model):
    """Of one shape and dtype: only their names differ."""
    mixer = model.blocks[0].mixer
    mixer.D, mixer.dt_bias = mixer.dt_bias, mixer.D


@changed
def other_dtype(model):
    model.final_norm_scale = nnx.Param(model.final_norm_scale[...].astype(jnp.bfloat16))


@changed
def other_config(model):
    model.config = dataclasses.replace(model.config, norm_eps=1e-2)


CHANGES = (
    *(rows_exchanged, reversed_vector, twos, transposed, layers_exchanged, vectors_exchanged),
    *(other_dtype, other_config),
)


def test_a_prefix_of_other_weights_is_refused():
    model = base(tiny_model("mamba_in_llama"))
    options = dict(max_new_tokens=2, eos_token=())
    prefix = st.generate(model, [[3, 1, 4]], return_prefix=True, **options).prefix
    assert st.generate(nnx.clone(model), [[]], after=prefix, **options).lengths == [2]
    taken = []
    for change in CHANGES:
        try:
            st.generate(change(model), [[]], after=prefix, **options)
            taken.append(change)
        except ValueError as error:
            assert "after was read with another model, or its weights" in str(error)
    assert not taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "key"])
def test_a_program_and_numpy_have_the_same_sums(dtype, monkeypatch):
    numbers = jnp.maximum(9 * jax.random.normal(jax.random.key(0), (3, 5, 7)), 0)
    array = jax.random.split(jax.random.key(0), 5) if dtype == "key" else numbers.astype(dtype)
    sums = module._sums(array)
    monkeypatch.setattr(module, "_SMALL", 0)
    np.testing.assert_array_equal(module._sums(array), sums)
    assert module._sums(array[::-1]).tolist() != sums.tolist()


def test_an_array_is_read_once(monkeypatch):
    """Also in a second model that shares it; an array of NumPy's may change."""
    read, sums = [], module._sums
    monkeypatch.setattr(module, "_sums", lambda array: read.append(array.shape) or sums(array))
    model = nnx.clone(tiny_model())
    first = identity(model)
    assert identity(model) == first
    assert len(read) == len(jax.tree.leaves(model))
    read.clear()
    other = rows_exchanged(model)
    assert identity(other) != first
    assert read == [model.embedding.shape]
    count = len(module._known)
    del other
    assert len(module._known) == count - 1
    numbers = np.zeros(3)
    before = identity(numbers)
    numbers[0] = 1
    assert identity(numbers) != before
