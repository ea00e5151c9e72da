"""What a layer of each kind adds to a program: the counts of one more of them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import stree_jax as st


class Program(Protocol):
    """A compiled program."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Of a step, such as its launches."""
        ...

    @property
    def kernels(self) -> Counter[str]:
        """What a step runs, by name."""
        ...


AnyProgram = TypeVar("AnyProgram", bound=Program)


def with_layers(config: st.ModelConfig, layers: tuple[str, ...]) -> st.ModelConfig:
    """The same model with other layers; each use of a shared block has its own weights."""
    parts, shared = {}, config.shared
    if shared is not None:
        parts["shared"] = dataclasses.replace(shared, num_blocks=layers.count("shared"))
    return config.with_layers(layers, **parts)


def one_of_each(config: st.ModelConfig) -> tuple[str, ...]:
    """A layer of each kind; a shared block is followed by a Mamba-2 layer, as in the model."""
    kinds = dict.fromkeys(config.kinds)
    if "shared" not in kinds:
        return tuple(kinds)
    assert {*kinds} == {"shared", "mamba2"}
    return ("shared", "mamba2", "mamba2")


def shortened(config: st.ModelConfig) -> st.ModelConfig:
    """The model with one layer of each kind."""
    return with_layers(config, one_of_each(config))


def by_layer(
    config: st.ModelConfig, build: Callable[[st.ModelConfig], AnyProgram]
) -> tuple[dict[str, Any], Iterable[AnyProgram]]:
    """Counts of a layer of each kind, and of the whole model as their sum.

    For steps with our kernels on a GPU the sum is what `--whole` finds.

    Returns:
        The row, and the programs behind it.
    """
    # Twice, since a first layer fuses with the embedding.
    few = one_of_each(config) * 2
    base = build(with_layers(config, few))
    layers: dict[str, dict[str, Any]] = {}
    longer: dict[str, AnyProgram] = {}
    for kind in sorted({*few}, key=lambda kind: (kind == "shared", few.index(kind))):
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
    more = {kind: config.kinds.count(kind) - few.count(kind) for kind in layers}
    step = {
        name: count + sum(more[kind] * layers[kind][name] for kind in layers)
        for name, count in base.counts.items()
    }
    return {"layers": layers, "step": step}, (base, *longer.values())


def outside_of_layers(
    config: st.ModelConfig, build: Callable[[st.ModelConfig], AnyProgram]
) -> tuple[dict[str, float], Iterable[AnyProgram]]:
    """What a step of the loop runs beside the target's layers, by name.

    The layers' part is the difference to a target with every layer twice.

    Returns:
        The counts, below 0 where XLA gave a layer's kernels another name, as it names them by what
        it fused; and the programs behind them.
    """
    longer = dataclasses.replace(config, layers=config.layers * 2)
    once, twice = build(config), build(longer)
    names = sorted(once.kernels | twice.kernels)
    counts = {name: 2 * once.kernels[name] - twice.kernels[name] for name in names}
    return {name: count for name, count in counts.items() if count}, (once, twice)
