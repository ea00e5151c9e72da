"""`log_softmax`."""

import functools

import jax
import numpy as np

from pallas_kernels import log_softmax
from pallas_kernels.log_softmax import reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

CASES = base.table(
    {
        "two parts": dict(size=5003),
        "several axes": dict(rows=(2, 3)),
        "few are left": dict(left=5),
        "a part is left out": dict(rows=(1,), size=4097, left=3),
        "close": dict(scale=1e-3),
        "far apart": dict(scale=1e4),
        "half of a part": dict(size=2048),
    },
    rows=(3,),
    size=1003,
    scale=4.0,
    left=10000,  # numbers of the first row that are not left out
)


@functools.cache
def errors(case, implementation):
    _, draw = base.drawn(case)
    logits = case.scale * draw(*case.rows, case.size)
    logits[0, ..., case.left :] = -np.inf
    logits = logits.astype(np.float32)
    run = jax.jit(functools.partial(log_softmax, implementation=implementation))
    got, truth = np.asarray(run(logits)), reference.log_softmax(logits.astype(np.float64))
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(got[~finite], truth[~finite])
    return {"output": relative_error(got[finite], truth[finite])}


LOG_SOFTMAX = Op(CASES, errors, lambda case: {"output": Budget(3e-7)}, base.WITH_NATIVE)
