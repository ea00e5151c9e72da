"""The base of mixers, linear layers, and convolutions that mixers share."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import GatedNorm, tree_conv1d
from pallas_kernels.numerics import Deferred, Product, gated, rounded, scaled, total
from stree_jax.array_types import Array, Float, Float32, Int, Lengths
from stree_jax.mesh.partition import WHOLE, Part
from stree_jax.models.matrices import Matrix

CONV_WIDTH_BITS = 10  # published convolutions have a width of 4, and every tap is an operation
_Output = TypeVar("_Output")


class LayerInput(Deferred):
    """The normed stream `[B, T, M]`, as a layer reads it: its first product may norm it."""

    def product(self, matrix: Matrix, gate: str | None, implementation: str | None) -> Product:
        """See `Matrix.product_in_parts`."""
        raise NotImplementedError


class Projection(nnx.Module):
    """A linear layer."""

    def __init__(self, kernel: Matrix, bias: nnx.Param | None, implementation: str | None = None):
        self.kernel = kernel
        self.bias = bias
        self.implementation = implementation

    def __call__(
        self, inputs: Float[Array, "*rows inputs"] | Deferred
    ) -> Float[Array, "*rows outputs"]:
        """The product, in the dtype that the matrix gives."""
        return self.biased(total(self._product(inputs)))

    def in_parts(self, inputs: Float[Array, "*rows inputs"] | Deferred) -> Product:
        """The product for a kernel, which adds up its parts while it loads them."""
        return self(inputs) if self.bias is not None else self._product(inputs)

    def gated(self, inputs: Float[Array, "*rows inputs"] | LayerInput, activation: str) -> Array:
        """The first half of the outputs, activated, times the second half."""
        if self.bias is not None:
            return gated(activation, self(inputs))
        return total(self._product(inputs, activation))

    def _product(self, inputs: Any, gate: str | None = None) -> Product:
        if isinstance(inputs, LayerInput):
            return inputs.product(self.kernel, gate, self.implementation)
        return self.kernel.product_in_parts(inputs, gate=gate, implementation=self.implementation)

    def wide(
        self, inputs: Float[Array, "*rows inputs"] | Deferred
    ) -> Float32[Array, "*rows outputs"]:
        """The product in float32, without the bias."""
        return self.kernel.product(inputs, wide=True, implementation=self.implementation)

    def biased(self, output: Float[Array, "*rows outputs"]) -> Float[Array, "*rows outputs"]:
        """A product with the bias, if there is one."""
        if self.bias is None:
            return output
        return output + lax.broadcast_to_rank(self.bias[...].astype(output.dtype), output.ndim)


def linear(
    in_size: int,
    out_size: int,
    *,
    bias: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
    scale: float = 1.0,
    implementation: str | None = None,
) -> Projection:
    """A linear layer with random weights, and a bias of zeros if it has one."""
    drawn = nnx.initializers.variance_scaling(scale**2, "fan_in", "normal")
    kernel = Matrix(drawn(rngs.params(), (in_size, out_size), dtype))
    zeros = nnx.initializers.zeros
    added = nnx.Param(zeros(rngs.params(), (out_size,), dtype)) if bias else None
    return Projection(kernel, added, implementation)


def output_logits(
    hidden: Float[Array, "B T M"],
    output_head: Matrix,
    multiplier: float,
    implementation: str | None = None,
) -> Float32[Array, "B T V"]:
    """Logits of hidden states after the final norm."""
    with jax.named_scope("head"):
        logits = output_head.product(hidden, wide=True, implementation=implementation)
        if multiplier == 1.0:
            return logits
        return rounded(logits * multiplier)


@dataclasses.dataclass(frozen=True)
class New:
    """Makes new weights of a mixer, the last of which are times `out_scale`."""

    dtype: DTypeLike
    rngs: nnx.Rngs
    out_scale: float
    implementation: str | None

    def linear(self, in_size: int, out_size: int, bias: bool, scale: float = 1.0) -> Projection:
        """A linear layer."""
        return linear(
            in_size,
            out_size,
            bias=bias,
            dtype=self.dtype,
            rngs=self.rngs,
            scale=scale,
            implementation=self.implementation,
        )

    def matrix(self, *shape: int, scale: float = 1.0) -> Matrix:
        """A matrix `[I, O]`, or several `[E, I, O]`, without a layer around it."""
        normal = jax.random.normal(self.rngs.params(), shape, self.dtype)
        return Matrix(scale * shape[-2] ** -0.5 * normal)

    def layer(self, config: Any, d_model: int, scale: float = 1.0) -> Any:
        """A layer inside of the layer; `scale` is that of its last weights."""
        return config.build(
            d_model,
            dtype=self.dtype,
            rngs=self.rngs,
            out_scale=scale,
            implementation=self.implementation,
        )

    def conv(self, width: int, channels: int, bias: bool) -> tuple[nnx.Param, nnx.Param | None]:
        """Weight and bias of a depthwise convolution over tokens, as torch draws them."""
        bound = width**-0.5
        weight = nnx.Param(self._uniform((width, channels), -bound, bound, self.dtype))
        return weight, nnx.Param(jnp.zeros(channels, self.dtype)) if bias else None

    def rates(self, num_heads: int, num_biases: int | None = None) -> tuple[nnx.Param, nnx.Param]:
        """Rates of decay `log(-A)` `[H]` and biases of time steps, float32, as Mamba-2's begin.

        There is a bias for each head, or there are `num_biases`.
        """
        decay = self._uniform((num_heads,), 1.0, 16.0)
        # dt starts log-uniform in [1e-3, 1e-1]; its bias is the inverse of softplus.
        dt = jnp.exp(self._uniform((num_biases or num_heads,), math.log(1e-3), math.log(1e-1)))
        return nnx.Param(jnp.log(decay)), nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))

    def _uniform(
        self, shape: tuple[int, ...], low: float, high: float, dtype: DTypeLike = jnp.float32
    ) -> Array:
        return jax.random.uniform(self.rngs.params(), shape, dtype, minval=low, maxval=high)


class Made(nnx.Module):
    """The base of modules of layers, whose weights `make` makes.

    The last weights are times `out_scale`; `norm_eps` is of the norms on the residual stream.
    """

    def __init__(
        self,
        config: Any,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
        implementation: str | None = None,
        norm_eps: float = 1e-5,
    ):
        self.config = config
        self.implementation = implementation
        self.norm_eps = norm_eps
        self.make(d_model, New(dtype, rngs, out_scale, implementation))

    def make(self, d_model: int, new: New) -> None:
        """Makes the weights."""
        raise NotImplementedError


class MixerModule(Made):
    """The base of mixers."""

    shard: Part = WHOLE  # a `Shard` on a mesh
    in_proj: Projection
    out_proj: Projection
    conv_weight: nnx.Param
    conv_bias: nnx.Param | None = None

    def run(self, op: Callable[..., _Output], *arrays: Any, **options: Any) -> _Output:
        """The result of an op in the mixer's implementation."""
        return op(*arrays, implementation=self.implementation, **options)

    def conv(self) -> tuple[Array, Array | None]:
        """Weight and bias of the convolution."""
        return self.conv_weight[...], None if self.conv_bias is None else self.conv_bias[...]

    def conv_sequence(
        self, inputs: Float[Array, "B T C"], conv_state: Float[Array, "B J C"]
    ) -> Float[Array, "B T C"]:
        """A sequence after the convolution, which has no activation.

        If sums have one order, the op of trees runs: a token has the same outputs, to the bit.
        """
        weight, bias = self.conv()
        if not self.in_proj.kernel.storage.sums_in_one_order:
            return causal_conv1d(inputs, conv_state, weight, bias)
        index = sequence_gather_index(inputs, len(weight))
        return self.run(tree_conv1d, inputs, conv_state, weight, bias, index)

    def row_parallel(
        self, inputs: Float[Array, "*rows inputs"] | GatedNorm, multiplier: float = 1.0
    ) -> Product:
        """The output projection `[*rows, M]`; on a mesh, an all-reduce of the shards' products."""
        if self.shard.shards == 1:
            return scaled(self.out_proj.in_parts(inputs), multiplier)
        output = self.shard.total(self.out_proj.wide(inputs)).astype(inputs.dtype)
        return scaled(self.out_proj.biased(output), multiplier)  # a bias once, not by each shard

    def spanning_norm(self, x: Array, scale: nnx.Param, epsilon: float) -> Array:
        """The norm of rows over the channels of all shards, in float32: another collective."""
        value, shard = x.astype(jnp.float32), self.shard
        mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
        value = value * lax.rsqrt(shard.total(mean_square) / shard.shards + epsilon)
        return value * lax.broadcast_to_rank(scale[...].astype(jnp.float32), x.ndim)

    def norms_of_sequences(self) -> str | None:
        """The implementation of norms of whole sequences."""
        return self.in_proj.kernel.storage.norms_of_sequences(self.implementation)


