"""Every implementation of the output head's best token against its float64 reference."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import best_token
from pallas_kernels.best_token import pallas_triton
from pallas_kernels.best_token.config import BlockSizes
from pallas_kernels.best_token.reference import best_token as reference
from pallas_kernels.best_token.xla import best_of
from tests.kernels.cases import relative_error
from tests.kernels.test_tree_ops import IMPLEMENTATIONS

BUDGET = 1e-6  # float32 sums of some hundred terms; bf16 products are exact


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    rows: tuple[int, ...] = (2, 5)
    width: int = 48
    vocab: int = 100
    padding: int = 0
    multiplier: float = 1.0
    integers: bool = False  # small ones, of which many logits are equal
    bf16: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("blocks of words"),
    Case("one row", rows=(1,), vocab=7),
    Case("blocks of rows", rows=(3, 13), width=16),
    Case("padded words", vocab=64, padding=30),
    Case("multiplier", multiplier=-0.3),
    Case("equals", integers=True, width=16),
    Case("bf16", bf16=True, width=128),
    Case("bf16, equals, padded words", bf16=True, integers=True, padding=5),
)


@functools.cache
def inputs(case):
    """Float64 arrays that are exact in the case's type. Padded words are those that would win."""
    rng = np.random.default_rng(0)
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape):
        values = rng.integers(-1, 2, shape) if case.integers else rng.normal(size=shape)
        return values.astype(small).astype(np.float64)

    hidden = np.abs(draw(*case.rows, case.width))
    head = draw(case.vocab + case.padding, case.width)
    head[case.vocab :] = 9.0
    return hidden, head


def on_device(case):
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    return [jnp.asarray(value, kind) for value in inputs(case)]


def run(case, implementation, *arguments):
    options = dict(vocab_size=case.vocab, multiplier=case.multiplier)
    if implementation == "xla":
        function = functools.partial(best_token, **options, implementation="xla")
    else:
        function = functools.partial(
            pallas_triton.best_token,
            **options,
            interpret=implementation == "pallas_interpret",
            blocks=BlockSizes(rows=16, words=32, inner=16, num_warps=4, num_stages=1),
        )
    return jax.jit(function)(*(arguments or on_device(case)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_best_token(case, implementation):
    hidden, head = inputs(case)
    token, logit = reference(
        hidden.reshape(-1, case.width), head, case.vocab, float(np.float32(case.multiplier))
    )
    got = run(case, implementation)
    assert (got.token.shape, got.logit.shape) == (case.rows, case.rows)
    assert (got.token.dtype, got.logit.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(got.token.ravel(), token)
    assert relative_error(got.logit.ravel(), logit) < BUDGET


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_finite_is_seen(implementation):
    case = CASES[0]
    hidden, head = on_device(case)
    hidden = hidden.at[0, 1, 3].set(jnp.nan).at[1, 2].set(jnp.inf)
    got = run(case, implementation, hidden, head)
    finite = np.ones(case.rows, bool)
    finite[0, 1] = finite[1, 2] = False
    np.testing.assert_array_equal(np.isfinite(got.logit), finite)
    # One word is enough, in whichever block it is.
    got = run(case, implementation, on_device(case)[0], head.at[70].set(jnp.nan))
    assert not np.isfinite(got.logit).any()


def test_the_best_of_logits():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0, 9.0], [-jnp.inf, -jnp.inf, -5.0, -jnp.inf, 9.0]])
    best = best_of(logits, 4)
    assert best.token.tolist() == [1, 2]
    assert best.logit.tolist() == [2.0, -5.0]


def test_what_the_kernel_refuses():
    ones = jnp.ones((3, 24))
    with pytest.raises(ValueError, match="width = 24 is not a multiple of 16; use 'xla'"):
        best_token(ones, ones, vocab_size=3, implementation="pallas_interpret")
    assert best_token(ones, ones, vocab_size=3).token.tolist() == [0, 0, 0]
    none = jnp.ones((2, 0, 16))
    with pytest.raises(ValueError, match="there are no rows; use 'xla'"):
        best_token(none, jnp.ones((3, 16)), vocab_size=3, implementation="pallas_interpret")
    assert best_token(none, jnp.ones((3, 16)), vocab_size=3).token.shape == (2, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_the_arguments_must_agree(implementation):
    # As users call it: in tests shapes are checked before.
    function = inspect.unwrap(best_token)
    run = functools.partial(function, jnp.ones((3, 32)), implementation=implementation)
    with pytest.raises(ValueError, match="rows of 32 and a head for 16"):
        run(jnp.ones((5, 16)), vocab_size=5)
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"vocab_size = {wrong} is not 1 to 5"):
            run(jnp.ones((5, 32)), vocab_size=wrong)
