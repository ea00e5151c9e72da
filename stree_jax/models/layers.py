"""Projections and convolutions that mixers share."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import activate
from stree_jax.array_types import Array, Float, Lengths


class Linear(nnx.Linear):
    """`nnx.Linear`, with two rows of float32 as two products of one row on CPU.

    XLA on CPU multiplies one row by the matrix at the speed of memory. From two rows on it copies
    the matrix into another order first, which takes longer than reading it twice.
    `benchmarks.few_rows` compares this with other forms.
    """

    def __call__(self, inputs: Float[Array, "*rows I"], out_sharding: None = None) -> Array:
        """`[*rows, I]` to `[*rows, O]`."""
        if math.prod(inputs.shape[:-1]) != 2 or self.dtype != jnp.float32:
            return super().__call__(inputs)
        axis = inputs.shape.index(2)
        one_row = super().__call__

        def row_by_row(inputs: Array) -> Array:
            return jnp.concatenate([one_row(row) for row in jnp.split(inputs, 2, axis)], axis)

        return lax.platform_dependent(inputs, cpu=row_by_row, default=one_row)


def linear(
    in_size: int, out_size: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs, scale: float = 1.0
) -> nnx.Linear:
    """A projection that multiplies float32 as float32 (XLA's default on GPU is TF32)."""
    return Linear(
        in_size,
        out_size,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(scale**2, "fan_in", "normal"),
        precision=lax.Precision.HIGHEST,
        rngs=rngs,
    )


def causal_conv1d(
    inputs: Float[Array, "B T C"],
    conv_state: Float[Array, "B J C"],
    weight: Float[Array, "K C"],
    bias: Float[Array, " C"] | None,
) -> Float[Array, "B T C"]:
    """Depthwise convolution of a whole sequence that continues from `conv_state`."""
    length, width = inputs.shape[1], weight.shape[0]
    context = jnp.concatenate([conv_state.astype(inputs.dtype), inputs], axis=1).astype(jnp.float32)
    output = sum(context[:, k : k + length] * weight[k].astype(jnp.float32) for k in range(width))
    if bias is not None:
        output = output + bias.astype(jnp.float32)
    return jnp.asarray(output, inputs.dtype)


def silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x * sigmoid(x)`, evaluated in float32."""
    return activate("silu", x)


def split_last(x: Array, *sizes: int) -> list[Array]:
    """Splits the last axis into parts of these sizes and the rest."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return jnp.split(x, ends, axis=-1)


def conv_state_after(
    conv_state: Float[Array, "B J C"], inputs: Float[Array, "B T C"], lengths: Lengths
) -> Float[Array, "B J C"]:
    """The conv state after `lengths` real inputs: the last `J` of state and inputs."""
    context = jnp.concatenate([conv_state, inputs.astype(conv_state.dtype)], axis=1)
    rows = lengths[:, None] + jnp.arange(conv_state.shape[1])
    return jnp.take_along_axis(context, rows[..., None], axis=1)
