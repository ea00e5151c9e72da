"""`gated_rms_norm` and `add_rms_norm`."""

import functools

import jax
import numpy as np

from pallas_kernels import DeferredRMSNorm, add_rms_norm, gated_rms_norm, rms_norm
from pallas_kernels.rms_norm import reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

NORM = {False: 3e-7, True: 2.5e-3}  # float32 sums; bf16: rounding the output
GATED_CASES = base.table(
    {
        "gate then norm": {},
        "norm then gate": dict(norm="norm_then_gate"),
        "none": dict(norm="none"),
        "groups": dict(size=128, groups=4),
        "groups, norm then gate": dict(norm="norm_then_gate", size=128, groups=2),
        "sigmoid": dict(norm="norm_then_gate", activation="sigmoid", size=96, groups=2),
        "blocks": dict(size=336),
        "one row": dict(norm="norm_then_gate", rows=(1,), size=96),
        "a gate in a wider array": dict(size=128, groups=2, start=40),
        "extreme gates": dict(norm="none", gates=120.0),
        "epsilon decides": dict(scale=1e-4),
        "large": dict(scale=1e3),
        "bf16": dict(size=160, bf16=True),
        "bf16, norm then gate": dict(norm="norm_then_gate", size=128, groups=2, bf16=True),
    },
    norm="gate_then_norm",
    activation="silu",
    rows=(2, 3),
    size=64,
    groups=1,
    scale=1.0,
    gates=3.0,  # their size
    start=0,  # the first column of the gate, of some more
)
ADD_CASES = base.table(
    {
        "float32": {},
        "float32, multiplier": dict(rows=(1,), size=80, multiplier=0.22),
        "bf16 outputs": dict(size=160, bf16=True),
        "bf16": dict(rows=(4,), size=128, stream="bfloat16", bf16=True),
        "bf16, multiplier": dict(
            rows=(4,), size=128, stream="bfloat16", multiplier=0.22, bf16=True
        ),
        "deferred": dict(parts=1),
        "deferred, multiplier": dict(rows=(5,), size=336, multiplier=0.22, parts=32),
        "deferred, bf16 outputs": dict(size=160, parts=20, bf16=True),
        "deferred, bf16, multiplier": dict(
            rows=(4,), size=128, stream="bfloat16", multiplier=0.22, parts=5, bf16=True
        ),
    },
    rows=(2, 3),
    size=64,
    stream="float32",
    multiplier=1.0,
    parts=0,  # of the output's mean squares, if its norm is deferred
)


@functools.cache
def gated_errors(case, implementation):
    _, draw = base.drawn(case)
    shape = (*case.rows, case.size)
    wide = (*case.rows, case.size + 2 * case.start)
    exact = [draw(*shape) * case.scale, draw(*wide) * case.gates]
    exact.append(None if case.norm == "none" else draw(case.size))
    y, gate, weight = (None if v is None else base.on_device(v, case.kind) for v in exact)
    exact = [None if v is None else np.asarray(v, np.float64) for v in (y, gate, weight)]
    options = {"norm": case.norm, "epsilon": 1e-5, "num_groups": case.groups}
    options["activation"] = case.activation
    run = functools.partial(gated_rms_norm, **options, gate_start=case.start)
    run = jax.jit(functools.partial(run, implementation=implementation))
    got = run(y, gate, weight)
    assert got.dtype == case.kind
    assert got.shape == y.shape
    exact[1] = exact[1][..., case.start : case.start + case.size]
    rows = [value.reshape(-1, case.size) for value in exact[:2]]
    truth = reference.gated_rms_norm(*rows, exact[2], **options)
    return {"output": relative_error(got, truth.reshape(y.shape))}


@functools.cache
def add_errors(case, implementation):
    rng = np.random.default_rng(0)

    def draw(dtype, *shape):
        return base.on_device(3.0 * rng.normal(size=shape), dtype)

    shape = (*case.rows, case.size)
    residual, output = draw(case.stream, *shape), draw(case.kind, *shape)
    weight = draw(case.kind, case.size)
    options = dict(epsilon=1e-5, multiplier=case.multiplier)
    rows = [np.asarray(value, np.float64).reshape(-1, case.size) for value in (residual, output)]
    deferred = None
    if case.parts:
        squares = draw("float32", *case.rows, case.parts) ** 2
        output = DeferredRMSNorm(output, squares, 0.5)
        deferred = np.asarray(squares, np.float64).reshape(-1, case.parts), 0.5
    run = jax.jit(functools.partial(add_rms_norm, **options, implementation=implementation))
    sums, normed = run(residual, output, weight)
    assert (sums.dtype, normed.dtype) == (case.stream, case.kind)
    alone = rms_norm(sums, weight, epsilon=1e-5, implementation=implementation)
    assert alone.dtype == case.stream
    if implementation == "native":
        np.testing.assert_array_equal(alone, normed)
    true_sums, true_normed = reference.add_rms_norm(
        *rows, np.asarray(weight, np.float64), **options, deferred=deferred
    )
    return {
        "sums": relative_error(sums, true_sums.reshape(shape)),
        "normed": relative_error(normed, true_normed.reshape(shape)),
        "alone": relative_error(alone, true_normed.reshape(shape)),
    }


def add_budgets(case):
    stream = case.stream == "bfloat16"
    # A deferred output is not rounded before it is added.
    rounded = stream or (case.bf16 and case.multiplier != 1.0 and not case.parts)
    # The kernel norms what was rounded to the stream's type. XLA leaves that rounding out, unless
    # it is told not to (xla_allow_excess_precision=false), which makes both the same.
    return {
        "sums": Budget(NORM[rounded], 1.5),
        "normed": Budget(NORM[stream or case.bf16], 2.0 if stream else 1.5),
        "alone": Budget(NORM[rounded], 1.5),
    }


GATED_RMS_NORM = Op(
    *(GATED_CASES, gated_errors, lambda case: {"output": Budget(NORM[case.bf16], 1.5)}),
    base.WITH_NATIVE,
    lacks=base.native_lacks_bf16,
)
ADD_RMS_NORM = Op(
    *(ADD_CASES, add_errors, add_budgets, base.WITH_NATIVE), lacks=base.native_lacks_bf16
)
