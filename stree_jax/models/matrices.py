"""Weights that rows are multiplied by: how each is stored, multiplied, read and written.

A model that is made has its matrices `[in, out]`, and its embedding and output head `[V, M]`. A
model that is loaded on a CPU has them packed: in blocks of columns, which our own products read in
order (`pallas_kernels.matmul`). Those products take and give float32, so the activations of a
packed model are float32 whatever the type of its weights.

A quantised matrix has 8 or 4 bits a weight and a scale for 32 inputs of a column. A CPU has it
packed too, and rounds rows to 8 bits when it multiplies. A GPU reads the 8 bits in our own product,
which multiplies bfloat16 too. Elsewhere it is widened inside the program, where it is multiplied.
Routers stay as they are: another expert is another text.

Everything that reads weights by name gets the order of unpacked models, from `in_first`. A new
storage is a pytree with arrays, and here a class of answers and a line of `STORAGES`.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from pallas_kernels.matmul import (
    GROUP,
    KINDS,
    PackedMatrix,
    QuantizedMatrix,
    matmul,
    partial_sums,
    rows,
)
from pallas_kernels.numerics import Deferred, Product, contract, gated, total
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import check_names
from stree_jax.mesh.partition import WHOLE, Part
from stree_jax.messages import shown
from stree_jax.names import dotted


class Matrix(nnx.Param):
    """A matrix `[I, O]`, several `[E, I, O]`, or with `axis=-1` a table `[V, M]` of tokens."""

    @property
    def storage(self) -> "Storage":
        """How it is stored: says how it is multiplied, read and written."""
        value = self.get_value()
        return STORAGES.get(type(value), Storage)(value, self.get_metadata("axis", -2))

    def __getitem__(self, key: Any) -> Any:
        """Of the matrix as an array, unpacked and widened."""
        return self.storage.array()[key]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.storage.shape

    def product(
        self,
        x: Float[Array, "*rows I"] | Deferred,
        *,
        wide: bool = False,
        implementation: str | None = None,
    ) -> Float[Array, "..."]:
        """Rows times the matrix, times each of several, or times the rows of a table.

        Products are in the dtype of the storage, or `wide`: float32. An implementation is that of
        `matmul`; packed matrices run native code.
        """
        return total(self.product_in_parts(x, wide=wide, implementation=implementation))

    def product_in_parts(
        self,
        x: Float[Array, "*rows I"] | Deferred,
        *,
        wide: bool = False,
        gate: str | None = None,
        implementation: str | None = None,
    ) -> Product:
        """`product` for a kernel, which adds up its parts while it loads them.

        With a gate, an activation: of the first half of the columns, times the second half.
        """
        return self.storage.product(x, wide, implementation, gate)

    def by_head(self, x: Float[Array, "*rows E I"]) -> Float[Array, "*rows E O"]:
        """Rows of several heads, each times the matrix of its own, in the dtype of the storage."""
        return self.storage.by_head(x)

    def rows(self, index: Int[Array, "B T"], shard: Part = WHOLE) -> Float[Array, "B T M"]:
        """Rows of a table."""
        return self.storage.rows(index, shard)


@dataclasses.dataclass(frozen=True)
class Storage:
    """An array, float32 or bfloat16. The other storages differ in some of the answers."""

    values: Any
    axis: int  # of inputs

    is_packed: ClassVar[bool] = False
    # Products add up a row in one order, whatever the other rows: layers then run ops that do too.
    sums_in_one_order: ClassVar[bool] = False

    @property
    def kind(self) -> str | None:
        """Of weights in so many bits: "int8" or "int4". None: they have a float type."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of products that are not wide."""
        return jnp.dtype(self.values.dtype)

    def array(self) -> Array:
        """The matrix as an array."""
        return self.values

    def operand(self, x: Array) -> tuple[Array, Any]:
        """Rows and matrix as an op takes them: an array or a `PackedMatrix`."""
        return x, self.values

    def product(
        self, x: Any, wide: bool, implementation: str | None, gate: str | None = None
    ) -> Product:
        """See `Matrix`; float32 rows and several matrices are XLA's."""
        dtype = self.dtype
        if not wide and x.dtype != dtype:
            x = total(x).astype(dtype)
        is_narrow = x.dtype == dtype == jnp.bfloat16 and len(self.shape) == 2
        return partial_sums(
            x,
            self.values,
            axis=self.axis,
            dtype=jnp.float32 if wide else dtype,
            gate=gate,
            implementation=implementation if is_narrow else "xla",
        )

    def by_head(self, x: Array) -> Array:
        """See `Matrix`."""
        rows, matrices = self.operand(x.astype(self.dtype))
        return contract("...hi,hio->...ho", rows, matrices).astype(self.dtype)

    def rows(self, index: Array, shard: Part) -> Array:
        """Rows of a table, of which a shard has some."""
        return shard.rows_of(self.values, index)

    def cut(self, start: int) -> "Storage":
        """Its columns from `start` on."""
        columns = jax.tree.map(lambda array: array[..., start:], self.values)
        return dataclasses.replace(self, values=columns)

    def norms_of_sequences(self, implementation: str | None) -> str | None:
        """The implementation of norms of whole sequences in a model with such matrices.

        XLA's of 512 rows is one launch on a GPU too, and by its cost model moves no more bytes.
        """
        return implementation if dispatch.wants_bits() else "xla"

    def cleared(self, x: Array, valid: Array) -> Array:
        """Rows as its products take them: with zeros on padding, where that is skipped."""
        return x

    def unpacked(self) -> Any:
        """What is stored elsewhere than on a CPU."""
        return self.values

    def packed(self) -> Any:
        """What is stored on a CPU."""
        return PackedMatrix.pack(_turned(self.values, self.axis))

    def quantized(self, kind: str) -> QuantizedMatrix:
        """The matrix in a kind, on the default device; of an abstract one abstract."""
        matrix = QuantizedMatrix.of(self.values, self.axis, kind)
        is_abstract = isinstance(self.values, jax.ShapeDtypeStruct)
        return matrix if is_abstract else jax.tree.map(jnp.asarray, matrix)


