"""Experts and shared numerics, beyond their tables."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from numpy.testing import assert_array_equal

from pallas_kernels import AttentionLayout, dispatch, expert_mlps, triton
from pallas_kernels.numerics import few_best, scaled
from stree_jax.models.layers import causal_conv1d
from tests.cases import mamba2_layer, moe
from tests.cases.ops import OPS
from tests.helpers import as_users


def test_experts_on_a_tpu():
    """Loops read chosen experts alone; many rows are one grouped product."""

    def text(case, platform):
        options = dict(activation=case.activation, gated=case.gated, implementation="xla")
        jitted = jax.jit(functools.partial(expert_mlps, **options))
        lowered = jitted.trace(*moe.on_device(case)).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    for case, loops in ((moe.FEW, 1), (moe.MANY, 0), (moe.CASES["large blocks of rows"], 1)):
        assert text(case, "tpu").count("stablehlo.while") == loops
        assert "stablehlo.while" not in text(case, "cuda")


def test_a_few_of_the_best_are_those_of_top_k():
    least, most = -jnp.inf, jnp.inf
    values = jnp.array([[2.0, 3, 2, 3, 1], [least, 7, least, least, 8], [most, 0, most, -1, 2]])
    for count in (1, 2, 5):
        largest, index = few_best(values, count)
        wanted, where = jax.lax.top_k(values, count)
        assert_array_equal(largest, wanted)
        is_number = wanted > least  # others are unspecified
        assert_array_equal(index[is_number], where[is_number])


def test_few_tokens_are_xlas_unless_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "device_obstacle", lambda device: None)  # as on a GPU

    def num_kernels(case, implementation=None):
        options = dict(activation=case.activation, gated=case.gated)
        run = functools.partial(expert_mlps, **options, implementation=implementation)
        return str(jax.make_jaxpr(run)(*moe.on_device(case))).count("pallas_call")

    assert num_kernels(moe.FEW) == 0
    assert num_kernels(moe.FEW, "pallas") == num_kernels(moe.MANY) == 2
    with dispatch.to_the_bit(True):
        assert num_kernels(moe.FEW) == 2


KERNELS = [op for op, table in OPS.items() if "pallas_interpret" in table.implementations]


@pytest.mark.thorough
@pytest.mark.parametrize("op", KERNELS)
def test_kernels_are_in_programs_and_do_not_count_them(op, monkeypatch):
    """Outside of `jax.jit` jax 0.11.0 may run a kernel wrongly (#40633).

    `pl.num_programs` may be the number in another call (#40847).
    """
    call, are_traced = triton.call, []

    def traced(kernel, **options):
        def run(*arrays):
            are_traced.extend(
                isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(arrays)
            )
            results = jax.eval_shape(call(kernel, **options), *arrays)
            return jax.tree.map(jnp.zeros_like, results)

        return run

    monkeypatch.setattr(triton, "call", traced)
    # Programs of tables, not of ops.
    monkeypatch.setattr(jax, "jit", lambda function: function)
    monkeypatch.setattr(mamba2_layer, "layer", mamba2_layer.layer.__wrapped__)
    monkeypatch.setattr(pl, "num_programs", None)
    jax.clear_caches()
    with contextlib.suppress(AssertionError):  # results are zeros
        table, way = OPS[op], "pallas_interpret"
        case = next(case for case in table.cases.values() if not table.lacks(case, way))
        table.errors.__wrapped__(case, way)
    jax.clear_caches()
    assert are_traced
    assert all(are_traced)


def test_heads_are_kept_out_of_the_projection_on_a_tpu(monkeypatch):
    """XLA would transpose its weight, whose copy is as large; also where it is differentiated."""
    layout = AttentionLayout(2, 1, 4, 1.0, frequencies=(1.0,))
    projected = jnp.arange(16.0)[None, None]

    def total():  # a new function each time: jax keeps what it traced
        positions = jnp.ones((1, 1), jnp.int32)
        return lambda projected: sum(part.sum() for part in layout.split(projected, positions))

    wanted = jax.grad(total())(projected)
    assert "optimization_barrier" not in str(jax.make_jaxpr(total())(projected))
    monkeypatch.setattr(dispatch, "on_tpu", lambda: True)
    assert "optimization_barrier" in str(jax.make_jaxpr(total())(projected))
    assert_array_equal(jax.grad(total())(projected), wanted)


PRODUCTS = {
    "a factor": lambda x, y: scaled(x, 0.37) + y,
    "a convolution": lambda x, y: causal_conv1d(x, x[:, :3], y[0, :4], None),
    "a rotation": lambda x, y: AttentionLayout(2, 1, 16, 1.0, (1.0, 0.7, 0.3)).split(
        x, jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_before_a_sum(name):
    """In a program it would be a multiply-add, here or there; op by op it is none."""
    x, y = jnp.array(np.random.default_rng(0).normal(size=(2, 2, 7, 64)), jnp.float32)
    want = PRODUCTS[name](x, y)
    jax.tree.map(assert_array_equal, as_users(PRODUCTS[name])(x, y), want)
