"""Every implementation of the scan of a sequence against its sequential float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import ssd
from pallas_kernels.ssd.reference import ssd as ssd_reference
from tests.kernels.cases import relative_error
from tests.kernels.test_tree_ops import BUDGET, IMPLEMENTATIONS, LARGE_STEPS, STATE_BUDGET


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    batch: int = 2
    length: int = 21
    heads: int = 4
    head_dim: int = 16
    state: int = 16
    groups: int = 2
    chunk: int = 8
    dt_scale: float = 1.0
    padded: int = 0  # positions at the end that do not exist
    bf16: bool = False

    def __str__(self):
        return self.name


PLAIN = Case("chunks and a rest")
CASES = (
    PLAIN,
    Case("one position", length=1),
    Case("chunks of one", length=5, chunk=1),
    Case("one chunk", chunk=64),
    Case("many blocks", batch=1, length=85, groups=1, chunk=16),
    Case("blocks of channels", batch=1, length=18, heads=2, head_dim=64, state=128, groups=1),
    Case("padded positions", length=24, padded=9),
    Case("large time steps", dt_scale=100.0),
    Case("bf16", length=40, bf16=True),
    Case("bf16, parts of states", length=70, heads=2, head_dim=64, state=128, groups=1, bf16=True),
    Case("bf16, wide states", batch=1, length=35, head_dim=32, state=256, groups=1, bf16=True),
)


@functools.cache
def inputs(case):
    """Float64 arrays that are exact in the case's type."""
    rng = np.random.default_rng(0)
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape, dtype=np.float32):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    rows, heads, groups = (case.batch, case.length), case.heads, (case.groups, case.state)
    dt = np.log1p(np.exp(draw(*rows, heads))) * case.dt_scale
    dt[:, case.length - case.padded :] = 0
    return (
        draw(*rows, heads, case.head_dim, dtype=small),
        dt.astype(np.float32).astype(np.float64),
        -np.exp(draw(heads)).astype(np.float32).astype(np.float64),
        draw(*rows, *groups, dtype=small),
        draw(*rows, *groups, dtype=small),
        draw(heads, case.head_dim),
        draw(case.batch, heads, case.head_dim, case.state),
    )


def on_device(case):
    x, dt, A, B, C, D, state = inputs(case)
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    small = [jnp.asarray(value, kind) for value in (x, B, C)]
    exact = [jnp.asarray(value, jnp.float32) for value in (dt, A, D, state)]
    return small[0], exact[0], exact[1], small[1], small[2], *exact[2:]


@functools.cache
def errors(case, implementation):
    """Relative errors of the outputs and of the state."""
    options = dict(chunk_size=case.chunk, implementation=implementation)
    got, state = jax.jit(functools.partial(ssd, **options))(*on_device(case))
    truth, final = ssd_reference(*inputs(case))
    assert got.dtype == (jnp.bfloat16 if case.bf16 else jnp.float32)
    assert state.dtype == jnp.float32
    exists = slice(0, case.length - case.padded)
    return relative_error(got[:, exists], truth[:, exists]), relative_error(state, final)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ssd(case, implementation):
    factor = LARGE_STEPS if case.dt_scale > 1 else 1
    error, state_error = errors(case, implementation)
    assert error < BUDGET[case.bf16] * factor
    assert state_error < STATE_BUDGET[case.bf16] * factor
    assert error <= 1.5 * errors(case, "xla")[0] + 1e-7


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_pieces_are_one_sequence(implementation):
    x, dt, A, B, C, D, state = on_device(PLAIN)
    run = functools.partial(ssd, chunk_size=8, implementation=implementation)
    whole, final = run(x, dt, A, B, C, D, state)
    first, middle = run(x[:, :9], dt[:, :9], A, B[:, :9], C[:, :9], D, state)
    second, end = run(x[:, 9:], dt[:, 9:], A, B[:, 9:], C[:, 9:], D, middle)
    pieces = jnp.concatenate([first, second], axis=1)
    assert relative_error(pieces, np.asarray(whole, np.float64)) < BUDGET[False]
    assert relative_error(end, np.asarray(final, np.float64)) < STATE_BUDGET[False]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_passes_the_state_through(implementation):
    x, dt, A, B, C, D, state = on_device(PLAIN)
    run = functools.partial(ssd, chunk_size=8, implementation=implementation)
    _, padded = run(x, dt.at[:, 11:].set(0.0), A, B, C, D, state)
    _, short = run(x[:, :11], dt[:, :11], A, B[:, :11], C[:, :11], D, state)
    np.testing.assert_allclose(padded, short, atol=1e-6)


def gradients(implementation, dt_scale):
    def total(arguments):
        options = dict(chunk_size=8, implementation=implementation)
        y, final = ssd(*arguments, **options)
        return (y**2).sum() + (final**2).sum()

    x, dt, *rest = on_device(PLAIN)
    return jax.jit(jax.grad(total))((x, dt * dt_scale, *rest))


def test_gradients_are_finite_with_large_time_steps():
    assert all(jnp.isfinite(value).all() for value in gradients("xla", 100.0))


def test_the_kernel_has_the_gradients_of_xla():
    both = gradients("xla", 1.0), gradients("pallas_interpret", 1.0)
    for wanted, got in zip(*both, strict=True):
        assert relative_error(got, np.asarray(wanted, np.float64)) < 1e-5


def test_what_the_kernel_refuses():
    for change, message in (
        (dict(head_dim=12), "head_dim = 12 is not a power of two"),
        (dict(state=256), "state_size = 256 of float32 inputs is more than 128"),
        (dict(state=512, bf16=True), "state_size = 512 of bfloat16 inputs is more than 256"),
    ):
        case = dataclasses.replace(PLAIN, length=3, **change)
        with pytest.raises(ValueError, match=message):
            errors(case, "pallas_interpret")
        assert errors(case, "xla")[0] < BUDGET[case.bf16]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_the_arguments_must_agree(implementation):
    x, dt, A, B, C, D, state = on_device(PLAIN)
    run = functools.partial(ssd, implementation=implementation)
    with pytest.raises(ValueError, match="chunk_size = 0 is not positive"):
        run(x, dt, A, B, C, D, state, chunk_size=0)
    three = jnp.repeat(B[:, :, :1], 3, axis=2)
    with pytest.raises(ValueError, match="3 groups do not divide 4 heads"):
        run(x, dt, A, three, three, D, state)
