"""Which weights: prefixes of others are refused, and an array is read once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.models import identity as module
from stree_jax.testing import tiny_model
from tests.helpers import refusal


def put(weight, change):
    weight[...] = change(weight[...])


CHANGES = (
    lambda model: put(model.embedding, lambda rows: rows.at[:2].set(rows[1::-1])),
    lambda model: put(model.final_norm_scale, jnp.flip),
    lambda model: put(model.final_norm_scale, lambda ones: ones.at[:8].set(2)),
    lambda model: put(model.blocks[0].mixer.out_proj.kernel, jnp.transpose),
    lambda model: setattr(model, "blocks", nnx.List([*model.blocks][::-1])),
    lambda model: setattr(model, "embedding", model.embedding.astype(jnp.bfloat16)),
    lambda model: setattr(model, "config", dataclasses.replace(model.config, norm_eps=1e-2)),
)


def test_a_prefix_of_other_weights_is_refused():
    model, options = nnx.clone(tiny_model("mamba_in_llama")), dict(max_new_tokens=2, eos_token=())
    put(model.final_norm_scale, lambda scale: jnp.full_like(scale, 3).at[:8].set(1))
    prefix = st.generate(model, [[3, 1, 4]], return_prefix=True, **options).prefix
    assert st.generate(nnx.clone(model), [[]], after=prefix, **options).lengths == [2]
    for change in CHANGES:
        changed = nnx.clone(model)
        change(changed)
        refusal(
            "after was read with another model, or its weights",
            st.generate,
            changed,
            [[]],
            after=prefix,
            **options,
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "key"])
def test_a_program_and_numpy_have_the_same_sums(dtype, monkeypatch):
    numbers = jax.random.normal(jax.random.key(0), (3, 5, 7))
    array = jax.random.wrap_key_data(numbers[0, :2, :2].view("uint32"))
    if dtype != "key":
        array = jnp.maximum(9 * numbers, 0).astype(dtype)
    sums = module._sums(array)
    monkeypatch.setattr(module, "_SMALL", 0)
    assert module._sums(array).tolist() == sums.tolist() != module._sums(array[::-1]).tolist()


def test_an_array_is_read_once(monkeypatch):
    """Also in another model that shares it."""
    model = nnx.clone(tiny_model())
    first, read, sums = module.identity(model), [], module._sums
    monkeypatch.setattr(module, "_sums", lambda array: read.append(array) or sums(array))
    other = nnx.clone(model)
    assert module.identity(other) == first
    put(other.head, jnp.negative)
    assert module.identity(other) != first
    assert read == [other.head.get_value()]
    known = len(module._known)
    read.clear()
    del other
    assert len(module._known) == known - 1
