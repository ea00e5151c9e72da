"""Products with weights, and convolutions that mixers share.

XLA's product for CPUs keeps bfloat16 only if its precision is the default and its result float32,
is fast only if the matrix is stored `[out, in]`, and has a slow special case for one row. On GPUs
none of this holds. So a model that is loaded as bfloat16 on a CPU stores its matrices as `OutFirst`
(`out_first`), and the type of a weight decides how it is multiplied. Everything that reads weights
by name gets the order of all other models, `[in, out]`, from `in_first`.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import activate, contract
from stree_jax.array_types import Array, Float, Float32, Lengths
from stree_jax.mesh.partition import Part
from stree_jax.names import flatten

CONV_WIDTH_BITS = (
    10  # of a convolution's width: published ones have 4, and every tap is an operation
)


class OutFirst(nnx.Param):
    """A matrix stored `[out, in]`, as CPUs multiply bfloat16 fastest."""


class Projection(nnx.Linear):
    """A linear layer whose kernel is stored `[in, out]`, or `[out, in]` as `OutFirst`."""

    def __call__(
        self, inputs: Float[Array, "*rows inputs"], out_sharding: Any = None
    ) -> Float[Array, "*rows outputs"]:
        """The product, in the dtype of the weights."""
        if not isinstance(self.kernel, OutFirst):
            return super().__call__(inputs, out_sharding)
        output = _product(inputs, self.kernel[...]).astype(self.kernel.dtype)
        return output if self.bias is None else output + self.bias[...]


def linear(
    in_size: int, out_size: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs, scale: float = 1.0
) -> Projection:
    """A projection that multiplies float32 as float32 (XLA's default on GPU is TF32)."""
    return Projection(
        in_size,
        out_size,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(scale**2, "fan_in", "normal"),
        precision=lax.Precision.HIGHEST,
        rngs=rngs,
    )


def _product(
    inputs: Float[Array, "*rows inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float32[Array, "*rows outputs"]:
    """`inputs @ matrix.T` of bfloat16 in float32, by the product that is fast on a CPU."""
    rows = inputs.reshape(-1, inputs.shape[-1]).astype(matrix.dtype)
    count = len(rows)
    if count == 1:  # two rows take a tenth of the time of XLA's product of one
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    contracting = (((1,), (1,)), ((), ()))
    outputs = lax.dot_general(rows, matrix, contracting, preferred_element_type=jnp.float32)
    return outputs[:count].reshape(*inputs.shape[:-1], -1)


def output_logits(
    hidden: Float[Array, "B T M"], output_head: nnx.Param | Array, multiplier: float
) -> Float32[Array, "B T V"]:
    """Logits of hidden states after the final norm; the output head is `[V, M]`."""
    with jax.named_scope("head"):
        if isinstance(output_head, OutFirst):
            return _product(hidden, output_head[...]) * multiplier
        return contract("btm,vm->btv", hidden, output_head[...]) * multiplier


def out_first(model: nnx.Module) -> None:
    """Stores the matrices of a bfloat16 model, which is changed, as a CPU multiplies them fastest.

    Args:
        model: a `HybridLM` on one CPU that nobody else has yet.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Projection):
            module.kernel = OutFirst(_transposed(module.kernel))
    for name in ("embedding", "head"):  # [V, M] is out first already
        if (weight := getattr(model, name)) is not None:
            setattr(model, name, OutFirst(weight[...]))


_Module = TypeVar("_Module", bound=nnx.Module)


def in_first(module: _Module) -> _Module:
    """The module with the kernels of all projections `[in, out]`; itself if they are."""

    def turned(module: nnx.Module) -> list[Projection]:
        of_kind = (each for _, each in nnx.iter_modules(module) if isinstance(each, Projection))
        return [each for each in of_kind if isinstance(each.kernel, OutFirst)]

    if not turned(module):
        return module
    module = nnx.clone(module)
    for projection in turned(module):
        projection.kernel = nnx.Param(_transposed(projection.kernel))
    return module


def weights_by_name(module: nnx.Module) -> dict[str, Array]:
    """The weights by their dotted names, with the kernels of all projections `[in, out]`."""
    return flatten(nnx.to_pure_dict(nnx.state(in_first(module))))


def _transposed(kernel: nnx.Param) -> Array:
    return jnp.asarray(np.ascontiguousarray(np.asarray(kernel[...]).T))


def row_parallel(
    projection: Projection, inputs: Float[Array, "*rows inputs"], shard: Part
) -> Float[Array, "*rows outputs"]:
    """The output projection of a mixer; on a mesh, an all-reduce of the shards' products.

    Args:
        projection: the shard's projection, with the rows of its inputs.
        inputs: the shard's inputs.
        shard: the shard, or the whole.
    """
    if shard.shards == 1:
        return projection(inputs)
    output = shard.total(partial_product(projection, inputs)).astype(inputs.dtype)
    # The bias is added once, not by each shard.
    return output if projection.bias is None else output + projection.bias[...]


def partial_product(
    projection: Projection, inputs: Float[Array, "*rows inputs"]
) -> Float[Array, "*rows outputs"]:
    """A shard's term of a projection, without bias, in float32."""
    return jnp.matmul(
        inputs,
        projection.kernel[...],
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
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
