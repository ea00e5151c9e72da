"""How a model is sharded: the collectives of a shard, and its columns of each weight.

A mesh has two axes. "data" splits the batch, "model" splits heads, channels and vocabulary. Each
shard along "model" is an ordinary model of a *local* config, with `1 / shards` of the heads. A
weight's equal slices are the shards' weights, because its columns are stored *shard-major*: those
of the first shard, then those of the second. `Cut.columns` is that order, and `Cut.canonical` its
inverse.

Worked example, 2 shards of the columns `[gate | up]` of an MLP with 4 channels:

    canonical     g0 g1 g2 g3 u0 u1 u2 u3
    shard-major   g0 g1 u0 u1 | g2 g3 u2 u3

Groups of B and C, and heads of keys and values, may be fewer than shards: then neighbours hold the
same ones, and shard-major weights have more columns than canonical ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.messages import shown

DATA, MODEL = "data", "model"
ROWS = PartitionSpec(DATA)  # spec of arrays with the batch axis first
Segments = tuple[tuple[int, int], ...]  # of columns: units and their size, as heads and channels


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a model lies on devices: here all of it on one, `ONE_DEVICE`, unless it has a mesh."""

    mesh: Mesh | None = None
    shards: int = 1  # of the weights along "model"

    @property
    def axis(self) -> str | None:
        """The mesh axis that splits heads and channels of the states; None: they are replicated."""
        return MODEL if self.shards > 1 else None

    @property
    def rows(self) -> int:
        """Shards of the batch; they must divide the number of rows."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    def spec_of(self, num_rows: int) -> PartitionSpec:
        """The spec of as many rows; every shard has all of them if it cannot have an equal part."""
        return PartitionSpec() if num_rows % self.rows else ROWS

    def put(self, tree: Any, spec: PartitionSpec = ROWS) -> Any:
        """Puts arrays that every process has on the mesh; those already there are kept."""
        mesh = self.mesh
        if mesh is None:
            return tree

        def put(leaf: Any) -> Any:
            place = getattr(leaf, "sharding", None)
            if isinstance(place, NamedSharding) and place.mesh == mesh:
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = put(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            values = np.asarray(leaf)
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

        return jax.tree.map(put, tree)

    def put_rows(self, rows: Any) -> Any:
        """`put` of arrays with as many rows as the first, which may be too few to be cut."""
        return self.put(rows, self.spec_of(len(jax.tree.leaves(rows)[0])))

    def row_places(self, rows: Sequence[int], num_rows: int) -> np.ndarray:
        """For each shard of the batch: where these rows are in it; past its end if they are not."""
        num_local = num_rows // self.rows
        first = num_local * np.arange(self.rows)[:, None]
        places = np.asarray(rows) - first
        is_local = (places >= 0) & (places < num_local)
        return np.where(is_local, places, num_local).astype(np.int32).reshape(-1)


ONE_DEVICE = Partition()


class Part:
    """The part of a model on one device: here all of it, without collectives."""

    shards: int = 1

    def total(self, x: Array) -> Array:
        """All-reduces in float32; the result has the dtype of `x`."""
        return x

    def all_gather(self, x: Array) -> Array:
        """All-gathers along the last axis."""
        return x

    def rows_of(self, table: Any, index: Array) -> Array:
        """`table[index]` for a table whose rows are sharded, perhaps a `QuantizedMatrix`."""
        return table[index]

    def own_choices(self, weights: Array, chosen: Array, held: int) -> tuple[Array, Array]:
        """Chosen experts as indices among this shard's `held` ones; other experts get weight 0."""
        return weights, chosen

    def broadcast_from_first(self, tree: Any) -> Any:
        """Broadcasts shard 0's integers and booleans `[B, ...]`."""
        return tree


WHOLE = Part()


