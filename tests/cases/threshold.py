"""`largest_threshold`: cases whose sums are exact, so thresholds are equal to the bit."""

import functools

import jax
import numpy as np

from pallas_kernels import largest_threshold
from pallas_kernels.threshold import reference
from tests.cases import base
from tests.cases.base import Op

CASES = base.table(
    {
        "weights": {},
        "counts": dict(counts=True, share=0.9),
        "one value": dict(size=1),
        "one vector and one": dict(size=65),
        "several axes": dict(rows=(2, 3)),
        "no rows": dict(rows=(0,)),
        "ties": dict(kinds=5),
        "ties, counts": dict(kinds=5, counts=True),
        "all are needed": dict(share=1.0),
        "all are needed, counts": dict(share=1.0, counts=True),
        "no threshold will do": dict(share=1.5),
        "a share": dict(is_share=True),
        "a share of counts": dict(is_share=True, counts=True),
        "small": dict(scale=1e-37),
        "infinite": dict(special=np.inf, share=0.05),
        "infinite, counts": dict(special=np.inf, counts=True, share=0.01),
        "not numbers": dict(special=np.nan),
        "negative": dict(special=-1.0),
    },
    rows=(3,),
    size=257,
    kinds=0,  # different values; 0: all differ
    counts=False,
    share=0.3,  # of the sum of all
    is_share=False,
    scale=1.0,
    special=None,  # what some values are
)


@functools.cache
def errors(case, implementation):
    rng = np.random.default_rng(0)
    shape = (*case.rows, case.size)
    values = rng.uniform(1.0, 2.0, shape)
    if case.kinds:
        values = np.ceil(case.kinds * (values - 1.0))
    values = np.asarray(case.scale * values, np.float32)
    if case.special is not None:
        values[..., ::10] = case.special
    summands = rng.integers(1, 16, shape).astype(np.float32) / 16
    if case.counts:
        summands = np.ones_like(summands)
    all_of_them = np.where(values > 0, summands, 0).sum(axis=-1, keepdims=True)
    least = np.ceil(16 * case.share * all_of_them) / 16
    options = dict(is_share=case.is_share, implementation=implementation)
    run = jax.jit(functools.partial(largest_threshold, **options))
    needed = np.full_like(least, case.share) if case.is_share else least
    got = run(values, None if case.counts else summands, base.on_device(needed))
    rows = (array.reshape(-1, array.shape[-1]) for array in (values, summands))
    truth = reference.largest_threshold(*rows, least.reshape(-1))
    np.testing.assert_array_equal(got, truth.reshape(*case.rows, 1))
    return {}


LARGEST_THRESHOLD = Op(CASES, errors, lambda case: {}, ("xla", "native"))
