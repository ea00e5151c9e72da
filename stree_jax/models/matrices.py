"""Weights that rows are multiplied by: how each is stored, multiplied, read and written.

A model that is made has its matrices `[in, out]`, and its embedding and output head `[V, M]`. A
model that is loaded on a CPU has them packed: in blocks of columns, which our own products read in
order (`pallas_kernels.matmul`). Those products take and give float32, so the activations of a
packed model are float32 whatever the type of its weights. Then a bfloat16 model's text is the same
with drafts and without: rounding between layers would make a difference of 1e-7 one of 4e-3.

Everything that reads weights by name gets the order of unpacked models, from `in_first`.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pallas_kernels.matmul import PackedMatrix, matmul, rows
from pallas_kernels.numerics import contract
from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.mesh.partition import WHOLE, Part
from stree_jax.names import dotted


class Matrix(nnx.Param):
    """A matrix `[I, O]`, or several `[E, I, O]`."""

    is_packed = False

    def norms_of_sequences(self, implementation: str | None) -> str | None:
        """The implementation of norms of whole sequences in a model with such matrices.

        XLA's of 512 rows is one launch on a GPU too, and by its cost model moves no more bytes.
        """
        return "xla"

    def cleared(self, x: Array, valid: Array) -> Array:
        """Rows of sequences for products with such matrices, which may want zeros on padding."""
        return x

    @property
    def stored(self) -> Any:
        """What ops take: the array, or a `PackedMatrix`."""
        return self[...]

    @property
    def result_dtype(self) -> Any:
        """Dtype of products with it."""
        return self.dtype

    def matmul(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Rows times the matrix, in its dtype; XLA's default for float32 on GPU is TF32."""
        contracted = ((x.ndim - 1,), (0,))
        matrix = self[...]
        return lax.dot_general(
            x.astype(matrix.dtype), matrix, (contracted, ((), ())), precision=lax.Precision.HIGHEST
        )

    def wide_matmul(self, x: Float[Array, "*rows I"]) -> Float32[Array, "*rows O"]:
        """Rows times the matrix, in float32."""
        return jnp.matmul(
            x, self[...], precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    def matmul_each(self, x: Float[Array, "B T I"]) -> Float32[Array, "B T E O"]:
        """Rows times each of several matrices, in float32."""
        return contract("bti,eio->bteo", x, self[...])

    def cut(self, start: int) -> "Matrix":
        """Its columns from `start` on."""
        return Matrix(self[...][:, start:])

    def canonical(self) -> "Matrix":
        """The matrix, not packed."""
        return self

    def packed(self) -> "Matrix":
        """The matrix, packed for a CPU."""
        return PackedWeight(PackedMatrix.pack(self[...]))


class Table(Matrix):
    """An embedding or an output head `[V, M]`: a row for each token."""

    def matmul(self, x: Float[Array, "B T M"]) -> Float32[Array, "B T V"]:
        """Logits of hidden states."""
        return contract("btm,vm->btv", x, self[...])

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float[Array, "B T M"]:
        """Rows of tokens."""
        return shard.rows_of(self[...], index)

    def packed(self) -> Matrix:
        return PackedTable(PackedMatrix.pack(self[...].T))


class PackedWeight(Matrix):
    """A packed matrix, which a CPU multiplies in float32 and in one order of sums.

    `weight[...]` unpacks it; `stored` is what products take.
    """

    is_packed = True

    def norms_of_sequences(self, implementation: str | None) -> str | None:
        return implementation

    def cleared(self, x: Array, valid: Array) -> Array:
        """See `Matrix`; rows of zeros cost packed products nothing."""
        return jnp.where(valid, x, 0)

    def __getitem__(self, key: Any) -> Any:
        """Of the matrix `[I, O]`, which is unpacked first."""
        return self.stored.canonical()[key]

    @property
    def stored(self) -> PackedMatrix:
        return self.get_value()

    @property
    def result_dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    def matmul(self, x: Float[Array, "*rows I"]) -> Float32[Array, "*rows O"]:
        return matmul(x, self.stored)

    def wide_matmul(self, x: Float[Array, "*rows I"]) -> Float32[Array, "*rows O"]:
        """See `Matrix`; all products are wide."""
        return self.matmul(x)

    def matmul_each(self, x: Float[Array, "B T I"]) -> Float32[Array, "B T E O"]:
        several, size, columns = self.stored.shape
        count = x.shape[0] * x.shape[1]
        rows = jnp.repeat(x.reshape(count, size), several, axis=0)
        which = jnp.tile(jnp.arange(several), count)
        return matmul(rows, self.stored, which).reshape(*x.shape[:2], several, columns)

    def cut(self, start: int) -> "PackedWeight":
        return PackedWeight(self.stored.cut(start, self.stored.columns))

    def canonical(self) -> Matrix:
        return Matrix(_copied(self[...]))

    def packed(self) -> Matrix:
        return self


class PackedTable(PackedWeight, Table):
    """A packed table: its transpose, so tokens are columns."""

    def __getitem__(self, key: Any) -> Any:
        """Of the table `[V, M]`, which is unpacked first."""
        return self.stored.canonical().T[key]

    @property
    def shape(self) -> tuple[int, int]:
        """That of the table, `[V, M]`."""
        width, tokens = self.stored.shape
        return tokens, width

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float32[Array, "B T M"]:
        return rows(self.stored, index)

    def canonical(self) -> Table:
        return Table(_copied(self[...]))


def _copied(array: Array) -> Array:
    """In the order of memory that any other array has."""
    return jnp.asarray(np.ascontiguousarray(array))


_Module = TypeVar("_Module", bound=nnx.Module)


def pack(module: nnx.Module) -> None:
    """Packs the matrices of a module, which is changed, one at a time.

    An embedding that is no output head stays as it is: it is only read by rows.
    """
    for part, name, matrix in _matrices(module):
        if name != "embedding" or getattr(part, "head", None) is None:
            setattr(part, name, matrix.packed())


def _matrices(module: nnx.Module) -> Iterator[tuple[nnx.Module, str, Matrix]]:
    """The matrices, each as an attribute of a module, which may be set."""
    for _, part in nnx.iter_modules(module):
        for name, leaf in [*vars(part).items()]:
            if isinstance(leaf, Matrix):
                yield part, name, leaf


def packed(module: _Module) -> _Module:
    """The module with its matrices packed for a CPU; the arrays of others are shared."""
    module = nnx.clone(module)
    pack(module)
    return module


def loaded_for(target: Any, head: _Module) -> _Module:
    """A head that was loaded for a target: packed, which changes it, if the target is."""
    if target.output_head.is_packed:
        pack(head)
    return head


def in_first(module: _Module) -> _Module:
    """The module with all its matrices unpacked; itself if they are."""
    if any(matrix.is_packed for *_, matrix in _matrices(module)):
        module = nnx.clone(module)
        for part, name, matrix in _matrices(module):
            setattr(part, name, matrix.canonical())
    return module


def named_weights(module: nnx.Module) -> Iterator[tuple[str, Array]]:
    """The weights by their dotted names in order, one at a time, matrices unpacked."""
    leaves = {dotted(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}
    for name, leaf in sorted(leaves.items()):
        yield name, (leaf.canonical() if isinstance(leaf, Matrix) else leaf)[...]


def weights_by_name(module: nnx.Module) -> dict[str, Array]:
    """All weights of `named_weights`."""
    return dict(named_weights(module))