class FewBits(Storage):
    """A `QuantizedMatrix`, which is widened inside the program."""

    @property
    def kind(self) -> str:
        return self.values.kind

    def array(self) -> Array:
        return self.values.wide()

    def operand(self, x: Array) -> tuple[Array, Array]:
        return self.values.wide_for(x)

    def quantized(self, kind: str) -> QuantizedMatrix:
        if kind != self.kind:
            raise ValueError(f"it is {self.kind} already, not {kind}: start from the original")
        return self.values


class Packed(Storage):
    """A `PackedMatrix`, which a CPU multiplies in one order of sums and adds in float32.

    That of a table is its transpose, so tokens are columns.
    """

    is_packed = sums_in_one_order = True

    @property
    def kind(self) -> str | None:
        return self.values.kind

    def norms_of_sequences(self, implementation: str | None) -> str | None:
        return implementation

    def cleared(self, x: Array, valid: Array) -> Array:
        return jnp.where(valid, x, 0)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[:: -1 if self.axis == -1 else 1]

    def array(self) -> Array:
        return _turned(self.values.canonical(), self.axis)

    def product(
        self, x: Any, wide: bool, implementation: str | None, gate: str | None = None
    ) -> Array:
        if gate is not None:
            return gated(gate, self.product(x, wide, implementation))
        x = total(x)
        if len(self.values.shape) == 2:
            return matmul(x, self.values)
        return self.by_head(jnp.repeat(x[..., None, :], self.values.shape[0], axis=-2))

    def by_head(self, x: Array) -> Array:
        *rows, several, inputs = x.shape
        which = jnp.tile(jnp.arange(several, dtype=jnp.int32), math.prod(rows))
        y = matmul(x.reshape(-1, inputs), self.values, which)
        return y.reshape(*rows, several, -1)

    def rows(self, index: Array, shard: Part) -> Array:
        return rows(self.values, index)

    def cut(self, start: int) -> "Packed":
        return Packed(self.values.cut(start, self.values.columns), self.axis)

    def unpacked(self) -> Any:
        values = self.values.quantized() if self.kind else self.values.canonical()
        return jax.tree.map(_copied, _turned(values, self.axis))

    def packed(self) -> Any:
        return self.values


STORAGES: dict[type, type[Storage]] = {QuantizedMatrix: FewBits, PackedMatrix: Packed}


def _turned(matrix: Any, axis: int) -> Any:
    """A table as a matrix, or the reverse; a matrix as it is."""
    return matrix.T if axis == -1 else matrix


def _copied(array: Array) -> Array:
    """In the order of memory that any other array has; a program chooses its own."""
    if isinstance(array, jax.core.Tracer):
        return array
    return jnp.asarray(np.ascontiguousarray(array))


_Module = TypeVar("_Module", bound=nnx.Module)


