"""Models on a mesh of devices, and programs over it.

A program is one `jax.shard_map` with both axes manual: inside, each device runs the code of one
device, with the model of its shard and its rows of the batch. The only collectives are those of
`stree_jax.partition.Shard`, which mixers, embedding and head call. Without a mesh programs
are unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stree_jax.models.lm import HybridLM, check_model
from stree_jax.models.names import dotted, flatten, unflatten
from stree_jax.partition import MODEL, Cut, Partition, check_mesh

__all__ = ["canonical_weights", "over_mesh", "partition_of", "shard", "spread"]


def shard(model: HybridLM, mesh: Mesh | None, *, replicate: bool = False) -> HybridLM:
    """The model on the devices of a mesh, each with its shard of the weights.

    If it is on devices of several processes, all of them call this.

    Args:
        model: a model on one device or on another mesh. It is not changed.
        mesh: a mesh from `make_mesh`; None: the default device.
        replicate: give every device the whole model. Meant for draft models: sharded, they would
            wait for collectives longer than they compute.

    Raises:
        ValueError: the model's sizes do not fit the mesh; names what would.
    """
    check_model(model)
    implementation = model._implementation
    if mesh is None:
        structure, wanted = HybridLM.abstract(
            model.config, dtype=model.dtype, implementation=implementation
        )
        canonical = canonical_weights(model)
        own = {name: jnp.asarray(read()) for name, read in canonical.items()}
        return nnx.merge(structure, unflatten(own, wanted))
    partition = partition_of(mesh, replicate)
    structure, wanted = HybridLM.abstract(
        model.config, dtype=model.dtype, implementation=implementation, partition=partition
    )
    table = model.config.cuts(partition.shards)
    spread_out = {
        name: spread(read(), table.get(name), partition)
        for name, read in canonical_weights(model).items()
    }
    return nnx.merge(structure, unflatten(spread_out, wanted))


def partition_of(mesh: Mesh, replicate: bool) -> Partition:
    """The partition of a model on a mesh.

    Raises:
        ValueError: `mesh` is not one of `make_mesh`.
    """
    mesh = check_mesh(mesh)
    return Partition(mesh, 1 if replicate else mesh.shape[MODEL])


def spread(values: np.ndarray, cut: Cut | None, partition: Partition, dtype: Any = None) -> Any:
    """A weight on the mesh. This host holds `values` and the shards of its own devices only.

    Args:
        values: the whole weight in canonical order.
        cut: the cut of this weight; None: every device has all of it.
        partition: the model's partition.
        dtype: dtype on the mesh; None: the dtype of `values`.
    """
    dtype = values.dtype if dtype is None else jnp.dtype(dtype)
    if cut is None:
        with np.errstate(over="ignore"):  # becomes infinite, which is refused by name
            whole = np.asarray(values, dtype)
        sharding = NamedSharding(partition.mesh, PartitionSpec())
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    columns = cut.columns(partition.shards)
    places = columns.shape[1]
    shape = list(values.shape)
    shape[cut.axis] = columns.size

    def part(index: Any) -> np.ndarray:
        own = columns[(index[cut.axis].start or 0) // places]
        with np.errstate(over="ignore"):
            return np.take(values, own, axis=cut.axis).astype(dtype)

    sharding = NamedSharding(partition.mesh, _spec(cut))
    return jax.make_array_from_callback(tuple(shape), sharding, part)


def canonical_weights(model: HybridLM) -> dict[str, Callable[[], np.ndarray]]:
    """By name, a function that copies the weight to the host, whole and in canonical order.

    If shards are on devices of other processes, all processes call these in the same order.
    """
    shards = 1 if model.partition is None else model.partition.shards
    table = model.config.cuts(shards)

    def reader(name: str, weight: jax.Array) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            if weight.is_fully_addressable or weight.is_fully_replicated:
                values = np.asarray(weight)
            else:
                values = multihost_utils.process_allgather(weight, tiled=True)
            if name not in table:
                return values
            return np.take(values, table[name].canonical(shards), axis=table[name].axis)

        return read

    weights = flatten(nnx.to_pure_dict(nnx.state(model)))
    return {name: reader(name, weight) for name, weight in weights.items()}


def over_mesh(
    partition: Partition,
    function: Callable[..., Any],
    modules: tuple[Any, ...],
    arrays: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """`function(*modules, *arrays)` on every device, with its shards of both.

    Args:
        partition: partition of the model that runs.
        function: gets models of one shard, which have no mesh and all-reduce over "model".
        modules: models, or pytrees of them; their other arrays are on every device.
        arrays: global arrays.
        in_specs: specs of `arrays`, as for `jax.shard_map`.
        out_specs: specs of the result.
    """
    leaves, structure = jax.tree.flatten(modules)

    def run(leaves: list[Any], arrays: tuple[Any, ...]) -> Any:
        shards = jax.tree.unflatten(structure, leaves)
        for model in jax.tree.leaves(shards, is_leaf=_is_model):
            if _is_model(model):
                model.partition = None
        return function(*shards, *arrays)

    # Replication cannot be checked: `pallas_call` does not say what its results depend on.
    return jax.shard_map(
        run,
        mesh=partition.mesh,
        in_specs=(weight_specs(modules), in_specs),
        out_specs=out_specs,
        check_vma=False,
    )(leaves, arrays)


def _is_model(node: Any) -> bool:
    return isinstance(node, HybridLM)


def weight_specs(modules: Any) -> list[PartitionSpec]:
    """A spec for each leaf, in the order of `jax.tree.leaves`."""
    specs = []
    for node in jax.tree.leaves(modules, is_leaf=_is_model):
        if not _is_model(node):
            specs.append(PartitionSpec())
            continue
        table = {} if node.partition is None else node.config.cuts(node.partition.shards)
        for path, _ in jax.tree.leaves_with_path(node):
            specs.append(_spec(table.get(_name(path))))
    return specs


def _name(path: tuple[Any, ...]) -> str:
    """The name of a weight, the last key of whose path is the value of its variable."""
    return dotted(path).removesuffix(".value")


def _spec(cut: Cut | None) -> PartitionSpec:
    return PartitionSpec() if cut is None else PartitionSpec(*[None] * cut.axis, MODEL)
