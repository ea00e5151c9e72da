"""Log-probabilities, which XLA sums in another order for another number of rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch, native
from pallas_kernels.log_softmax import pallas_triton


def log_softmax(
    logits: Float[Array, "*rows V"], *, implementation: str | None = None
) -> Float32[Array, "*rows V"]:
    """The logarithm of the softmax of each row, in float32; all but "xla" sum in one order.

    Args:
        logits: the rows.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.
            Derivatives are XLA's in all.
    """
    return dispatch.run(
        "log_softmax",
        {"xla": jax.nn.log_softmax, "native": _native, "pallas": pallas_triton},
        (logits.astype(jnp.float32),),
        requested=implementation,
        unsupported={"pallas": None if logits.size else "there are no logits"},
        xla_derivatives=True,
    )


def _native(logits: jax.Array) -> jax.Array:
    rows = native.rows_of(logits)
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    return native.call("log_softmax", result, rows).reshape(logits.shape)
