"""The counts that a layer of each kind adds to a program; layers of one kind may differ.

Programs have `counts` of a step, such as its launches, and `kernels`, a `Counter` of their names.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import stree_jax as st


def named_layers(config: st.ModelConfig) -> dict[str, Any]:
    """The layers that occur, by their kinds; a second one of a kind is "-other"."""
    layers: dict[str, Any] = {}
    for layer in config.distinct_layers:
        name = layer.kind
        while name in layers:
            name += "-other"
        layers[name] = layer
    return layers


def with_layers(config: st.ModelConfig, names: tuple[str, ...]) -> st.ModelConfig:
    """The same model with other layers; each use of a shared block has its own weights."""
    layers = named_layers(config)
    if "shared" in names:
        layers["shared"] = dataclasses.replace(config.shared, num_blocks=names.count("shared"))
    return config.with_layers([layers[name] for name in names])


def one_of_each(config: st.ModelConfig) -> tuple[str, ...]:
    """A layer of each name; a shared block is followed by a Mamba-2 layer, as in the model."""
    names = tuple(named_layers(config))
    if "shared" not in names:
        return names
    assert {*names} == {"shared", "mamba2"}
    return ("shared", "mamba2", "mamba2")


def shortened(config: st.ModelConfig) -> st.ModelConfig:
    """The model with one layer of each name."""
    return with_layers(config, one_of_each(config))


def by_layer(
    config: st.ModelConfig, build: Callable[[st.ModelConfig], Any]
) -> tuple[dict[str, Any], Iterable[Any]]:
    """Counts of a layer of each name, of the whole model as their sum, and the programs behind it.

    For steps with our kernels on a GPU the sum is what `--whole` finds.
    """
    # Twice, since a first layer fuses with the embedding.
    few = one_of_each(config) * 2
    base = build(with_layers(config, few))
    layers: dict[str, dict[str, Any]] = {}
    longer: dict[str, Any] = {}
    for kind in sorted(dict.fromkeys(few), key=lambda kind: kind == "shared"):
        # Inserted before the last layer of its kind, so that it has the usual neighbours.
        new, without = (kind,), base
        if kind == "shared":  # with the layer after it, which the program without it has, too
            new, without = ("shared", "mamba2"), longer["mamba2"]
        last = len(few) - 1 - few[::-1].index(kind)
        longer[kind] = build(with_layers(config, (*few[:last], *new, *few[last:])))
        layers[kind] = {
            name: count - without.counts[name] for name, count in longer[kind].counts.items()
        }
        layers[kind]["kernels"] = dict(sorted((longer[kind].kernels - without.kernels).items()))
    named = named_layers(config)
    more = {kind: config.layers.count(named[kind]) - few.count(kind) for kind in layers}
    step = {
        name: count + sum(more[kind] * layers[kind][name] for kind in layers)
        for name, count in base.counts.items()
    }
    return {"layers": layers, "step": step}, (base, *longer.values())


def outside_of_layers(
    config: st.ModelConfig, build: Callable[[st.ModelConfig], Any]
) -> tuple[dict[str, float], Iterable[Any]]:
    """Counts of a step of the loop beside the target's layers, by name, and the programs.

    The layers' part is the difference to a target with every layer twice. A count is below 0 where
    XLA gave a layer's kernels another name, as it names them by what it fused.
    """
    longer = dataclasses.replace(config, layers=config.layers * 2)
    once, twice = build(config), build(longer)
    names = sorted(once.kernels | twice.kernels)
    counts = {name: 2 * once.kernels[name] - twice.kernels[name] for name in names}
    return {name: count for name, count in counts.items() if count}, (once, twice)
