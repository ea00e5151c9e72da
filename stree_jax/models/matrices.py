"""Weights that rows are multiplied by: how each is stored, multiplied, read and written.

A model that is made has its matrices `[in, out]`, and its embedding and output head `[V, M]`. A
model that is loaded on a CPU has them packed: in blocks of columns, which our own products read in
order (`pallas_kernels.matmul`). Those products take and give float32, so the activations of a
packed model are float32 whatever the type of its weights. Then a bfloat16 model's text is the same
with drafts and without: rounding between layers would make a difference of 1e-7 one of 4e-3.

A quantised matrix has 8 bits a weight and a scale for 32 inputs of a column. A CPU has it packed
too; elsewhere it is widened inside the program, where it is multiplied. Routers stay as they are:
another expert is another text.

Everything that reads weights by name gets the order of unpacked models, from `in_first`.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.matmul import PackedMatrix, QuantizedMatrix, matmul, rows
from pallas_kernels.numerics import contract
from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.checks import check_names
from stree_jax.mesh.partition import WHOLE, Part
from stree_jax.messages import shown
from stree_jax.names import dotted


class Matrix(nnx.Param):
    """A matrix `[I, O]`, or several `[E, I, O]`."""

    is_packed = False
    axis = -2  # of inputs

    @property
    def is_quantized(self) -> bool:
        """True if its weights have 8 bits."""
        return False

    def norms_of_sequences(self, implementation: str | None) -> str | None:
        """The implementation of norms of whole sequences in a model with such matrices.

        XLA's of 512 rows is one launch on a GPU too, and by its cost model moves no more bytes.
        """
        return "xla"

    def cleared(self, x: Array, valid: Array) -> Array:
        """Rows of sequences for products with such matrices, which may want zeros on padding."""
        return x

    def factors(self, x: Array) -> tuple[Array, Any]:
        """Returns rows and matrix as an op takes them: an array or a `PackedMatrix`."""
        return x, self[...]

    @property
    def result_dtype(self) -> Any:
        """Dtype of products with it."""
        return self.dtype

    def matmul(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Rows times the matrix, in its dtype; XLA's default for float32 on GPU is TF32."""
        contracted = ((x.ndim - 1,), (0,))
        x, matrix = self.factors(x)

        def product(x: Array) -> Array:
            return lax.dot_general(
                x, matrix, (contracted, ((), ())), precision=lax.Precision.HIGHEST
            )

        return _of_rows(product, x.astype(matrix.dtype))

    def wide_matmul(self, x: Float[Array, "*rows I"]) -> Float32[Array, "*rows O"]:
        """Rows times the matrix, in float32."""
        x, matrix = self.factors(x)
        product = functools.partial(
            jnp.matmul,
            b=matrix,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return _of_rows(product, x)

    def matmul_each(self, x: Float[Array, "B T I"]) -> Float32[Array, "B T E O"]:
        """Rows times each of several matrices, in float32."""
        x, matrices = self.factors(x)
        return _of_rows(lambda x: contract("bti,eio->bteo", x, matrices), x)

    def cut(self, start: int) -> "Matrix":
        """Its columns from `start` on."""
        return Matrix(self[...][:, start:])

    def canonical(self) -> "Matrix":
        """The matrix, not packed."""
        return self

    def packed(self) -> "Matrix":
        """The matrix, packed for a CPU."""
        return PackedWeight(PackedMatrix.pack(self[...]))

    def quantized(self) -> "Matrix":
        """The matrix in 8 bits, not packed."""
        return QuantizedWeight(_quantized(self.get_value(), self.axis))


class Table(Matrix):
    """An embedding or an output head `[V, M]`: a row for each token."""

    axis = -1

    def matmul(self, x: Float[Array, "B T M"]) -> Float32[Array, "B T V"]:
        """Logits of hidden states."""
        x, table = self.factors(x)
        return _of_rows(lambda x: contract("btm,vm->btv", x, table), x)

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float[Array, "B T M"]:
        """Rows of tokens."""
        return shard.rows_of(self[...], index)

    def packed(self) -> Matrix:
        return PackedTable(PackedMatrix.pack(self[...].T))

    def quantized(self) -> Matrix:
        return QuantizedTable(_quantized(self.get_value(), self.axis))


class QuantizedWeight(Matrix):
    """A matrix in 8 bits, which is widened inside the program; `weight[...]` widens it."""

    @property
    def is_quantized(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        """Of the matrix, which is widened first."""
        return self.get_value().wide()[key]

    def factors(self, x: Array) -> tuple[Array, Array]:
        return self.get_value().wide_for(x)

    @property
    def result_dtype(self) -> Any:
        return jnp.dtype(self.get_value().dtype)

    def cut(self, start: int) -> "Matrix":
        whole = self.get_value()
        part = dict(values=whole.values[..., start:], scales=whole.scales[..., start:])
        return QuantizedWeight(dataclasses.replace(whole, **part))

    def packed(self) -> Matrix:
        return PackedWeight(PackedMatrix.pack(self.get_value()))

    def quantized(self) -> Matrix:
        return self


class QuantizedTable(QuantizedWeight, Table):
    """A table in 8 bits."""

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float[Array, "B T M"]:
        return shard.rows_of(self.get_value(), index)

    def packed(self) -> Matrix:
        return PackedTable(PackedMatrix.pack(self.get_value().T))


class PackedWeight(Matrix):
    """A packed matrix, which a CPU multiplies in float32 and in one order of sums.

    `weight[...]` unpacks it; `stored` is what products take.
    """

    is_packed = True

    @property
    def is_quantized(self) -> bool:
        return self.stored.scales is not None

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
        """The matrix in blocks."""
        return self.get_value()

    def factors(self, x: Array) -> tuple[Array, PackedMatrix]:
        return x, self.stored

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
        which = jnp.tile(jnp.arange(several, dtype=jnp.int32), count)
        return matmul(rows, self.stored, which).reshape(*x.shape[:2], several, columns)

    def cut(self, start: int) -> "PackedWeight":
        return PackedWeight(self.stored.cut(start, self.stored.columns))

    def canonical(self) -> Matrix:
        if self.is_quantized:
            return QuantizedWeight(jax.tree.map(_copied, self.stored.quantized()))
        return Matrix(_copied(self[...]))

    def packed(self) -> Matrix:
        return self

    def quantized(self) -> Matrix:
        return self.canonical().quantized()


class PackedTable(PackedWeight, Table):
    """A packed table: its transpose, so tokens are columns."""

    def __getitem__(self, key: Any) -> Any:
        """Of the table `[V, M]`, which is unpacked first."""
        return self.stored.canonical().T[key]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the table, `[V, M]`."""
        width, tokens = self.stored.shape
        return tokens, width

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float32[Array, "B T M"]:
        return rows(self.stored, index)

    def canonical(self) -> Matrix:
        if self.is_quantized:
            return QuantizedTable(jax.tree.map(_copied, self.stored.quantized().T))
        return Table(_copied(self[...]))


def _of_rows(product: Callable[[Array], Array], x: Array) -> Array:
    """A product of rows; on a TPU of two at least.

    XLA multiplies a single row on a TPU's vector unit, which takes longer than reading the matrix.
    """
    if x.ndim < 2 or math.prod(x.shape[:-1]) != 1 or not dispatch.on_tpu():
        return product(x)
    return product(jnp.pad(x, [(0, 1), *[(0, 0)] * (x.ndim - 1)]))[:1]


def _quantized(matrix: Any, axis: int) -> QuantizedMatrix:
    """A matrix in 8 bits, on the default device; of an abstract one abstract."""
    own = QuantizedMatrix.of(matrix, axis)
    return own if isinstance(matrix, jax.ShapeDtypeStruct) else jax.tree.map(jnp.asarray, own)


def _copied(array: Array) -> Array:
    """In the order of memory that any other array has."""
    return jnp.asarray(np.ascontiguousarray(array))


_Module = TypeVar("_Module", bound=nnx.Module)


def pack(module: nnx.Module) -> None:
    """Packs the matrices of a module, which is changed, one at a time.

    An embedding that is no output head stays as it is: it is only read by rows.
    """
    for part, name, matrix in _matrices(module).values():
        if name != "embedding" or getattr(part, "head", None) is None:
            setattr(part, name, matrix.packed())


def _matrices(module: nnx.Module) -> dict[str, tuple[nnx.Module, str, Matrix]]:
    """The matrices by their dotted names, each as an attribute of a module, which may be set."""
    return {
        dotted((*path, name)): (part, name, leaf)
        for path, part in nnx.iter_modules(module)
        for name, leaf in vars(part).items()
        if isinstance(leaf, Matrix)
    }


def check_quantize(quantize: str | Any, keep: Collection[str] | Any = ()) -> None:
    """Refuses other ways to quantise than "int8" and None, and names to keep without one."""
    if quantize not in (None, "int8"):
        raise ValueError(f'quantize must be "int8" or None, got {shown(quantize)}')
    if check_names("keep", keep) and quantize is None:
        raise ValueError(f"keep = {shown(keep)} goes with quantize: without it all weights stay")


def to_quantize(
    module: nnx.Module, quantize: str | None = "int8", keep: Collection[str] = ()
) -> frozenset[str]:
    """The names of the matrices that can have 8 bits, but for routers, gates and what is kept."""
    if quantize is None:
        return frozenset()
    routes = "router", "shared_gate"
    found = [name for name in _matrices(module) if name.rpartition(".")[2] not in routes]
    for pattern in keep:
        if not fnmatch.filter(found, pattern):
            raise ValueError(
                f"keep = {shown(pattern)} is none of the matrices, such as {found[0]} and"
                f' {found[-1]}; "*.in_proj.kernel" is all of that name'
            )
    kept = {name for pattern in keep for name in fnmatch.filter(found, pattern)}
    return frozenset(found) - kept


def quantize_named(module: nnx.Module, names: Collection[str]) -> None:
    """Gives these matrices of a module, which is changed, 8 bits, one at a time; not packed."""
    matrices = _matrices(module)
    if strange := sorted(set(names) - matrices.keys()):
        raise ValueError(f"{strange[0]:.80} is no matrix, and cannot have 8 bits")
    for name in names:
        part, own, matrix = matrices[name]
        setattr(part, own, matrix.quantized())


def quantized_names(module: nnx.Module) -> frozenset[str]:
    """The names of the matrices that have 8 bits."""
    return frozenset(name for name, (*_, each) in _matrices(module).items() if each.is_quantized)


def quantized(module: _Module, keep: Collection[str] = ()) -> _Module:
    """The module in 8 bits, packed if it was; the arrays of other weights are shared."""
    own = nnx.clone(module)
    was_packed = any(matrix.is_packed for *_, matrix in _matrices(own).values())
    quantize_named(own, to_quantize(own, keep=keep))
    if was_packed:
        pack(own)
    return own


def packed(module: _Module) -> _Module:
    """The module with its matrices packed for a CPU; the arrays of others are shared."""
    module = nnx.clone(module)
    pack(module)
    return module


def loaded_for(target: Any, head: _Module, quantize: str | None = None) -> _Module:
    """A head that was loaded for a target, which is changed: packed, if the target is."""
    quantize_named(head, to_quantize(head, quantize))
    if target.output_head.is_packed:
        pack(head)
    return head


def in_first(module: _Module) -> _Module:
    """The module with all its matrices unpacked; itself if they are."""
    if any(matrix.is_packed for *_, matrix in _matrices(module).values()):
        module = nnx.clone(module)
        for part, name, matrix in _matrices(module).values():
            setattr(part, name, matrix.canonical())
    return module


def named_weights(module: nnx.Module, *, matrices: bool = True) -> Iterator[tuple[str, Array]]:
    """The weights by their dotted names in order, one at a time, matrices unpacked and widened."""
    leaves = {dotted(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}
    for name, leaf in sorted(leaves.items()):
        if matrices or not isinstance(leaf, Matrix):
            yield name, (leaf.canonical() if isinstance(leaf, Matrix) else leaf)[...]


def weights_by_name(module: nnx.Module) -> dict[str, Array]:
    """All weights of `named_weights`."""
    return dict(named_weights(module))
