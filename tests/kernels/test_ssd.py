import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ssd
from pallas_kernels.ssd.reference import ssd as ssd_reference
from tests.kernels.cases import relative_error


def inputs(batch=2, length=21, heads=4, head_dim=8, state=8, groups=2, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32).astype(np.float64)

    return (
        draw(batch, length, heads, head_dim),
        np.log1p(np.exp(draw(batch, length, heads))).astype(np.float32).astype(np.float64),
        -np.exp(draw(heads)).astype(np.float32).astype(np.float64),
        draw(batch, length, groups, state),
        draw(batch, length, groups, state),
        draw(heads, head_dim),
        draw(batch, heads, head_dim, state),
    )


def single(values):
    return [jnp.asarray(value, jnp.float32) for value in values]


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
def test_ssd_is_the_recurrence(chunk_size):
    values = inputs()
    truth, final = ssd_reference(*values)
    got, state = jax.jit(functools.partial(ssd, chunk_size=chunk_size))(*single(values))
    assert relative_error(got, truth) < 1e-6
    assert relative_error(state, final) < 1e-6


def test_two_pieces_are_one_sequence():
    x, dt, A, B, C, D, state = single(inputs())
    whole, final = ssd(x, dt, A, B, C, D, state, chunk_size=8)
    first, middle = ssd(x[:, :9], dt[:, :9], A, B[:, :9], C[:, :9], D, state, chunk_size=8)
    second, end = ssd(x[:, 9:], dt[:, 9:], A, B[:, 9:], C[:, 9:], D, middle, chunk_size=8)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(end, final, atol=1e-5)


def test_padding_passes_the_state_through():
    x, dt, A, B, C, D, state = single(inputs())
    dt = dt.at[:, 11:].set(0.0)
    _, padded = ssd(x, dt, A, B, C, D, state, chunk_size=8)
    _, short = ssd(x[:, :11], dt[:, :11], A, B[:, :11], C[:, :11], D, state, chunk_size=8)
    np.testing.assert_allclose(padded, short, atol=1e-6)


def test_gradients_are_finite_with_large_time_steps():
    x, dt, A, B, C, D, state = single(inputs())

    def total(dt):
        y, final = ssd(x, dt, A, B, C, D, state, chunk_size=8)
        return (y**2).sum() + (final**2).sum()

    assert jnp.isfinite(jax.grad(total)(dt * 100)).all()
