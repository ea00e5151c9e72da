"""The one way these ops contract arrays."""

import jax
import jax.numpy as jnp
from jax import lax


def contract(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """`einsum` that multiplies float32 as float32 and accumulates in float32.

    Both must be said: XLA's default for float32 products is TF32 on GPU.
    """
    return jnp.einsum(spec, left, right, precision="highest", preferred_element_type=jnp.float32)


def batched_product(
    left: jax.Array, right: jax.Array, *, transpose_right: bool = False
) -> jax.Array:
    """`left @ right` over two leading batch axes, with `contract`'s precision.

    Unlike `einsum` it never swaps its operands: rows of `left` stay rows of the result, which on
    CPU saves a transposition of every product over a few tree nodes.
    """
    contracting = ((3,), (3 if transpose_right else 2,))
    return lax.dot_general(
        left,
        right,
        (contracting, ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
