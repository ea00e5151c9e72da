"""Programs over a mesh.

A program is one `jax.shard_map` with both axes manual: inside, each device runs the code of one
device, with the model of its shard and its rows of the batch. The only collectives are those of
`Part`, which mixers, embedding and head call. Without a mesh programs are unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from stree_jax.mesh.partition import DATA, MODEL, ONE_DEVICE, Cut, Partition, Partitioned
from stree_jax.names import flatten


def on_mesh(specs: Callable[[Any], tuple[tuple[Any, ...], Any]], *, modules: int = 2) -> Any:
    """Decorates a function of a model: it runs over the model's mesh, if that has one.

    The function gets as many `modules`, the first of them the model, then arrays; a method gets
    `self` before, and static settings are keywords. `specs(model)` has the specs of the arrays, or
    functions from the arrays to them, and those of the result. The first array has the rows: if
    "data" does not divide them, every shard of the batch computes all.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **settings: Any) -> Any:
            at = next(i for i, part in enumerate(arguments) if isinstance(part, Partitioned))
            model, arrays = arguments[at], arguments[at + modules :]
            if model.partition.mesh is None:
                return function(*arguments, **settings)
            in_specs, out_specs = specs(model)
            in_specs = tuple(
                None if array is None else spec(array) if callable(spec) else spec
                for array, spec in zip(arrays, in_specs, strict=False)
            )
            if len(jax.tree.leaves(arrays)[0]) % model.partition.rows:
                in_specs, out_specs = in_every_shard((in_specs, out_specs))
            bound = functools.partial(function, *arguments[:at], **settings)
            models = arguments[at : at + modules]
            return over_mesh(model.partition, bound, models, arrays, in_specs, out_specs)

        return run

    return decorated


def over_mesh(
    partition: Partition,
    function: Callable[..., Any],
    modules: tuple[Any, ...],
    arrays: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """`function(*modules, *arrays)` on every device, with its shards of models and arrays."""
    if partition.mesh is None:
        return function(*modules, *arrays)
    leaves, structure = jax.tree.flatten(modules)

    def run(leaves: list[Any], arrays: tuple[Any, ...]) -> Any:
        shards = jax.tree.unflatten(structure, leaves)
        for model in jax.tree.leaves(shards, is_leaf=_is_model):
            if _is_model(model):
                model.partition = ONE_DEVICE
        return function(*shards, *arrays)

    # Replication cannot be checked: `pallas_call` does not say what its results depend on.
    specs = weight_specs(modules), in_specs
    program = jax.shard_map(
        run, mesh=partition.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
    )
    return program(leaves, arrays)


def in_every_shard(specs: Any) -> Any:
    """The specs of the same arrays, of which every shard of the batch has all rows."""

    def without_rows(spec: PartitionSpec) -> PartitionSpec:
        names = [None if name == DATA else name for name in spec]
        while names and names[-1] is None:  # P(None) is not P()
            names.pop()
        return PartitionSpec(*names)

    return jax.tree.map(without_rows, specs)


def _is_model(node: Any) -> bool:
    return isinstance(node, Partitioned)


def weight_specs(modules: Any) -> list[PartitionSpec]:
    """A spec for each leaf, in the order of `jax.tree.leaves`."""
    specs = []
    for node in jax.tree.leaves(modules, is_leaf=_is_model):
        if not _is_model(node):
            specs.append(PartitionSpec())
            continue
        table = node.cuts()
        for name, weight in flatten(node).items():
            # The last key of a weight's path is the value of its variable. Both arrays of a
            # quantised one are cut along the same axis.
            spec = spec_of(table.get(name.removesuffix(".value")))
            specs += [spec] * len(jax.tree.leaves(weight))
    return specs


def spec_of(cut: Cut | None) -> PartitionSpec:
    """The spec of a weight with this cut."""
    return PartitionSpec() if cut is None else PartitionSpec(*[None] * cut.axis, MODEL)
