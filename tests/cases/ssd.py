"""`ssd`, the scan of a sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ssd
from pallas_kernels.ssd.reference import ssd as reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

CASES = base.table(
    {
        "chunks and a rest": {},
        "one position": dict(length=1),
        "chunks of one": dict(length=5, chunk=1),
        "many blocks": dict(batch=1, length=85, groups=1, chunk=16),
        "blocks of channels": dict(batch=1, length=18, heads=2, head_dim=64, state=128, groups=1),
        "padded positions": dict(length=24, padded=9),
        "three segments": dict(length=290, padded=20, groups=1),
        "bf16, two segments": dict(batch=1, length=256, head_dim=64, state=128, bf16=True),
        "large time steps": dict(dt_scale=100.0),
        "bf16": dict(length=40, bf16=True),
        "bf16, parts of states": dict(
            length=70, heads=2, head_dim=64, state=128, groups=1, bf16=True
        ),
        "bf16, wide states": dict(batch=1, length=35, head_dim=32, state=256, groups=1, bf16=True),
    },
    batch=2,
    length=21,
    heads=4,
    head_dim=16,
    state=16,
    groups=2,
    chunk=8,
    dt_scale=1.0,
    padded=0,  # positions at the end that do not exist
)
PLAIN = CASES["chunks and a rest"]


@functools.cache
def inputs(case):
    """Float64 arrays that are exact in the case's type."""
    _, draw = base.drawn(case)
    exact = functools.partial(draw, dtype=np.float32)
    rows, heads, groups = (case.batch, case.length), case.heads, (case.groups, case.state)
    dt = np.log1p(np.exp(exact(*rows, heads))) * case.dt_scale
    dt[:, case.length - case.padded :] = 0
    return (
        draw(*rows, heads, case.head_dim),
        dt.astype(np.float32).astype(np.float64),
        -np.exp(exact(heads)).astype(np.float32).astype(np.float64),
        draw(*rows, *groups),
        draw(*rows, *groups),
        exact(heads, case.head_dim),
        exact(case.batch, heads, case.head_dim, case.state),
    )


def on_device(case):
    x, dt, A, B, C, D, state = inputs(case)
    x, B, C = (base.on_device(value, case.kind) for value in (x, B, C))
    dt, A, D, state = (base.on_device(value, jnp.float32) for value in (dt, A, D, state))
    return x, dt, A, B, C, D, state


@functools.cache
def errors(case, implementation):
    options = dict(chunk_size=case.chunk, implementation=implementation)
    got, state = jax.jit(functools.partial(ssd, **options))(*on_device(case))
    truth, final = reference(*inputs(case))
    assert (got.dtype, state.dtype) == (case.kind, jnp.float32)
    exists = slice(0, case.length - case.padded)
    return {
        "y": relative_error(got[:, exists], truth[:, exists]),
        "state": relative_error(state, final),
    }


def budgets(case):
    factor = base.LARGE_STEPS if case.dt_scale > 1 else 1
    return base.of_steps(case) | {"state": Budget(base.STATE[case.bf16] * factor)}


SSD = Op(
    *(CASES, errors, budgets, base.WITH_NATIVE),
    slow=("bf16, wide states",),
    lacks=base.native_lacks_bf16,
)
