"""Writing and reading are inverse where numbers are rounded; all transforms: test_parity.py."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stree_jax.convert import rules


@given(st.floats(-4, 4, width=32))
def test_one_plus_a_weight(value):
    """A bfloat16 weight comes back if it is not tiny; the scale of any, if it is not huge."""
    weight = np.full(3, value, np.float32)
    scale = rules.PLUS_ONE.apply(weight)
    (back,) = rules.PLUS_ONE.invert(scale)
    assert scale.dtype == back.dtype == np.float32
    if 0.5 <= scale[0] <= 2:
        np.testing.assert_array_equal(rules.PLUS_ONE.apply(back), scale)
    rounded = weight.astype(ml_dtypes.bfloat16)
    (back,) = rules.PLUS_ONE.invert(rules.PLUS_ONE.apply(rounded))
    if rounded[0] == 0 or abs(rounded[0]) > 3.1e-5:
        np.testing.assert_array_equal(back, rounded.astype(np.float32))
    np.testing.assert_allclose(back, rounded.astype(np.float32), rtol=0, atol=2e-7)
