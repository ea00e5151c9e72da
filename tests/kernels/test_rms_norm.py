"""Every implementation of the norms against their float64 references, each on one table."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import DeferredRMSNorm, add_rms_norm, gated_rms_norm
from pallas_kernels.rms_norm import pallas_triton
from pallas_kernels.rms_norm.api import NORMS
from pallas_kernels.rms_norm.reference import add_rms_norm as add_reference
from pallas_kernels.rms_norm.reference import gated_rms_norm as reference
from tests.kernels.cases import relative_error

IMPLEMENTATIONS = ("xla", "pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu))
BUDGET = {False: 3e-7, True: 2.5e-3}  # float32 sums; bf16: rounding the output


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    norm: str
    rows: tuple[int, ...] = (2, 3)
    size: int = 64
    groups: int = 1
    scale: float = 1.0
    bf16: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("gate then norm", "gate_then_norm"),
    Case("norm then gate", "norm_then_gate"),
    Case("none", "none"),
    Case("groups", "gate_then_norm", size=128, groups=4),
    Case("groups, norm then gate", "norm_then_gate", size=128, groups=2),
    Case("blocks", "gate_then_norm", size=336),
    Case("one row", "norm_then_gate", rows=(1,), size=96),
    Case("epsilon decides", "gate_then_norm", scale=1e-4),
    Case("large", "gate_then_norm", scale=1e3),
    Case("bf16", "gate_then_norm", size=160, bf16=True),
    Case("bf16, norm then gate", "norm_then_gate", size=128, groups=2, bf16=True),
)


@functools.cache
def error(case, implementation):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if case.bf16 else jnp.float32

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    y, gate = draw(*case.rows, case.size, scale=case.scale), draw(*case.rows, case.size, scale=3.0)
    weight = None if case.norm == "none" else draw(case.size)
    kwargs = {"norm": case.norm, "epsilon": 1e-5, "num_groups": case.groups}
    got = jax.jit(functools.partial(gated_rms_norm, **kwargs, implementation=implementation))(
        y, gate, weight
    )
    assert got.dtype == dtype
    assert got.shape == y.shape
    exact = [
        None if value is None else np.asarray(value, np.float64).reshape(-1, case.size)
        for value in (y, gate, weight)
    ]
    weight = exact.pop()
    truth = reference(*exact, None if weight is None else weight[0], **kwargs)
    return relative_error(got, truth.reshape(y.shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_rms_norm(case, implementation):
    assert error(case, implementation) < BUDGET[case.bf16]
    assert error(case, implementation) <= 1.5 * error(case, "xla") + 1e-7


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_extreme_gates_stay_finite(implementation):
    """SiLU of -1e4 is 0, not -1e4 / inf * ... ; of 1e4 it is 1e4."""
    gate = jnp.tile(jnp.array([-1e4, 1e4], jnp.float32), 8)[None]
    got = gated_rms_norm(jnp.ones((1, 16)), gate, None, norm="none", implementation=implementation)
    np.testing.assert_array_equal(got, jnp.maximum(gate, 0))


def test_the_arguments_must_agree():
    ones = jnp.ones((1, 16))
    with pytest.raises(ValueError, match="'norm' is not one of"):
        gated_rms_norm(ones, ones, ones[0], norm="norm")
    with pytest.raises(ValueError, match="'none' with weight = "):
        gated_rms_norm(ones, ones, ones[0], norm="none")
    with pytest.raises(ValueError, match="'gate_then_norm' with weight = None"):
        gated_rms_norm(ones, ones, None)
    with pytest.raises(ValueError, match="3 groups do not divide rows of 16"):
        gated_rms_norm(ones, ones, ones[0], num_groups=3)


def test_which_sizes_the_kernel_refuses():
    of_released_models = (1024, 1536, 2688, 4096, 4480, 5120, 8192)
    for size in (16, *of_released_models):
        assert pallas_triton.unsupported("row size", size) is None
    assert "not a multiple of 16" in pallas_triton.unsupported("row size", 40)
    assert "more than" in pallas_triton.unsupported("row size", 1 << 15)
    ones = jnp.ones((1, 40))
    with pytest.raises(ValueError, match="group size = 40.*use 'xla'"):
        gated_rms_norm(ones, ones, ones[0], implementation="pallas_interpret")


@pytest.mark.parametrize("norm", NORMS)
def test_gated_rms_norm_has_the_gradients_of_xla(norm):
    rng = np.random.default_rng(0)
    y, gate, weight = (jnp.asarray(rng.normal(size=shape)) for shape in ((3, 32), (3, 40), (32,)))
    weight = None if norm == "none" else weight

    def gradients(implementation):
        def total(arrays):
            options = dict(norm=norm, num_groups=2, gate_start=8, implementation=implementation)
            return (gated_rms_norm(*arrays, **options) ** 3).sum()

        return jax.jit(jax.grad(total))((y, gate, weight))

    both = gradients("xla"), gradients("pallas_interpret")
    for wanted, got in zip(*map(jax.tree.leaves, both), strict=True):
        assert relative_error(got, np.asarray(wanted, np.float64)) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gate_may_be_a_part_of_an_array(implementation):
    rng = np.random.default_rng(0)
    y, wide = (jnp.asarray(rng.normal(size=(3, size)), jnp.float32) for size in (64, 200))
    run = functools.partial(
        gated_rms_norm, weight=jnp.ones(64), num_groups=2, implementation=implementation
    )
    got = run(y, wide, gate_start=40)
    np.testing.assert_allclose(got, run(y, wide[:, 40:104]), rtol=1e-6)
    with pytest.raises(ValueError, match="64 gates from column 137 on, of 200 columns"):
        run(y, wide, gate_start=137)


# rows, size, types of the stream and of a layer's output, multiplier, parts of the output's mean
# squares if it is deferred
ADD_CASES = (
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
def add_errors(case, implementation):
    rows, size, kind, small, multiplier, parts = case
    rng = np.random.default_rng(0)

    def draw(dtype, *shape):
        return jnp.asarray(3.0 * rng.normal(size=shape), dtype)

    arguments = draw(kind, *rows, size), draw(small, *rows, size), draw(small, size)
    options = dict(epsilon=1e-5, multiplier=multiplier)
    run = jax.jit(functools.partial(add_rms_norm, **options, implementation=implementation))
    exact = [np.asarray(value, np.float64).reshape(-1, size) for value in arguments]
    residual, output, weight = arguments
    deferred = None
    if parts:
        squares = draw("float32", *rows, parts) ** 2
        output = DeferredRMSNorm(output, squares, 0.5)
        deferred = np.asarray(squares, np.float64).reshape(-1, parts), 0.5
    sums, normed = run(residual, output, weight)
    assert (sums.dtype, normed.dtype) == (kind, small)
    true_sums, true_normed = add_reference(
        exact[0], exact[1], exact[2][0], **options, deferred=deferred
    )
    shape = (*rows, size)
    return (
        relative_error(sums, true_sums.reshape(shape)),
        relative_error(normed, true_normed.reshape(shape)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ADD_CASES, ids=str)
def test_add_rms_norm(case, implementation):
    _, _, kind, small, multiplier, parts = case
    sums, normed = add_errors(case, implementation)
    # Before it is added an deferred output is not rounded.
    rounded = "bfloat16" in (kind, small if multiplier != 1.0 and not parts else kind)
    assert sums < BUDGET[rounded]
    assert normed < BUDGET["bfloat16" in (kind, small)]
    true = add_errors(case, "xla")
    assert sums <= 1.5 * true[0] + 1e-7
    # The kernel norms what was rounded to the stream's type. XLA leaves that rounding out, unless
    # it is told not to (xla_allow_excess_precision=false), which makes both the same.
    assert normed <= (2.0 if kind == "bfloat16" else 1.5) * true[1] + 1e-7


@pytest.mark.parametrize("parts", [0, 4])
def test_add_rms_norm_has_the_gradients_of_xla(parts):
    rng = np.random.default_rng(0)
    residual, output, weight = (jnp.asarray(rng.normal(size=shape)) for shape in ((3, 32),) * 3)
    squares = jnp.asarray(rng.uniform(size=(3, parts)))

    def gradients(implementation):
        def total(residual, output, weight, squares):
            output = DeferredRMSNorm(output, squares, 0.5) if parts else output
            options = dict(epsilon=1e-5, implementation=implementation)
            both = add_rms_norm(residual, output, weight[0], **options)
            return sum((value**3).sum() for value in both)

        run = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3) if parts else (0, 1, 2)))
        return run(residual, output, weight, squares)

    both = gradients("xla"), gradients("pallas_interpret")
    for wanted, got in zip(*both, strict=True):
        assert relative_error(got, np.asarray(wanted, np.float64)) < 1e-5


def test_add_rms_norm_refuses_rows_that_are_no_multiple_of_16():
    row = jnp.ones((1, 81))
    with pytest.raises(ValueError, match="add_rms_norm cannot run .* 81 .*; use 'xla'"):
        add_rms_norm(row, row, row[0], epsilon=1e-5, implementation="pallas_interpret")