def causal_conv1d(
    inputs: Float[Array, "B T C"],
    conv_state: Float[Array, "B J C"],
    weight: Float[Array, "K C"],
    bias: Float[Array, " C"] | None,
) -> Float[Array, "B T C"]:
    """Depthwise convolution of a whole sequence that continues from `conv_state`."""
    length, width = inputs.shape[1], weight.shape[0]
    context = jnp.concatenate([conv_state.astype(inputs.dtype), inputs], axis=1).astype(jnp.float32)
    taps = weight.astype(jnp.float32)[:, None, None]
    output = jnp.float32(0) if bias is None else bias.astype(jnp.float32)[None, None]
    for k in range(width):  # in the order of `tree_conv1d`
        output = output + rounded(context[:, k : k + length] * taps[k])
    return output.astype(inputs.dtype)


def sequence_gather_index(inputs: Float[Array, "B T M"], width: int) -> Int[Array, "B T K"]:
    """The `conv_gather_index` of a sequence, for ops that convolve trees."""
    batch, length, _ = inputs.shape
    rows = np.arange(length)[:, None] + np.arange(width)
    return jnp.broadcast_to(jnp.asarray(rows, jnp.int32), (batch, length, width))


def conv_state_after(
    conv_state: Float[Array, "B J C"], inputs: Float[Array, "B T C"], lengths: Lengths
) -> Float[Array, "B J C"]:
    """The conv state after `lengths` real inputs: the last `J` of state and inputs."""
    context = jnp.concatenate([conv_state, inputs.astype(conv_state.dtype)], axis=1)
    rows = lengths[:, None] + jnp.arange(conv_state.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(context, rows[..., None], axis=1)
