"""Shared by the tables of all ops: cases, budgets of errors, random trees, the check of a case."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, native

# The kernel itself runs on a GPU (`make test-gpu`), its interpreter everywhere.
IMPLEMENTATIONS = ("xla", "pallas_interpret", "pallas")
WITH_NATIVE = (*IMPLEMENTATIONS, "native")
NEEDS_NATIVE = pytest.mark.skipif(native.obstacle() is not None, reason=str(native.obstacle()))
# A kernel as it runs where equal bits are wanted, for ops that have two.
TO_THE_BIT = ("pallas_interpret, to the bit", "pallas, to the bit")
# Marks of implementations that do not run everywhere.
MARKS = {"pallas": pytest.mark.gpu, TO_THE_BIT[1]: pytest.mark.gpu, "native": NEEDS_NATIVE}
# Relative errors against float64. float32: sums of some hundred terms. bfloat16: rounding the
# output. A state is float32, and the kernels split its products into two bfloat16 halves.
OUTPUT = {False: 1e-6, True: 3e-3}
STATE = {False: 1e-6, True: 5e-6}
# dt * A beyond 1e3 has float32 spacing 6e-5, and an exponent is a difference of two such numbers.
LARGE_STEPS = 30


# A program each, instead of one for every operation.
conv_gather_index = jax.jit(pallas_kernels.conv_gather_index, static_argnums=1)
replay_gather_index = jax.jit(pallas_kernels.replay_gather_index, static_argnums=2)


class Case:
    """One problem of an op. Its sizes, and what is special about its numbers, are fields."""

    def __str__(self):
        return self.name

    @property
    def kind(self):
        """The type of the arrays that may be small."""
        return jnp.dtype(jnp.bfloat16 if self.bf16 else jnp.float32)

    def but(self, **changes):
        """The case with other sizes."""
        return dataclasses.replace(self, **changes)


def table(cases, **defaults):
    """Cases by name: each has the defaults and its own changes to them."""
    fields = ("name", *defaults, "bf16")
    plain = dataclasses.make_dataclass("Sizes", fields, bases=(Case,), frozen=True)
    return {
        name: plain(**{"name": name, "bf16": False} | defaults | changes)
        for name, changes in cases.items()
    }


class Budget(NamedTuple):
    """How large the relative error of an output may be."""

    most: float  # of all implementations
    of_xla: float | None = None  # of a kernel, relative to the error of XLA; None: only the first
    floor: float = 1e-7  # added to the second limit


def native_lacks_bf16(case, implementation):
    """Native scans and convolutions are for float32: on a CPU activations are."""
    return implementation == "native" and case.bf16


def of_steps(case):
    """The budget of the outputs of a scan."""
    factor = LARGE_STEPS if case.dt_scale > 1 else 1
    return {"y": Budget(OUTPUT[case.bf16] * factor, 1.5)}


class Op(NamedTuple):
    """An op and its table."""

    cases: dict[str, Case]
    # Of the outputs, by name, against float64; it asserts what must be exact. Cached.
    errors: Callable[[Case, str], dict[str, float]]
    budgets: Callable[[Case], dict[str, Budget]]
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    slow: tuple[str, ...] = ()  # cases of `make test-slow`: others cover what they do
    lacks: Callable[[Case, str], bool] = lambda case, implementation: False  # it refuses the case
    # Cases that differ in kind to a kernel; `make test-slow` interprets the others. None: all.
    interpreted: tuple[str, ...] | None = None

    def is_slow(self, name, implementation):
        """Whether `make test-slow` runs it; a GPU runs all cases."""
        rarely = self.interpreted is not None and name not in self.interpreted
        rarely &= implementation.startswith("pallas_interpret")
        on_gpu = MARKS.get(implementation) == pytest.mark.gpu
        return not on_gpu and (rarely or name in self.slow)

    def check(self, case, implementation):
        """Asserts that the outputs of a case are within their budgets."""
        found, budgets = self.errors(case, implementation), self.budgets(case)
        assert found.keys() == budgets.keys()
        for name, (most, of_xla, floor) in budgets.items():
            assert found[name] < most, name
            if of_xla is not None:
                assert found[name] <= of_xla * self.errors(case, "xla")[name] + floor, name


def jitted(op, implementation):
    """An op in an implementation, perhaps one of `TO_THE_BIT`."""
    name, _, to_the_bit = implementation.partition(", ")

    @jax.jit
    def run(*arrays, **options):
        with dispatch.to_the_bit(bool(to_the_bit)):
            return op(*arrays, implementation=name, **options)

    return run


def drawn(case, seed=0):
    """A function that draws float64 arrays, exact in the case's type unless told another."""
    rng = np.random.default_rng(seed)
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape, dtype=small):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    return rng, draw


def random_parents(rng, batch, nodes):
    """A different random tree for each row."""
    return np.array(
        [[-1, *(int(rng.integers(0, i)) for i in range(1, nodes))] for _ in range(batch)]
    )


def ancestor_mask(parents):
    """`[B, N, N]`, ancestors-or-self."""
    batch, nodes = parents.shape
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for node in range(nodes):
            if parents[b, node] >= 0:
                mask[b, node] = mask[b, parents[b, node]]
            mask[b, node, node] = True
    return mask


def accepted(case, mask):
    """A path of each row, and its last node: the deepest, the root; -1 and nothing for others."""
    batch, exist = len(mask), case.nodes - case.padded
    last = np.array([mask[0, :exist].sum(-1).argmax(), 0, -1])[:batch]
    path = mask[np.arange(batch), np.maximum(last, 0)] & (last >= 0)[:, None]
    return {"last": last, "path": path}


def relative_error(value, truth):
    """Frobenius norm of the difference, relative to the truth's."""
    truth = np.asarray(truth, np.float64)
    return np.linalg.norm(np.asarray(value, np.float64) - truth) / np.linalg.norm(truth)


def on_device(value, kind=None):
    """An array, converted on the host: on the device each shape would be a program."""
    return jax.device_put(np.asarray(value, kind))


def assert_finite(value):
    assert np.isfinite(np.asarray(value, np.float32)).all()
