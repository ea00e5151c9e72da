"""Products with weights, and convolutions that mixers share.

A CPU multiplies a few rows as fast as memory gives the weights only if it reads them in order. In
a matrix `[in, out]` XLA's product for CPUs reads some columns of one row after another, and takes
up to twice as long. So models that are loaded on a CPU store their matrices in blocks of columns,
`Blocks`, and the type of a weight decides how it is multiplied. On GPUs none of this holds.
Everything that reads weights by name gets the order of all other models, `[in, out]`, from
`in_first`.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import activate, contract
from stree_jax.array_types import Array, Float, Float32, Int, Lengths
from stree_jax.mesh.partition import WHOLE, Part
from stree_jax.names import dotted

CONV_WIDTH_BITS = (
    10  # of a convolution's width: published ones have 4, and every tap is an operation
)

_BLOCK = 32  # columns of a block
_PART = 256  # most rows of a block that are multiplied at once
_MOST_ROWS = 256  # of the other factor; more are multiplied by the whole matrix


class Blocks(nnx.Param):
    """A matrix `[I, O]` in blocks of columns `[O / 32, I, 32]`, the last one filled with zeros.

    Attributes:
        columns: O.
    """


class Projection(nnx.Linear):
    """A linear layer whose kernel is stored `[in, out]` or in `Blocks`."""

    def __call__(
        self, inputs: Float[Array, "*rows inputs"], out_sharding: Any = None
    ) -> Float[Array, "*rows outputs"]:
        """The product, in the dtype of the weights."""
        if not isinstance(self.kernel, Blocks):
            return super().__call__(inputs, out_sharding)
        output = _product(inputs, self.kernel).astype(self.kernel.dtype)
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
    inputs: Float[Array, "*rows inputs"], matrix: Blocks
) -> Float32[Array, "*rows outputs"]:
    """`inputs @ matrix` in float32, multiplied in the dtype of the matrix.

    Sizes were chosen by measurement: docs/results.md, "Products of few rows on a CPU".
    """
    blocks = matrix[...]
    rows = inputs.reshape(-1, inputs.shape[-1]).astype(blocks.dtype)
    count = len(rows)
    if count > _MOST_ROWS:
        outputs = _dot(rows, _whole(matrix), ())
    else:
        if count == 1 and blocks.dtype == jnp.bfloat16:
            # XLA's bfloat16 product of one row takes seven times as long as that of two.
            rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
        outputs = _few_rows(rows, blocks)[:count, : matrix.columns]
    return outputs.reshape(*inputs.shape[:-1], -1)


def _few_rows(
    rows: Float[Array, "rows inputs"], blocks: Float[Array, "blocks inputs columns"]
) -> Float32[Array, "rows outputs"]:
    """The product with all blocks, cut into parts that fit the nearest caches."""
    count, size, columns = blocks.shape
    few_parts = range(-(-size // _PART), size // 64 + 1)
    parts = next((parts for parts in few_parts if size % parts == 0), 1)  # 1: a prime size
    left = rows.reshape(len(rows), parts, -1).swapaxes(0, 1)
    left = jnp.broadcast_to(left, (count, *left.shape))
    products = _dot(left, blocks.reshape(count, parts, -1, columns), (0, 1))
    return products.sum(axis=1).swapaxes(0, 1).reshape(len(rows), -1)


def _dot(left: Array, right: Array, batch: tuple[int, ...]) -> Array:
    """`left @ right` over leading batch axes, exact in float32; bfloat16 sums in float32.

    XLA converts bfloat16 matrices to float32, once for a whole program, if asked for more precision
    than the default.
    """
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((left.ndim - 1,), (right.ndim - 2,)), (batch, batch)),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _whole(matrix: Blocks) -> Array:
    """The matrix `[I, O]` of blocks, in a program."""
    blocks = matrix[...]
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1)[:, : matrix.columns]


def output_logits(
    hidden: Float[Array, "B T M"], output_head: nnx.Param | Array, multiplier: float
) -> Float32[Array, "B T V"]:
    """Logits of hidden states after the final norm; the output head is `[V, M]` or `Blocks`."""
    with jax.named_scope("head"):
        if isinstance(output_head, Blocks):
            return _product(hidden, output_head) * multiplier
        return contract("btm,vm->btv", hidden, output_head[...]) * multiplier


def embedding_rows(
    embedding: nnx.Param, tokens: Int[Array, "B T"], shard: Part = WHOLE
) -> Float[Array, "B T M"]:
    """Rows of an embedding `[V, M]`; of its transpose in `Blocks`, if it is the output head too."""
    if isinstance(embedding, Blocks):
        return embedding[...][tokens // _BLOCK, :, tokens % _BLOCK]
    return shard.rows_of(embedding[...], tokens)


def in_blocks(model: Any) -> None:
    """Stores the matrices of a model, which is changed, in blocks.

    Args:
        model: a `HybridLM` on one CPU that nobody else has yet.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Projection):
            module.kernel = _cut(module.kernel[...])
    name = "embedding" if model.head is None else "head"
    setattr(model, name, _cut(getattr(model, name)[...].T))


def _cut(matrix: Float[Array, "I O"]) -> Blocks:
    host = np.asarray(matrix)
    size, columns = host.shape
    count = -(-columns // _BLOCK)
    padded = np.zeros((size, count * _BLOCK), host.dtype)
    padded[:, :columns] = host
    blocks = np.ascontiguousarray(padded.reshape(size, count, _BLOCK).swapaxes(0, 1))
    return Blocks(jnp.asarray(blocks), columns=columns)


_Module = TypeVar("_Module", bound=nnx.Module)


def in_first(module: _Module) -> _Module:
    """The module with all its matrices in the usual order; itself if they are."""
    if not any(isinstance(leaf, Blocks) for _, leaf in nnx.iter_graph(module)):
        return module
    module = nnx.clone(module)
    for _, part in nnx.iter_modules(module):
        for name, leaf in [*vars(part).items()]:
            if isinstance(leaf, Blocks):
                setattr(part, name, nnx.Param(_usual(leaf, name)))
    return module


def _usual(leaf: nnx.Variable, name: str) -> Array:
    """A weight in the usual order: `[in, out]` for kernels, `[V, M]` for embeddings and heads."""
    if not isinstance(leaf, Blocks):
        return leaf[...]
    matrix = np.asarray(_whole(leaf))
    return jnp.asarray(np.ascontiguousarray(matrix if name == "kernel" else matrix.T))


def named_weights(module: nnx.Module) -> Iterator[tuple[str, Array]]:
    """The weights by their dotted names in order, one at a time, matrices in the usual order."""
    leaves = {dotted(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}
    for name, leaf in sorted(leaves.items()):
        yield name, _usual(leaf, name.rpartition(".")[2])


def weights_by_name(module: nnx.Module) -> dict[str, Array]:
    """All weights of `named_weights`."""
    return dict(named_weights(module))


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
