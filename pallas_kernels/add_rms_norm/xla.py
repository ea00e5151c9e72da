"""`add_rms_norm` in jax.numpy."""

from pallas_kernels.numerics import rms_norm, scaled


def add_rms_norm(residual, output, weight, *, epsilon, multiplier):
    """See `api.add_rms_norm`."""
    residual = residual + scaled(output, multiplier).astype(residual.dtype)
    return residual, rms_norm(residual, weight, epsilon).astype(output.dtype)
