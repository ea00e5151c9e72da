"""The search for a threshold, as top-k and top-p need it."""

from jaxtyping import Array, Float32

from pallas_kernels import dispatch
from pallas_kernels.threshold import native, xla


def largest_threshold(
    values: Float32[Array, "*rows V"],
    summands: Float32[Array, "*rows V"] | None,
    least: Float32[Array, "*#rows 1"],
    *,
    is_share: bool = False,
    implementation: str | None = None,
) -> Float32[Array, "*rows 1"]:
    """The largest threshold from which on the summands of a row sum up to `least`.

    Sorting would find it too, in several times the time. Non-negative floats are ordered as their
    bits are, so this searches for the bits of the threshold.

    Args:
        values: what is compared with the threshold; what is negative or NaN is below all.
        summands: what is added for each value; not negative. None: ones, so values are counted.
        least: the sum that is needed. If it is not positive the threshold is NaN.
        is_share: `least` is the share that is needed of a row's whole sum, which is summed in the
            same order.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        A threshold of each row, which is one of its values; 0 if no positive one will do.
    """
    return dispatch.run(
        "largest_threshold",
        {"xla": xla, "native": native},
        (values, summands, least),
        requested=implementation,
        xla_derivatives=True,
        is_share=is_share,
    )
