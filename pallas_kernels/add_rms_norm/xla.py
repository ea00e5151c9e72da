"""`add_rms_norm` in jax.numpy."""

from pallas_kernels.numerics import Unscaled, rms_norm, scaled


def add_rms_norm(residual, output, weight, *, epsilon, multiplier):
    """See `api.add_rms_norm`."""
    if isinstance(output, Unscaled):
        kind, output = output.value.dtype, output.scaled()
    else:
        kind = output.dtype
    residual = residual + scaled(output, multiplier).astype(residual.dtype)
    return residual, rms_norm(residual, weight, epsilon).astype(kind)
