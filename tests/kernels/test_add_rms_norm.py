"""The residual stream and the norm of the next layer, against their float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Unscaled, add_rms_norm
from pallas_kernels.add_rms_norm.reference import add_rms_norm as reference
from tests.kernels.cases import relative_error
from tests.kernels.test_gated_rms_norm import BUDGET, IMPLEMENTATIONS

# rows, size, types of the stream and of a layer's output, multiplier, parts of the output's mean
# squares if it is unscaled
CASES = (
    ((2, 3), 64, "float32", "float32", 1.0, 0),
    ((1,), 80, "float32", "float32", 0.22, 0),
    ((2, 3), 160, "float32", "bfloat16", 1.0, 0),
    ((4,), 128, "bfloat16", "bfloat16", 1.0, 0),
    ((4,), 128, "bfloat16", "bfloat16", 0.22, 0),
    ((2, 3), 64, "float32", "float32", 1.0, 1),
    ((5,), 336, "float32", "float32", 0.22, 32),
    ((2, 3), 160, "float32", "bfloat16", 1.0, 20),
    ((4,), 128, "bfloat16", "bfloat16", 0.22, 5),
)


@functools.cache
def errors(case, implementation):
    rows, size, kind, small, multiplier, parts = case
    rng = np.random.default_rng(0)

    def draw(dtype, *shape):
        return jnp.asarray(3.0 * rng.normal(size=shape), dtype)

    arguments = draw(kind, *rows, size), draw(small, *rows, size), draw(small, size)
    options = dict(epsilon=1e-5, multiplier=multiplier)
    run = jax.jit(functools.partial(add_rms_norm, **options, implementation=implementation))
    exact = [np.asarray(value, np.float64).reshape(-1, size) for value in arguments]
    residual, output, weight = arguments
    unscaled = None
    if parts:
        squares = draw("float32", *rows, parts) ** 2
        output = Unscaled(output, squares, 0.5)
        unscaled = np.asarray(squares, np.float64).reshape(-1, parts), 0.5
    sums, normed = run(residual, output, weight)
    assert (sums.dtype, normed.dtype) == (kind, small)
    true_sums, true_normed = reference(
        exact[0], exact[1], exact[2][0], **options, unscaled=unscaled
    )
    shape = (*rows, size)
    return (
        relative_error(sums, true_sums.reshape(shape)),
        relative_error(normed, true_normed.reshape(shape)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_add_rms_norm(case, implementation):
    _, _, kind, small, multiplier, parts = case
    sums, normed = errors(case, implementation)
    # Before it is added an unscaled output is not rounded.
    rounded = "bfloat16" in (kind, small if multiplier != 1.0 and not parts else kind)
    assert sums < BUDGET[rounded]
    assert normed < BUDGET["bfloat16" in (kind, small)]
    true = errors(case, "xla")
    assert sums <= 1.5 * true[0] + 1e-7
    # The kernel norms what was rounded to the stream's type. XLA leaves that rounding out, unless
    # it is told not to (xla_allow_excess_precision=false), which makes both the same.
    assert normed <= (2.0 if kind == "bfloat16" else 1.5) * true[1] + 1e-7


@pytest.mark.parametrize("parts", [0, 4])
def test_the_kernel_has_the_gradients_of_xla(parts):
    rng = np.random.default_rng(0)
    residual, output, weight = (jnp.asarray(rng.normal(size=shape)) for shape in ((3, 32),) * 3)
    squares = jnp.asarray(rng.uniform(size=(3, parts)))

    def gradients(implementation):
        def total(residual, output, weight, squares):
            output = Unscaled(output, squares, 0.5) if parts else output
            options = dict(epsilon=1e-5, implementation=implementation)
            both = add_rms_norm(residual, output, weight[0], **options)
            return sum((value**3).sum() for value in both)

        run = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3) if parts else (0, 1, 2)))
        return run(residual, output, weight, squares)

    both = gradients("xla"), gradients("pallas_interpret")
    for wanted, got in zip(*both, strict=True):
        assert relative_error(got, np.asarray(wanted, np.float64)) < 1e-5


def test_refuses_rows_that_are_no_multiple_of_16():
    row = jnp.ones((1, 81))
    with pytest.raises(ValueError, match="add_rms_norm cannot run .* 81 .*; use 'xla'"):
        add_rms_norm(row, row, row[0], epsilon=1e-5, implementation="pallas_interpret")
