"""`log_softmax`."""

import functools

import jax
import numpy as np

from pallas_kernels import log_softmax
from pallas_kernels.log_softmax import reference
from tests.cases import base
from tests.cases.base import Op

CASES = base.table(
    {
        "parts": {},
        "several axes, few are left": dict(rows=(2, 3), size=1003, left=5),
        "parts are left out": dict(size=9000, left=3),
    },
    rows=(3,),
    size=5003,
    left=9999,  # numbers of the first row that are not left out
)


@functools.cache
def errors(case, implementation):
    logits = 4 * base.drawn(case)[1](*case.rows, case.size).astype(np.float32)
    logits[0, ..., case.left :] = -np.inf
    run = jax.jit(functools.partial(log_softmax, implementation=implementation))
    truth = reference.log_softmax(logits.astype(np.float64))
    np.testing.assert_allclose(run(base.on_device(logits)), truth, rtol=3e-7, atol=1e-6)
    return {}


LOG_SOFTMAX = Op(CASES, errors, lambda case: {}, base.WITH_NATIVE)