def pack(module: nnx.Module) -> None:
    """Packs the matrices of a module, which is changed, one at a time.

    An embedding that is no output head stays as it is: it is only read by rows.
    """
    for part, name, matrix in _matrices(module).values():
        if name != "embedding" or getattr(part, "head", None) is None:
            setattr(part, name, matrix.replace(matrix.storage.packed()))


def _matrices(module: nnx.Module) -> dict[str, tuple[nnx.Module, str, Matrix]]:
    """The matrices by their dotted names, each as an attribute of a module, which may be set."""
    return {
        dotted((*path, name)): (part, name, leaf)
        for path, part in nnx.iter_modules(module)
        for name, leaf in vars(part).items()
        if isinstance(leaf, Matrix)
    }


def check_quantize(quantize: str | Any, keep: Collection[str] | Any = ()) -> None:
    """Refuses unknown ways to quantise, and names to keep without one."""
    kind, colon, _ = quantize.partition(":") if isinstance(quantize, str) else (quantize, "", "")
    if kind not in (None, *KINDS) or (colon and kind != "int4"):
        raise ValueError(
            f'quantize must be "int8", "int4", "int4:NAME,NAME" or None, got {shown(quantize)}'
        )
    if check_names("keep", keep) and quantize is None:
        raise ValueError(f"keep = {shown(keep)} goes with quantize: without it all weights stay")


def to_quantize(
    module: nnx.Module, quantize: str | None = "int8", keep: Collection[str] = ()
) -> dict[str, str]:
    """The kinds of the matrices that can have few bits, but for routers, gates and what is kept.

    In "int4" embeddings and output heads have 8 bits unless they are named behind a colon, and so
    have matrices whose inputs are no groups of 32.
    """
    kind, _, listed = (quantize or "").partition(":")
    routes = "router", "shared_gate"
    matrices = {name: matrix.storage for name, (*_, matrix) in _matrices(module).items()}
    names = [name for name in matrices if name.rpartition(".")[2] not in routes if kind]

    def chosen(what: str, patterns: Collection[str]) -> set[str]:
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"{what} = {shown(pattern)} is none of the matrices, such as {names[0]} and"
                    f' {names[-1]}; "*.in_proj.kernel" is all of that name'
                )
        return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}

    kept, named = chosen("keep", keep), chosen(kind, listed.split(",") if listed else ())

    def fits(name: str) -> bool:
        storage, is_table = matrices[name], name.rpartition(".")[2] in ("embedding", "head")
        return storage.shape[storage.axis] % GROUP == 0 and (name in named or not is_table)

    return {name: kind if fits(name) else "int8" for name in names if name not in kept}


def quantize_named(module: nnx.Module, kinds: Mapping[str, str]) -> None:
    """Gives matrices of a module, which is changed, their kinds, one at a time; not packed."""
    matrices = _matrices(module)
    if strange := sorted(kinds.keys() - matrices.keys()):
        raise ValueError(f"{strange[0]:.80} is no matrix, and cannot have few bits")
    for name, kind in kinds.items():
        part, attribute, matrix = matrices[name]
        unpacked = matrix.replace(matrix.storage.unpacked())
        try:
            setattr(part, attribute, matrix.replace(unpacked.storage.quantized(kind)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def quantized_kinds(module: nnx.Module) -> dict[str, str]:
    """The kinds of the matrices that have few bits, by name."""
    matrices = _matrices(module).items()
    return {name: kind for name, (*_, matrix) in matrices if (kind := matrix.storage.kind)}


def loaded_for(target: Any, head: _Module, quantize: str | None = None) -> _Module:
    """A head that was loaded for a target, which is changed: packed, if the target is."""
    quantize_named(head, to_quantize(head, quantize))
    if target.output_head.storage.is_packed:
        pack(head)
    return head


def in_first(module: _Module) -> _Module:
    """The module with all its matrices unpacked; itself if they are."""
    if any(matrix.storage.is_packed for *_, matrix in _matrices(module).values()):
        module = nnx.clone(module)
        for part, name, matrix in _matrices(module).values():
            setattr(part, name, matrix.replace(matrix.storage.unpacked()))
    return module


def named_weights(module: nnx.Module, *, matrices: bool = True) -> Iterator[tuple[str, Array]]:
    """The weights by their dotted names in order, one at a time, matrices unpacked and widened."""
    leaves = {dotted(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}
    for name, leaf in sorted(leaves.items()):
        if matrices or not isinstance(leaf, Matrix):
            yield name, leaf[...]