@dataclasses.dataclass(frozen=True)
class Shard(Part):
    """One of several equal shards along "model"; only inside `jax.shard_map`."""

    shards: int

    def total(self, x: Array) -> Array:
        return lax.psum(x.astype(jnp.float32), MODEL).astype(x.dtype)

    def all_gather(self, x: Array) -> Array:
        return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    def rows_of(self, table: Any, index: Array) -> Array:
        local, is_local = self._among_local(index, table.shape[0])
        return lax.psum(jnp.where(is_local[..., None], table[local], 0), MODEL)

    def own_choices(self, weights: Array, chosen: Array, held: int) -> tuple[Array, Array]:
        local, is_local = self._among_local(chosen, held)
        return jnp.where(is_local, weights, 0), local

    def _among_local(self, index: Array, count: int) -> tuple[Array, Array]:
        """Indices among this shard's `count` units, 0 if it lacks one; and whether it has each."""
        local = index - lax.axis_index(MODEL) * count
        is_local = (local >= 0) & (local < count)
        return jnp.where(is_local, local, 0), is_local

    def broadcast_from_first(self, tree: Any) -> Any:
        """See `Part`: two GPUs may round differently, but must branch in the same way."""
        leaves, structure = jax.tree.flatten(tree)
        assert all(leaf.dtype in (jnp.int32, jnp.bool_) for leaf in leaves)
        rows = [leaf.astype(jnp.int32).reshape(len(leaf), -1) for leaf in leaves]
        packed = jnp.concatenate(rows, axis=1)
        packed = lax.psum(jnp.where(lax.axis_index(MODEL) == 0, packed, 0), MODEL)
        ends = np.cumsum([leaf.size // len(leaf) for leaf in leaves])[:-1].tolist()
        parts = zip(leaves, jnp.split(packed, ends, axis=1), strict=True)
        new = [part.reshape(leaf.shape).astype(leaf.dtype) for leaf, part in parts]
        return jax.tree.unflatten(structure, new)


class Cut(NamedTuple):
    """How a weight is sharded."""

    axis: int
    segments: Segments

    def columns(self, shards: int) -> np.ndarray:
        """The canonical columns of each shard: `[shards, columns]`."""
        rows = []
        for shard in range(shards):
            start = 0
            row: list[np.ndarray] = []
            for units, size in self.segments:
                held = _units_of(shard, units, shards)
                row.append(np.arange(start + held.start * size, start + held.stop * size))
                start += units * size
            rows.append(np.concatenate(row))
        return np.stack(rows)

    def of_groups(self, size: int, shards: int) -> "Cut":
        """The cut of an array that has one column for `size` columns, such as scales."""
        segments = []
        for units, width in self.segments:
            if width % size == 0:
                segments.append((units, width // size))
            elif units % shards == 0 and units // shards * width % size == 0:
                segments.append((units * width // size, 1))
            else:
                raise ValueError(
                    f"{units} times {width} inputs on {shards} shards are no multiples of {size},"
                    " which have one scale"
                )
        return Cut(self.axis, tuple(segments))

    def canonical(self, shards: int) -> np.ndarray:
        """The (first) index of each canonical column in shard-major order."""
        return np.unique(self.columns(shards), return_index=True)[1]


def make_mesh(*, data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data * model` devices, over all processes.

    Args:
        data: number of shards of the batch; they run independently.
        model: number of shards of a model's heads and channels, with collectives in every layer.
            They are neighbours in `jax.devices()`.

    Raises:
        ValueError: not positive integers, or there are not as many devices; several processes
            must use all of their devices.
    """
    for name, size in (("data", data), ("model", model)):
        check_int(name, size, 1)
    count = jax.device_count()
    if data * model > count or (data * model < count and jax.process_count() > 1):
        needed = shown(data * model)
        there = "there is 1" if count == 1 else f"there are {count}"
        if jax.process_count() > 1:
            there += f" in {jax.process_count()} processes"
        elif jax.default_backend() == "cpu":
            there += (
                f"; XLA_FLAGS=--xla_force_host_platform_device_count={needed} in the environment"
                " makes a CPU that many"
            )
        raise ValueError(
            f"data = {shown(data)} times model = {shown(model)} is {needed} devices, and {there}"
        )
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices)


def partition_of(mesh: Mesh | Any | None, replicate: bool) -> Partition:
    """The partition of a model on a mesh of `make_mesh`; None: on one device."""
    if mesh is None:
        return ONE_DEVICE
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must come from make_mesh(data=, model=), got {shown(mesh)}")
    if {*mesh.axis_names} != {DATA, MODEL}:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}; it needs {(DATA, MODEL)}, of which one may"
            " have size 1"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"the mesh has axes of types {mesh.axis_types}; make them all Auto")
    return Partition(mesh, 1 if replicate else mesh.shape[MODEL])


def _units_of(shard: int, units: int, shards: int) -> range:
    """The units of a shard: an equal slice, or one unit that several shards hold."""
    if units % shards == 0:
        count = units // shards
        return range(shard * count, (shard + 1) * count)
    assert shards % units == 0  # `ModelConfig.local` refuses the rest
    return range(shard * units // shards, shard * units // shards + 1)


class Partitioned(nnx.Module):
    """A model that may lie on a mesh."""

    config: Any
    partition: Partition = ONE_DEVICE  # inside of a program too
    shard: Part = WHOLE  # what the running program has of it

    def on(self, partition: Partition) -> tuple[nnx.GraphDef, dict]:
        """This model without weights, with another partition, as `HybridLM.abstract` gives it."""
        raise NotImplementedError

    def in_first(self) -> "Partitioned":
        """This model with all matrices `[in, out]`, as `config.cuts` counts their axes."""
        return self

    def cuts(self) -> dict[str, Cut]:
        """The cut of each weight by name; weights without one are replicated."""
        return self.config.cuts(self.partition.shards)
