"""Every implementation of a mixture's experts against its float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch, expert_mlps
from pallas_kernels.moe import pallas_triton, xla
from pallas_kernels.moe.config import BlockSizes
from pallas_kernels.moe.reference import expert_mlps as reference
from tests.kernels.cases import relative_error
from tests.kernels.test_tree_ops import IMPLEMENTATIONS

# XLA has products and loops; a CPU runs the loops.
ALL = (*IMPLEMENTATIONS, "products")
# float32: sums of some ten terms, twice. bf16: rounding what an expert has inside, and the outputs.
BUDGET = {False: 1e-6, True: 6e-3}
BLOCKS = BlockSizes(rows=16, columns=32, inner=16, num_warps=4, num_stages=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    tokens: int = 9
    width: int = 32
    hidden: int = 48
    experts: int = 5
    active: int = 2
    activation: str = "silu"
    gated: bool = True
    one: bool = False  # all tokens choose the same experts
    rows: int = 16  # of a block
    bf16: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("some rows an expert"),
    Case("few tokens", tokens=2),
    Case("one token", tokens=1, active=1),
    Case("not gated", activation="relu2", gated=False),
    Case("blocks of rows", tokens=40, experts=3, one=True),
    Case("experts that nobody chooses", tokens=17, experts=20, one=True),
    Case("all experts", tokens=5, experts=3, active=3, width=16),
    Case("bf16", tokens=30, bf16=True),
    Case("large blocks of rows", tokens=50, experts=3, rows=64, bf16=True),
    Case("bf16, not gated", tokens=30, activation="relu2", gated=False, bf16=True),
)


@functools.cache
def inputs(case):
    """Float64 arrays that are exact in the case's type, and the choices."""
    rng = np.random.default_rng(0)
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape, dtype=small):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    columns = 2 * case.hidden if case.gated else case.hidden
    chosen = [
        rng.permutation(np.arange(case.active) if case.one else case.experts)[: case.active]
        for _ in range(case.tokens)
    ]
    return (
        draw(case.tokens, case.width),
        np.abs(draw(case.tokens, case.active, dtype=np.float32)),
        np.array(chosen, np.int32),
        draw(case.experts, case.width, columns),
        draw(case.experts, case.hidden, case.width),
    )


def on_device(case):
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    x, weights, chosen, *experts = inputs(case)
    arrays = [jnp.asarray(value, kind) for value in (x, *experts)]
    return arrays[0], jnp.asarray(weights, jnp.float32), jnp.asarray(chosen), *arrays[1:]


def function(case, implementation):
    options = dict(activation=case.activation, gated=case.gated)
    if implementation == "xla":
        return functools.partial(expert_mlps, **options, implementation="xla")
    if implementation == "products":
        return functools.partial(in_products, **options)
    interpret = implementation == "pallas_interpret"
    return functools.partial(
        pallas_triton.expert_mlps,
        **options,
        interpret=interpret,
        blocks=dataclasses.replace(BLOCKS, rows=case.rows),
    )


def in_products(x, weights, chosen, *experts, **options):
    return xla.weighted_sum(xla.products(x, chosen, *experts, **options), weights)


@functools.cache
def error(case, implementation):
    got = jax.jit(function(case, implementation))(*on_device(case))
    assert got.dtype == (jnp.bfloat16 if case.bf16 else jnp.float32)
    truth = reference(*inputs(case), activation=case.activation, gated=case.gated)
    return relative_error(got, truth)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_mlps(case, implementation):
    assert error(case, implementation) < BUDGET[case.bf16]
    assert error(case, implementation) <= 1.5 * error(case, "xla") + 1e-7


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_all_have_the_gradients_of_the_products(case):
    """The first and the second ones."""
    arguments = on_device(case)

    def gradients(implementation):
        def total(x, weights, *experts):
            run = functools.partial(expert_mlps, implementation=implementation)
            run = in_products if implementation == "products" else run
            return (
                run(x, weights, arguments[2], *experts, activation="silu", gated=True) ** 2
            ).sum()

        def total_of_first(*floats):
            return (jax.grad(total)(*floats) ** 2).sum()

        floats = (*arguments[:2], *arguments[3:])
        first = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*floats)
        return (*first, jax.jit(jax.grad(total_of_first))(*floats))

    wanted = gradients("products")
    for implementation in ("xla", "pallas_interpret"):
        for one, other in zip(wanted, gradients(implementation), strict=True):
            assert relative_error(other, np.asarray(one, np.float64)) < 1e-5


def test_few_tokens_are_xlas_unless_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "device_obstacle", lambda: None)  # as on a GPU

    def num_kernels(case, implementation=None):
        options = dict(activation=case.activation, gated=case.gated)
        run = functools.partial(expert_mlps, **options, implementation=implementation)
        return str(jax.make_jaxpr(run)(*on_device(case))).count("pallas_call")

    few, many = CASES[1], CASES[0]
    assert num_kernels(few) == 0
    assert num_kernels(few, "pallas") == num_kernels(many) == 2


def test_what_the_kernel_refuses():
    for change, message in (
        (dict(width=24), "width = 24 is not a multiple of 16; use 'xla'"),
        (dict(hidden=20), "hidden size = 20 is not a multiple of 16; use 'xla'"),
        (dict(tokens=0), "there are no tokens; use 'xla'"),
    ):
        case = dataclasses.replace(CASES[0], **change)
        arguments = on_device(case)
        if not case.tokens:
            arguments = (arguments[0], arguments[1].reshape(0, 2), jnp.zeros((0, 2), jnp.int32))
            arguments += on_device(CASES[0])[3:]
        run = functools.partial(expert_mlps, *arguments, activation="silu", gated=True)
        with pytest.raises(ValueError, match=message):
            run(implementation="pallas_interpret")
        assert run().shape == (case.tokens, case.width)
    gelu = functools.partial(expert_mlps, *on_device(CASES[0]), activation="gelu", gated=True)
    with pytest.raises(ValueError, match="error function, which gelu needs; use 'xla'"):
        gelu(implementation="pallas_interpret")
    assert np.isfinite(gelu()).all()


def test_the_arguments_must_agree():
    x, weights, chosen, experts_in, experts_out = on_device(CASES[0])
    run = functools.partial(expert_mlps, x, weights, chosen, experts_in)
    with pytest.raises(
        ValueError, match="experts_in has 96 columns and experts_out 48 rows with gated = False"
    ):
        run(experts_out, activation="silu", gated=False)
    with pytest.raises(ValueError, match="'silu', 'gelu', 'relu2'.*got 'tanh'"):
        run(experts_out, activation="tanh", gated=True)
