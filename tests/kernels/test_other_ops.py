"""Sequences, norms, experts and shared numerics, beyond their tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, expert_mlps, gated_rms_norm, ssd
from pallas_kernels.numerics import best_of
from tests.cases import base, moe
from tests.cases import ssd as ssd_cases
from tests.cases.base import ON_CPU_AND_GPU


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU)
def test_two_pieces_are_one_sequence(implementation):
    x, dt, A, B, C, D, state = ssd_cases.on_device(ssd_cases.PLAIN)
    run = functools.partial(ssd, chunk_size=8, implementation=implementation)
    whole, final = run(x, dt, A, B, C, D, state)
    first, middle = run(x[:, :9], dt[:, :9], A, B[:, :9], C[:, :9], D, state)
    second, end = run(x[:, 9:], dt[:, 9:], A, B[:, 9:], C[:, 9:], D, middle)
    pieces = jnp.concatenate([first, second], axis=1)
    assert base.relative_error(pieces, whole) < base.OUTPUT[False]
    assert base.relative_error(end, final) < base.STATE[False]


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU)
def test_padding_passes_the_state_through(implementation):
    x, dt, A, B, C, D, state = ssd_cases.on_device(ssd_cases.PLAIN)
    run = functools.partial(ssd, chunk_size=8, implementation=implementation)
    _, padded = run(x, dt.at[:, 11:].set(0.0), A, B, C, D, state)
    _, short = run(x[:, :11], dt[:, :11], A, B[:, :11], C[:, :11], D, state)
    np.testing.assert_allclose(padded, short, atol=1e-6)


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU[:2])
def test_extreme_gates_stay_finite(implementation):
    """SiLU of -1e4 is 0, not -1e4 / inf * ... ; of 1e4 it is 1e4."""
    gate = jnp.tile(jnp.array([-1e4, 1e4], jnp.float32), 8)[None]
    got = gated_rms_norm(jnp.ones((1, 16)), gate, None, norm="none", implementation=implementation)
    np.testing.assert_array_equal(got, jnp.maximum(gate, 0))


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU)
def test_the_gate_may_be_a_part_of_an_array(implementation):
    rng = np.random.default_rng(0)
    y, wide = (jnp.asarray(rng.normal(size=(3, size)), jnp.float32) for size in (64, 200))
    run = functools.partial(
        gated_rms_norm, weight=jnp.ones(64), num_groups=2, implementation=implementation
    )
    got = run(y, wide, gate_start=40)
    np.testing.assert_allclose(got, run(y, wide[:, 40:104]), rtol=1e-6)


def test_few_tokens_are_xlas_unless_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "device_obstacle", lambda: None)  # as on a GPU

    def num_kernels(case, implementation=None):
        options = dict(activation=case.activation, gated=case.gated)
        run = functools.partial(expert_mlps, **options, implementation=implementation)
        return str(jax.make_jaxpr(run)(*moe.on_device(case))).count("pallas_call")

    assert num_kernels(moe.FEW) == 0
    assert num_kernels(moe.FEW, "pallas") == num_kernels(moe.MANY) == 2


def test_the_best_of_logits():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0, 9.0], [-jnp.inf, -jnp.inf, -5.0, -jnp.inf, 9.0]])
    token, logit = best_of(logits, 4)
    assert token.dtype == jnp.int32
    assert token.tolist() == [1, 2]
    assert logit.tolist() == [2.0, -5.0]
    assert best_of(logits)[0].tolist() == [4, 4]


def test_the_best_of_what_is_not_finite():
    logits = jnp.array([[0.0, jnp.nan, 2.0], [-jnp.inf] * 3, [0.0, jnp.inf, jnp.inf]])
    token, logit = best_of(logits)
    np.testing.assert_array_equal(logit, [jnp.nan, -jnp.inf, jnp.inf])
    assert token.tolist() == [2, 0, 1]
