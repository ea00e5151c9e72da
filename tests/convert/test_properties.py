"""Writing and reading are inverse: transforms of tensors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stree_jax.convert import rules


def order(rng, n):
    own = rng.permutation(n)
    return lambda: own


# A transform of random sizes, and the shape of its weight: `n` and `m` are two sizes.
TRANSFORMS = {
    "as is": lambda rng, n, m: (rules.AS_IS, (n, m)),
    "transposed": lambda rng, n, m: (rules.TRANSPOSED, (n, m)),
    "convolution": lambda rng, n, m: (rules.CONV, (n, m)),
    "each transposed": lambda rng, n, m: (rules.EACH_TRANSPOSED, (2, n, m)),
    "joined": lambda rng, n, m: (rules.joined(n, m, 1), (3, n + m + 1)),
    "joined biases": lambda rng, n, m: (rules.joined(n, m), (n + m,)),
    "reordered": lambda rng, n, m: (
        rules.reordered((n, m, 2), rng.permutation(3).tolist()),
        (3, n + m + 2),
    ),
    "gathered": lambda rng, n, m: (rules.gathered((n, m), order(rng, n + m)), (3, n + m)),
    "gathered biases": lambda rng, n, m: (rules.gathered((n, m), order(rng, n + m)), (n + m,)),
    "channels": lambda rng, n, m: (rules.conv_gathered([n], order(rng, n)), (m, n)),
    "stacked": lambda rng, n, m: (rules.stacked(3), (3, n, m)),
    "stacked pairs": lambda rng, n, m: (rules.stacked_pairs(3), (3, n, 2 * m)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 7), st.integers(1, 7))
def test_transforms_have_an_inverse(name, seed, n, m):
    rng = np.random.default_rng(seed)
    transform, shape = TRANSFORMS[name](rng, n, m)
    weight = rng.permutation(int(np.prod(shape))).reshape(shape)
    sources = transform.invert(weight)
    assert [source.shape for source in sources] == [*transform.source_shapes(shape)]
    np.testing.assert_array_equal(transform.apply(*sources), weight)
    again = transform.invert(transform.apply(*sources))
    for source, other in zip(sources, again, strict=True):
        np.testing.assert_array_equal(source, other)


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
